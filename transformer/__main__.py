"""`python -m transformer` and the installed script `transformer`: the command line as a process.

Ctrl-C ends it with one line and exit code 130, whatever it is doing. A fault that one line describes prints no traceback, unless
TRANSFORMER_TRACEBACKS=1; the traceback of any other fault is always printed.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

from transformer.errors import tracebacks
from transformer.output import flush, open_closed, quiet_threads


def run() -> None:
    """Runs the command of `sys.argv` and exits with its code."""
    open_closed()
    if not tracebacks():
        quiet_threads()
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
    if code not in (0, 143):  # 143: several processes stop together, and part as they do at the end
        # Not sys.exit: threads of Orbax that wait for the main one may hold it up, and Python would kill itself by SIGINT where an
        # interrupt has passed through exec(). All that is to be kept was written when `main` returned.
        os._exit(code)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to undo
    sys.exit(code)


def _interrupt(number, frame) -> None:
    """Raises KeyboardInterrupt; ends the process at once where an exception would do harm. An extension module that is being imported
    turns it into an ImportError or dies of it, and the threads that serve an event loop (Orbax reads checkpoints in one) wait forever."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib") or (
            os.path.basename(os.path.dirname(frame.f_code.co_filename)) == "asyncio"
        ):
            with contextlib.suppress(OSError):
                os.write(2, b"\ninterrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _interrupt_again(others: Callable, lost) -> None:
    """Python drops an exception in a callback of the garbage collector, and JAX has one. A Ctrl-C that is lost there comes again."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, signal.raise_signal, [signal.SIGINT]).start()
    else:
        others(lost)


if __name__ == "__main__":
    run()
