"""What the launchers share: mistakes are told before anything runs; a command is run, or with --dry-run printed as one would type it."""

import argparse
import math
import re
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent

MISTAKE = 2
"""The exit code of a mistake in the command or the config: made again, it would end the same way."""

VERBS = ("train", "evaluate", "generate", "sweep", "compare", "inspect", "plan", "data", "convert")
"""Of `python -m transformer`."""

FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
"""The shapes in which TPUs with two axes come (cloud.google.com/tpu/docs/v5e, /v6e)."""

HOST = 4
"""Chips of one host, in slices that have so many."""


def mistake(message: str) -> NoReturn:
    """Says it in one line and ends with exit code 2."""
    print(f"launch: {message}", file=sys.stderr)
    raise SystemExit(MISTAKE)


class Parser(argparse.ArgumentParser):
    """Its errors are those of the rest: one line."""

    def __init__(self, about: str):
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        mistake(f"{message}; see {self.prog} --help")


def parse(parser: Parser, argv: list[str] | None):
    """The launcher's own options, and as `command` what stands behind `--`: the verb of `python -m transformer` and its options."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    args, rest = parser.parse_known_args(argv[:cut])
    verb = next((word for word in rest if word in VERBS), None)
    if verb and cut == len(argv):
        mistake(f"put -- before the verb: {parser.prog} ... -- {verb} ...")
    if rest:
        parser.error(f"no option {rest[0]!r}; what python -m transformer is given stands behind --")
    args.command = argv[cut + 1 :]
    return args


def option(command: list[str], name: str) -> str:
    """What a command says as --name=VALUE or --name VALUE; "" if nothing."""
    found = ""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == name or word.startswith(f"{name}="):
            found = following if word == name else word.removeprefix(f"{name}=")
    return found


def check_command(command: list[str], root: Path, travels: bool = True) -> None:
    """Ends with exit code 2 unless a verb stands behind `--`, and its --config is a file of the code in `root`. Where the code does not
    travel to another machine, it may be any file."""
    if not command:
        mistake("name what to run behind --: -- train --config=... --workdir=...")
    if command[0] not in VERBS:
        mistake(f"no verb {command[0]!r} behind --; there is: {', '.join(VERBS)}")
    config = option(command, "--config")
    file = Path(config.partition(":")[0])
    if travels and (file.is_absolute() or ".." in file.parts):
        mistake(
            f"--config: {config!r} is not there where the run is; put the file into {root} and write its path from there"
        )
    if config and root.is_dir() and not (root / file).is_file():
        mistake(f"--config: no file {str(root / file)!r}")


def check_workdir(command: list[str], bucket: str) -> None:
    """Ends with exit code 2 if --workdir would go with the machine: it must lie in runs/, where the bucket is mounted."""
    workdir = option(command, "--workdir")
    parts = Path(workdir).parts
    if workdir and not bucket:
        mistake(
            f"--workdir: {workdir!r} would go with the machine; keep runs/ in a bucket with --bucket=NAME"
        )
    if workdir and (parts[:1] != ("runs",) or ".." in parts):
        mistake(
            f"--workdir: {workdir!r} would go with the machine; write runs/..., where the bucket is mounted"
        )


def check_numbers(args, **least: int) -> None:
    """Ends with exit code 2 if one of these options is less."""
    for name, value in least.items():
        if getattr(args, name) < value:
            mistake(f"--{name.replace('_', '-')}: {getattr(args, name)}; {value} or more")


def check_name(name: str) -> None:
    """Ends with exit code 2 unless the cloud takes it as a name."""
    if not re.fullmatch("[a-z]([a-z0-9-]{,38}[a-z0-9])?", name):
        mistake(
            f"NAME: {name!r}; lowercase letters, digits and hyphens within, a letter first, 40 characters at most"
        )


def machine(name: str, text: str, known: Collection[str], slices: int = 1):
    """The TPUs that `plan --topology` reads from `text`: v5e-16, v5litepod-16, v5p:4x4x4, v5p-128. Ends with exit code 2,
    in the words of the option `name`, if there are none such or their kind is not `known`."""
    package = types.ModuleType("transformer")
    package.__path__ = [str(ROOT / "transformer")]
    sys.modules.setdefault(
        "transformer", package
    )  # its own __init__ imports JAX, which need not be here
    from transformer.errors import UserError
    from transformer.planning.chips import topology

    try:
        tpu = topology(text, slices)
    except UserError as e:
        mistake(str(e).replace("--topology", name))
    if tpu.kind not in known:
        mistake(f"{name}: no {text!r} here; one of {', '.join(known)}")
    if tpu.chip.axes == 2 and tpu.shape not in FLAT:
        mistake(
            f"{name}: no {text!r}; a {tpu.chip.title} slice is one of {', '.join(f'{a}x{b}' for a, b in FLAT)}"
        )
    if tpu.chip.axes == 3 and math.prod(tpu.shape) % HOST:
        mistake(
            f"{name}: no {text!r}; a {tpu.chip.title} slice is made of hosts with 2x2x1 chips, as {tpu.kind}:4x4x4"
        )
    return tpu


def installed(tool: str) -> None:
    """Ends with exit code 2 if it is not."""
    if shutil.which(tool) is None:
        mistake(f"{tool} is not installed here")


def run(
    command: list[str], dry: bool, stdin: str | None = None, said: list[str] | None = None
) -> int:
    """Runs it, its output being this process's, and the lines of its stderr also put into `said`; its exit code. With `dry`, prints it
    and is content."""
    if dry:
        print(shlex.join(command) + (f" <<'END'\n{stdin}END" if stdin else ""))
        return 0
    installed(command[0])
    print(shlex.join(command), flush=True)
    if said is None:
        return subprocess.run(command, input=stdin, text=True, check=False).returncode
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            sys.stderr.write(line)
            said.append(line)
    return process.returncode
