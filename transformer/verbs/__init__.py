"""The verbs of the command line, one per file.

The docstring of a file is its help: one line, then the details. The file defines
`arguments(parser)` and `run()`, which takes the arguments and overrides and returns an exit code.
Slow imports are inside `run()`."""
