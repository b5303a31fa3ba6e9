"""Speculative decoding runtime: any transformers decoder, any drafter, the exact same text."""
