"""The verbs of the command line, one per file.

A file defines ABOUT (one line of help), DETAIL (the full help), `arguments(parser)` and `run()`,
which takes the arguments and overrides and returns an exit code. Slow imports are inside `run()`.
"""
