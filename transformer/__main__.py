"""`python -m transformer` and the installed script `transformer`: the command line as a process.

Ctrl-C ends it with one line and exit code 130, whatever it is doing.
"""

import contextlib
import os
import signal
import sys
import threading


def run() -> None:
    """Runs the command of `sys.argv` and exits with its code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have ignored it
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _interrupt_again
    from transformer.cli import main

    code = main()
    if code in (2, 130):
        # Not sys.exit: threads of Orbax that wait for the main one may hold it up, and Python would kill itself by SIGINT where an
        # interrupt has passed through exec(). All that is to be kept was written when `main` returned.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to undo


def _interrupt(number, frame) -> None:
    """Raises KeyboardInterrupt; ends the process at once where an exception would do harm. An extension module that is being imported
    turns it into an ImportError or dies of it, and the threads that serve an event loop (Orbax reads checkpoints in one) wait forever."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib") or (
            os.path.basename(os.path.dirname(frame.f_code.co_filename)) == "asyncio"
        ):
            os.write(2, b"\ninterrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _interrupt_again(lost) -> None:
    """Python drops an exception in a callback of the garbage collector, and JAX has one. A Ctrl-C that is lost there comes again."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, signal.raise_signal, [signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(lost)


if __name__ == "__main__":
    run()
