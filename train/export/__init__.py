"""Exporting: a drafter as the folder that a serving engine reads, checked and proven to be the same.

`formats.py` is the list of formats, one module each; `rules.py` and `eagle3_rules.py` are the
engines' rules as code; `parity.py` loads a folder in another process and compares what it proposes.
"""
