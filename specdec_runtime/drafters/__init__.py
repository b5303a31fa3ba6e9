"""Drafter kinds, one module each; all behind the protocol of draft.py."""
