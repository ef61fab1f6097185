"""Standard output and standard error that may be closed before a command ends (`train ... | head`)."""

import contextlib
import os
import sys
from collections.abc import Iterator


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
        except BrokenPipeError:  # from now on everything written to this descriptor goes nowhere, also by C++ and by children
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def outlives_its_readers() -> Iterator[None]:
    """Lets a command that does more than print run to its end, when whoever reads its output has stopped reading."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_Lasting, before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before
