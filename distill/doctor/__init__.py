"""Looks at the data before any training: what is trained on, and what is wrong with it.

- job.py             the command's settings; from prompts or answers to findings and pictures
- rows.py            what there is to look at: prompts to be answered, or a folder of answers
- template_checks.py, tokenizer_checks.py, data_checks.py   each finding with its remedy
- statistics.py      numbers of tokens, lengths, padding, vocabulary
- estimate.py        steps and time
- terminal.py, page.py   shown in colour

`python -m distill.doctor` runs it.
"""
