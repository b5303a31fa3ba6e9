"""The target's signals on disk, for answers that exist: own, a server's, or a data set's.

- manifest.py what a folder of signals was made with, and whether that is what is wanted now
- shards.py   its files, each complete or invisible, named by what is in them
- write.py    the job: says beforehand how large and how long, resumable
- read.py     a folder, mapped into memory, put to the answers that it belongs to

`python -m distill.cache` runs the job alone. Which form there is to choose: signal_forms.py.
"""
