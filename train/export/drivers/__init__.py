"""One script an engine, run by the interpreter of that engine's own environment; see engines.py.

None of them imports anything of ours. Each reads a request in JSON on standard input and writes one
line that starts with RESULT and holds the answers, one list a temperature.
"""
