"""Text for people: colors, plurals, elapsed time; streams that close early; redundant tracebacks.

A stream may be closed before a command begins (`train >&-`) or ends (`train | head`)."""

import contextlib
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

BOLD, RED = 1, 31  # styles of text on a terminal


def open_closed_streams() -> None:
    """Opens the standard streams that were closed when this process began, on /dev/null. Otherwise
    the next files would get their descriptors, and receive the output of C++ code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            devnull = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
            os.set_inheritable(devnull, True)
            setattr(sys, name, os.fdopen(devnull, mode, encoding="utf-8"))


def redirect_to_devnull(stream) -> None:
    """Redirects the descriptor of `stream` to /dev/null, also for C++ code and child processes."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


def flush() -> None:
    """Flushes standard output and standard error. Ignores all errors, such as a closed reader."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            _Lasting(stream).flush()


class _Lasting:
    """A stream that discards output once its reader is gone."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def _try(self, method: Callable, *args) -> None:
        try:
            method(*args)
        except BrokenPipeError:
            redirect_to_devnull(self._stream)


@contextlib.contextmanager
def survive_closed_readers() -> Iterator[None]:
    """Lets a command that does more than print finish after the readers of its output have gone."""
    out, err = (stream and _Lasting(stream) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            for stream in filter(None, (out, err)):
                stream.flush()


def suppress_redundant_tracebacks() -> None:
    """Suppresses output about errors that the main thread also raises, as each thread of Orbax
    prints after a failed read or write, and the source code in warnings."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    handler = logging.StreamHandler()

    def is_new(record: logging.LogRecord) -> bool:
        unread = record.name == "asyncio" and "exception was never retrieved" in record.getMessage()
        return not unread and (record.name != "absl" or record.levelno < logging.ERROR)

    def show(unraisable) -> None:
        """Shows an exception unless C++, which passes no object, or an aborted read raised it."""
        text = str(unraisable.exc_value)
        aborted = "Event loop is closed" in text or "array index" in text
        if unraisable.object is not None and not aborted:
            previous_hook(unraisable)

    handler.addFilter(is_new)
    logging.getLogger().addHandler(handler)
    previous_hook, sys.unraisablehook = sys.unraisablehook, show


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 step", "5,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def event(number: int, text: str) -> str:
    """Formats an event: (1, "texts were cut") -> "1 text was cut"."""
    if number == 1:
        text = re.sub(r"^(\w+)s\b", r"\1", text.replace(" were ", " was ").replace(" are ", " is "))
    return f"{number:,} {text}"


def listed(names: Sequence[str], limit: int, separator: str = ", ", last: str = " ") -> str:
    """Joins the first names of a list, and counts the others: "a, b and 3 more"."""
    more = f"{last}and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


def columns(rows: list[list[str]]) -> list[str]:
    """Formats rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def human_time(seconds: float) -> str:
    """Formats a duration: 95 -> '1:35', 4000 -> '1:06 h'."""
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60}:{seconds % 60:02d}"
    if seconds < 48 * 3600:
        return f"{seconds // 3600}:{seconds % 3600 // 60:02d} h"
    return f"{seconds / 86400:.1f} days"


def human_count(n: float) -> str:
    """Formats a count: 38200 -> '38.2k'."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if abs(n) < 1000:
            return f"{n:.3g}{unit}" if unit == "" else f"{n:.1f}{unit}"
        n /= 1000
    return f"{n:.1f}Z"


def human_tokens(n: float) -> str:
    """Formats a number of tokens: 1.3e9 -> '1.3B'."""
    return human_count(n).replace("G", "B")


def with_unit(n: float, unit: str) -> str:
    """Formats a quantity: 1.97e14 -> '197.0 TFLOP/s'."""
    number = (text := human_count(n)).rstrip("kMGTPEZ")
    return f"{number} {text[len(number) :]}{unit}"


def human_number(x: float) -> str:
    """Formats a number: 18.807 -> '18.81'; after divergence 1.2e304 -> '1.2e+304'."""
    return f"{x:,.2f}" if abs(x) < 1e6 else f"{x:.1e}"


def styled(text: str, style: int, stream) -> str:
    """Returns `text` in a style, if `stream` is a terminal that shows it."""
    # https://no-color.org
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else f"\x1b[{style}m{text}\x1b[0m"


def counting(text: str, total: int) -> Callable[[int], None]:
    """Returns a function that shows how many of `total` are done, in a terminal, then erases it."""

    def show(done: int) -> None:
        if sys.stderr.isatty():
            line = f"{text} {done:,}/{total:,}" if done < total else ""
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    return show


@contextlib.contextmanager
def elapsed(text: str, stream=None) -> Iterator[None]:
    """Shows `text` and the elapsed time while the body runs, if `stream` (stderr) is a terminal."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield
        return
    start, done = time.monotonic(), threading.Event()

    def show() -> None:
        while not done.is_set():
            spent = human_time(time.monotonic() - start)
            print(f"\r\x1b[K{text} {spent}", end="", file=stream, flush=True)
            done.wait(1)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        print("\r\x1b[K", end="", file=stream, flush=True)
