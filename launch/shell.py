"""What the launchers share: a command is run, or with --dry-run printed as one would type it."""

import shlex
import subprocess
import sys


def run(command: list[str], dry: bool, stdin: str | None = None) -> int:
    """Runs it, its output being this process's; its exit code. With `dry`, prints it and is content."""
    print(shlex.join(command), flush=True)
    if stdin is not None and dry:
        print(stdin, end="")
    if dry:
        return 0
    try:
        return subprocess.run(command, input=stdin, text=True, check=False).returncode
    except FileNotFoundError:
        print(f"launch: {command[0]} is not installed here", file=sys.stderr)
        raise SystemExit(2) from None


def parse(parser, argv: list[str] | None):
    """The launcher's own options, and as `command` what stands behind `--`: the verb of `python -m transformer` and its options."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    args.command = argv[cut + 1 :]
    return args


def need_command(parser, args) -> None:
    """Ends with exit code 2 if nothing stands behind `--`."""
    if not args.command:
        parser.error("name what to run behind --: -- train --config=... --workdir=...")


MISTAKE = 2
"""The exit code of a mistake in the command or the config: made again, it would end the same way."""
