"""Evaluation: is it exact, does it pay, why, and where not."""
