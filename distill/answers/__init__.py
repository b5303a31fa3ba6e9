"""Answers: the target answers the prompts, and what it wrote is what the drafter learns from.

- config.py   how answers are written
- manifest.py what an answer folder was written with, and whether that is what is wanted now
- shards.py   the files of a folder, each complete or invisible
- authors.py  who writes: the runtime (writer.py, speculative_writer.py) or a server
- served.py   a server's texts, with exact token ids; client.py talks to it
- write.py    the job: resumable, exactly once per prompt, bounded by tokens and time
- dataset.py  a finished folder as training examples

`python -m distill.answers` runs the job alone.
"""
