"""The verbs of the command line, one per file.

The docstring of a file is its help: one line, then the details. The file defines
`arguments(parser)` and `run()`, which returns an exit code, and contains all slow imports."""
