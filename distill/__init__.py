"""Distillation: from prompts and a target to what the drafter learns from."""
