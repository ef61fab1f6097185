"""The command line as a process: `python -m transformer` or the installed script `transformer`.

Ctrl-C ends the process at any time, with one line and exit code 130. Errors that one line describes
print a traceback only if TRANSFORMER_TRACEBACKS=1; all other errors always do."""

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import traceback

from transformer.errors import tracebacks
from transformer.output import flush, open_closed_streams, suppress_redundant_tracebacks


def run() -> None:
    """Runs the command of `sys.argv` and exits with its code."""
    gc.set_threshold(50_000, 10, 10)  # imports and traces create many objects and little garbage
    open_closed_streams()
    if not tracebacks():
        suppress_redundant_tracebacks()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have ignored it
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = functools.partial(_interrupt_again, sys.unraisablehook)
    from transformer.cli import main

    try:
        code = main()
    except Exception:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        code = 1
    finally:  # also after --help, which raises SystemExit
        flush()
    if code not in (0, 143):
        # Not sys.exit: Orbax threads may block it, and Python kills itself with SIGINT after an
        # interrupt in exec(). All results are on disk. With 143, several processes exit normally.
        os._exit(code)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to clean up
    sys.exit(code)


def _interrupt(signum, frame) -> None:
    """Raises KeyboardInterrupt, or ends the process if an exception would do harm: the import of an
    extension module may crash, and threads that serve an event loop (as in Orbax) wait forever."""
    for caller, _ in traceback.walk_stack(frame) if frame else ():
        file = caller.f_code.co_filename
        if file.startswith("<frozen importlib") or os.path.dirname(file).endswith("/asyncio"):
            with contextlib.suppress(OSError):
                os.write(2, b"\ninterrupted\n")
            os._exit(130)
    raise KeyboardInterrupt


def _interrupt_again(previous_hook, unraisable) -> None:
    """Sends SIGINT again if Python dropped a KeyboardInterrupt, as in the collector's callbacks."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, signal.raise_signal, [signal.SIGINT]).start()
    else:
        previous_hook(unraisable)


if __name__ == "__main__":
    run()
