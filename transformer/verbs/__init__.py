"""The verbs of the command line, one a file: what it is about in a line (ABOUT) and at length (DETAIL), its arguments, and `run(args, overrides)`,
which returns an exit code. What takes long to import is imported when it runs.
"""
