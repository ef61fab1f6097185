"""Functions that several verbs share."""

import argparse
import sys
from pathlib import Path

from transformer import buckets
from transformer.errors import UserError


def folder(text: str) -> Path:
    """Parses an argument that names a local folder, or one in a bucket (gs://)."""
    if not text.strip():
        raise argparse.ArgumentTypeError("empty; name a folder")
    try:
        return buckets.local_path(text)
    except UserError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def text_file(name: str) -> str | list[str]:
    """Parses an argument that names a text file. Returns its lines, or "-" (standard input)."""
    try:
        return name if name == "-" else read_lines(name)
    except UserError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def load(args, overrides):
    """Returns the run of `args.workdir`, with overrides."""
    from transformer.api import load_run
    from transformer.parallel import processes

    is_alone = args.verb in ("convert", "inspect") or getattr(args, "input", "") == "-"
    if is_alone and processes.start_processes():
        way_out = "start one process, or read a file (--input=FILE)"
        raise UserError(f"{args.verb}: cannot run on several processes; {way_out}")
    return load_run(args.workdir, overrides)


def read_lines(name: str) -> list[str]:
    """Returns the lines of a file or a pipe, or of standard input ("-")."""
    if name == "-":
        source, data = "standard input", sys.stdin.buffer.read()
    elif Path(name).is_dir() or not Path(name).exists():
        raise UserError(f"no file {name!r}")
    else:
        source, data = name, Path(name).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        where = f"line {data[: e.start].count(10) + 1}"
        raise UserError(f"{source} is not UTF-8 ({where}); convert it") from None
    if "\0" in text:
        line = data[: data.index(0)].count(10) + 1
        raise UserError(f"{source} holds a NUL byte (line {line}); convert it to UTF-8")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def ask(prompt: str) -> str:
    """Returns a line typed at the terminal. Raises EOFError at the end of input."""
    try:
        return check_text(input(prompt), "standard input")
    except UnicodeDecodeError:
        raise UserError("standard input is not UTF-8") from None


def check_text(text: str, what: str) -> str:
    """Returns `text`. Raises UserError for surrogates, which stand for bytes that are not UTF-8."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"{what} is not UTF-8: {text[:60]!r}")
    return text
