"""Functions that the launchers share.

Mistakes are reported before anything runs. A command is run or, with --dry-run, printed as one
would type it.
"""

import argparse
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent

MISTAKE = 2
"""The exit code of a mistake in the command or the config. A restart would fail the same way."""

VERBS = (
    "train",
    "evaluate",
    "generate",
    "score",
    "sweep",
    "compare",
    "inspect",
    "plan",
    "data",
    "convert",
)
"""The verbs of `python -m transformer`."""

FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
"""The shapes of slices of TPUs with two axes (cloud.google.com/tpu/docs/v5e, /v6e)."""

HOST = 4
"""Chips per host, in slices with at least that many."""

PRICES = {"v4": 3.22, "v5e": 1.20, "v5p": 4.20, "v6e": 2.70}
"""Kind of chip -> USD for one chip and hour, on demand in the US (cloud.google.com/tpu/pricing)."""


def mistake(message: str) -> NoReturn:
    """Prints one line and exits with code 2."""
    print(f"launch: {message}", file=sys.stderr)
    raise SystemExit(MISTAKE)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all errors of the launchers."""

    def __init__(self, about: str):
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        mistake(f"{message}; see {self.prog} --help")


def parse(parser: Parser, argv: list[str] | None):
    """Parses the launcher's options.

    `command` holds the words after `--`: the verb of `python -m transformer` and its options.
    """
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    args, unknown = parser.parse_known_args(argv[:end])
    verb = next((word for word in unknown if word in VERBS), None)
    if verb and end == len(argv):
        mistake(f"put -- before the verb: {parser.prog} ... -- {verb} ...")
    if unknown:
        parser.error(f"no option {unknown[0]!r}; put options of python -m transformer after --")
    args.command = argv[end + 1 :]
    return args


def bucket(text: str) -> str:
    """Returns the name of a bucket: NAME or gs://NAME."""
    name = text.removeprefix("gs://").rstrip("/")
    if not re.fullmatch("[a-z0-9][a-z0-9._-]*", name):
        mistake(f"--bucket: {text!r} is not the name of a bucket; write NAME or gs://NAME")
    return name


def option(command: list[str], name: str) -> str:
    """Returns the value of an option, --name=VALUE or --name VALUE, or "" if it is missing."""
    value = ""
    for word, following in zip(command, [*command, ""][1:], strict=True):
        if word == name or word.startswith(f"{name}="):
            value = following if word == name else word.removeprefix(f"{name}=")
    return value


def check_command(command: list[str], root: Path, travels: bool = True) -> None:
    """Exits with code 2 unless `command` begins with a verb and its --config is a file in `root`.

    If the code does not travel to another machine, --config may be any file.
    """
    if not command:
        mistake("no command to run; put it after --: -- train --config=... --workdir=...")
    if command[0] not in VERBS:
        mistake(f"no verb {command[0]!r} after --; choose from: {', '.join(VERBS)}")
    if "://" in (workdir := option(command, "--workdir")):
        mistake(
            f"--workdir: {workdir!r} is not a folder; write the path where the bucket is mounted, "
            "such as runs/NAME"
        )
    config = option(command, "--config")
    file = Path(config.partition(":")[0])
    if travels and (file.is_absolute() or ".." in file.parts):
        mistake(
            f"--config: {config!r} does not exist where the run is; "
            f"put the file into {root} and give its path relative to it"
        )
    if config and root.is_dir() and not (root / file).is_file():
        mistake(f"--config: no file {str(root / file)!r}")


def check_workdir(command: list[str], bucket: str, name: str = "--bucket") -> None:
    """Exits with code 2 unless --workdir is in runs/ and the bucket of option `name` is there."""
    workdir = option(command, "--workdir")
    parts = Path(workdir).parts
    if workdir and not bucket:
        mistake(
            f"--workdir: {workdir!r} would be lost with the machine; "
            f"keep runs/ in a bucket with {name}=NAME"
        )
    if workdir and (parts[:1] != ("runs",) or ".." in parts):
        mistake(
            f"--workdir: {workdir!r} would be lost with the machine; "
            "write runs/..., where the bucket is mounted"
        )


def check_numbers(args, **least: int) -> None:
    """Exits with code 2 if an option is less than its minimum."""
    for name, value in least.items():
        if getattr(args, name) < value:
            mistake(
                f"--{name.replace('_', '-')}: {getattr(args, name)} is too small; "
                f"set {value} or more"
            )


def check_name(name: str) -> None:
    """Exits with code 2 unless the cloud accepts this name."""
    if not re.fullmatch("[a-z]([a-z0-9-]{,38}[a-z0-9])?", name):
        mistake(
            f"NAME: {name!r} is not a valid name; write at most 40 lowercase letters, digits and "
            "hyphens, with a letter first and no hyphen last"
        )


def machine(name: str, text: str, known: Collection[str], slices: int = 1):
    """Returns the TPUs of a text as in `plan --topology`: v5e-16, v5litepod-16, v5p:4x4x4, v5p-128.

    Exits with code 2 if they do not exist or their kind is not in `known`. `name` is the option
    that the message names.
    """
    package = types.ModuleType("transformer")
    package.__path__ = [str(ROOT / "transformer")]
    sys.modules.setdefault("transformer", package)  # without __init__: no JAX is needed here
    from transformer.errors import UserError
    from transformer.planning.chips import topology

    try:
        tpu = topology(text, slices)
    except UserError as e:
        mistake(str(e).replace("--topology", name))
    if tpu.kind not in known:
        mistake(f"{name}: {text!r} is not available here; choose one of {', '.join(known)}")
    if tpu.chip.axes == 2 and tpu.shape not in FLAT:
        mistake(
            f"{name}: {text!r} does not exist; a {tpu.chip.title} slice is one of "
            f"{', '.join(f'{a}x{b}' for a, b in FLAT)}"
        )
    if tpu.chip.axes == 3 and math.prod(tpu.shape) % HOST:
        mistake(
            f"{name}: {text!r} does not exist; a {tpu.chip.title} slice consists of hosts with "
            f"2x2x1 chips, such as {tpu.kind}:4x4x4"
        )
    return tpu


def print_price(tpu, price: float | None) -> None:
    """Prints the number of chips and what they cost, with `price` in USD per chip-hour.

    Without it, the list price is used, which is that of the US and higher elsewhere. Spot TPUs and
    reservations cost less.
    """
    if price is not None and not 0 <= price < math.inf:
        mistake(f"--price: {price} is not a price; set USD per chip-hour")
    chips = f"{tpu.chips} chip{'s' * (tpu.chips > 1)}"
    rate = PRICES.get(tpu.kind) if price is None else price
    if rate is None:
        print(f"launch: {chips} of unknown price; set --price=USD per chip-hour", file=sys.stderr)
        return
    listed = ", list price on demand in the US; set yours with --price=USD" * (price is None)
    print(
        f"launch: {chips}, {tpu.chips * rate:,.2f} USD per hour, {24 * tpu.chips * rate:,.2f} "
        f"per day ({rate:.2f} per chip-hour{listed})",
        file=sys.stderr,
    )


def variable(text: str) -> tuple[str, str]:
    """Returns (name, value) of a variable, from NAME=VALUE or NAME, with its value here."""
    name, is_set, value = text.partition("=")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        mistake(f"--env: {name!r} is not the name of a variable; write NAME or NAME=VALUE")
    if not is_set and name not in os.environ:
        mistake(f"--env: {name} is not set here; set it, or write {name}=VALUE")
    value = value if is_set else os.environ[name]
    if "\n" in value:
        mistake(f"--env: the value of {name} has several lines; pass it in a file of the bucket")
    return name, value


def write_variables(file: Path, lines: Iterable[str]) -> None:
    """Writes a file that only its owner can read."""
    file.touch(mode=0o600)
    file.write_text("".join(f"{line}\n" for line in lines))


def installed(tool: str) -> None:
    """Exits with code 2 unless a tool is installed."""
    if shutil.which(tool) is None:
        mistake(f"{tool} is not installed on this machine")


def start(main: Callable[[], int]) -> NoReturn:
    """Runs the main function of a launcher and exits with its code.

    The reader of a dry run may close the pipe early, as `head` does.
    """
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if "--dry-run" not in sys.argv:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def run(
    command: list[str], dry: bool, stdin: str | None = None, stderr_lines: list[str] | None = None
) -> int:
    """Runs a command with this process's output, and returns its exit code.

    Lines of its stderr are also appended to `stderr_lines`. With `dry`, prints the command only.
    """
    if dry:
        print(shlex.join(command) + (f" <<'END'\n{stdin}END" if stdin else ""))
        return 0
    installed(command[0])
    print(shlex.join(command), flush=True)
    if stderr_lines is None:
        return subprocess.run(command, input=stdin, text=True, check=False).returncode
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            sys.stderr.write(line)
            stderr_lines.append(line)
    return process.returncode


def run_together(commands: list[list[str]], dry: bool) -> int:
    """Runs commands at the same time. Returns 0, MISTAKE if one exits with it, or another code."""
    if dry or len(commands) == 1:
        return max(run(command, dry) for command in commands)
    print(*map(shlex.join, commands), sep="\n", flush=True)
    codes = [process.wait() for process in [subprocess.Popen(command) for command in commands]]
    return MISTAKE if MISTAKE in codes else max(codes, key=abs)
