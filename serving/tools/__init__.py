"""Tools that a model may call: how a family of models writes calls, and how they are read back.

`formats.py` has the ways of writing and makes grammars of them, `scanner.py` and `calls.py` read
what a model wrote. Knows no transport and no engine.
"""
