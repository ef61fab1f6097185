"""Standard output and standard error: streams that are closed before a command begins
(`train ... >&-`) or ends (`train ... | head`), and what they are spared."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator


def open_closed() -> None:
    """Opens standard streams that were closed when this process began; they lead nowhere. The next
    files that are opened would take their numbers, and what C++ prints would be written there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))


def to_nowhere(stream) -> None:
    """From now on what is written to this descriptor goes nowhere, also by C++ and by children."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def flush() -> None:
    """Writes out what is held back, as far as anybody reads it. Raises nothing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                _Lasting(stream).flush()


class _Lasting:
    """A stream that drops what is written once its reader is gone."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> int:
        with self._ends_quietly():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._ends_quietly():
            self._stream.flush()

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _ends_quietly(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            to_nowhere(self._stream)


@contextlib.contextmanager
def outlives_its_readers() -> Iterator[None]:
    """Lets a command that does more than print run to its end, when whoever reads its output has stopped reading."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _Lasting(stream) for stream in before)
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        sys.stdout, sys.stderr = before


def quiet_threads() -> None:
    """Leaves out what is printed beside a fault that the main thread will raise. When a checkpoint
    cannot be written, threads of Orbax log a traceback each. When an array cannot be written or
    read, Orbax closes the event loop under all others, and each of these prints a traceback."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not _logged_beside(record))
    logging.getLogger().addHandler(handler)
    print_it = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if _lost_beside(lost) else print_it(lost)


def _logged_beside(record: logging.LogRecord) -> bool:
    unread = record.name == "asyncio" and "exception was never retrieved" in record.getMessage()
    return unread or (record.name == "absl" and record.levelno >= logging.ERROR)


def _lost_beside(lost) -> bool:
    """Whether an exception that Python cannot raise comes from C++, which names no object, or from
    a read that another one has ended."""
    signs = ("Event loop is closed", "array index")
    return lost.object is None or any(sign in str(lost.exc_value) for sign in signs)
