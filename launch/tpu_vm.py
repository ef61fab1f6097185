"""Runs a command on a Cloud TPU VM, from creating the VM to deleting it.

    python launch/tpu_vm.py up NAME --zone=us-east5-a --type=v5p-128 --bucket=MY_BUCKET --spot -- \\
        train --config=experiments/scale/decoder_8b.py --workdir=runs/8b \\
        --config.mesh.fsdp=-1 --config.mesh.data=1

`up` does everything: it creates the TPU, copies the committed code to all workers, installs it
there, starts the command on all of them, and follows the output of the first. When the TPU was
preempted or a worker died, it starts over, at most `--restarts` times, and the run resumes from its
last checkpoint. --type has the syntax of --topology in `plan`: v5p-128 or v5p:4x4x4. Each part is
also a verb:

    create   install   start   follow   status   stop   delete

The bucket is mounted as ~/transformer/runs on every worker (gcsfuse), so all workers share one
--workdir, and it outlives the TPU. A slice of more than one host needs a bucket. Ctrl-C stops
following the output; the run continues. `stop` saves a checkpoint and ends the run, also while `up`
runs. The exit code is that of the run. A run that exits with code 2 (user error) is not restarted.
The TPU stays up, unless --delete is given and the run succeeds. Each run of a sweep uses the whole
TPU, one run after another. To split a sweep instead, start several TPUs with --shard=1/4,
--shard=2/4, ...

--env=WANDB_API_KEY sets a variable for the run to its value here, --env=NAME=VALUE to another.
Values are copied in a file and never printed. Other options of gcloud are given once for each:
--create=--network=vpc --create=--internal-ips --create=--reserved --create=--service-account=SA for
the creation, --ssh=--tunnel-through-iap for connections.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shell import (
    HOST,
    MISTAKE,
    ROOT,
    Parser,
    bucket,
    check_command,
    check_name,
    check_numbers,
    check_workdir,
    installed,
    machine,
    mistake,
    option,
    parse,
    run,
    start,
)

IMAGES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
"""Kind of chip -> the software version of its TPU VM (cloud.google.com/tpu/docs/runtimes).

TPU7x is only available on GKE.
"""

PASSES = re.compile(
    r'capacity|RESOURCE_EXHAUSTED|UNAVAILABLE|INTERNAL|preempted|code"?:? (8|13|14)\b'
)
"""Messages of gcloud when it cannot create a TPU now but may be able to later."""

STAYS = re.compile(r"(?i)quota\b.*\bexceeded")
"""A message of gcloud with the code for a lack of capacity, where waiting does not help."""

GCLOUD = ("gcloud", "compute", "tpus", "tpu-vm")

ARCHIVE, VARIABLES = "transformer.tar.gz", "transformer.env"

PYTHON = "3.12"
"""The version that `install` gets. The system's own is older than this project requires."""

STOPPED = 130
"""The exit code of `follow` and `up` after `stop`, as after Ctrl-C."""


def product(text: str) -> tuple[str, str]:
    """Returns gcloud's --accelerator-type and --version of a --type: v5e:4x4 is a v5litepod-16."""
    tpu = machine("--type", text, IMAGES)
    name = f"{tpu.kind}-{tpu.chips * tpu.chip.cores}"
    if tpu.chips & (tpu.chips - 1) == 0 and (usual := machine("--type", name, IMAGES)) != tpu:
        mistake(
            f"--type: {text!r} is not available; a TPU VM with this many chips is {usual}; "
            "use launch/gke.py for other shapes"
        )
    return name.replace("v5e", "v5litepod"), IMAGES[tpu.kind]


class Tpu:
    """One TPU VM, controlled with gcloud. Methods return exit codes, except `state`."""

    def __init__(self, args):
        self.args, self.dry = args, args.dry_run
        self.where = [args.name, f"--zone={args.zone}"] + (
            [f"--project={args.project}"] if args.project else []
        )

    def gcloud(self, verb: str, *options: str, stderr_lines: list[str] | None = None) -> int:
        """Runs a gcloud command for this TPU VM."""
        return run([*GCLOUD, verb, *self.where, *options], self.dry, stderr_lines=stderr_lines)

    def on(self, worker: str, command: str) -> int:
        """Runs a shell command on one worker, or on "all"."""
        return self.gcloud("ssh", f"--worker={worker}", *self.args.ssh, f"--command={command}")

    def create(self) -> int:
        """Creates the TPU. Returns MISTAKE if a second try would also fail."""
        kind, image = product(self.args.type)
        spot = ["--spot"] if self.args.spot else []
        lines: list[str] = []
        options = [f"--accelerator-type={kind}", f"--version={image}", *spot, *self.args.create]
        code = self.gcloud("create", *options, stderr_lines=lines)
        errors = "".join(lines)
        return MISTAKE if code and (STAYS.search(errors) or not PASSES.search(errors)) else code

    def install(self) -> int:
        """Copies the committed code to all workers, installs it, and mounts the bucket.

        Returns MISTAKE if a step fails on a worker, because it would fail again.
        """
        uv = "python3 -m uv"
        steps = [
            f"mkdir -p transformer/runs && tar xzf {ARCHIVE} -C transformer && cd transformer",
            "python3 -m pip install --quiet --user uv",
            f"([ -x .venv/bin/python ] || {uv} venv --quiet --python {PYTHON} .venv)",
            f"{uv} pip install --quiet --python .venv/bin/python --constraint constraints.txt "
            "--editable '.[tpu,gcs]'",
        ]
        if self.args.bucket:
            steps += [
                "(command -v gcsfuse > /dev/null || sudo apt-get install --quiet --yes gcsfuse)",
                "(mountpoint -q runs || gcsfuse --implicit-dirs --rename-dir-limit=100000 "
                f"{self.args.bucket} runs)",
            ]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path("/tmp" if self.dry else temporary)
            archive, variables = folder / ARCHIVE, folder / VARIABLES
            files = [archive, variables] if self.args.env else [archive]
            if self.args.env and not self.dry:
                variables.touch(mode=0o600)
                lines = (f"export {name}={shlex.quote(x)}\n" for name, x in self.args.env.items())
                variables.write_text("".join(lines))
            git = ["git", "-C", str(ROOT), "archive", "--format=tar.gz", f"--output={archive}"]
            copy = [*GCLOUD, "scp", *self.where[1:], *map(str, files), f"{self.args.name}:"]
            return (
                run([*git, "HEAD"], self.dry)
                or run([*copy, "--worker=all", *self.args.ssh], self.dry)
                or self.on("all", f"{{ {' && '.join(steps)}; }} || exit {MISTAKE}")
            )

    def start(self) -> int:
        """Starts the command on all workers. They write run.log and, at the end, run.code.

        Before that, all workers copy run.log to runs/logs/NAME/ in the bucket.
        """
        command = shlex.join([".venv/bin/python", "-m", "transformer", *self.args.command])
        if self.args.env:
            command = f". ../{VARIABLES}; {command}"
        logs = f"runs/logs/{self.args.name}"
        keep = f"mkdir -p {logs} && cp run.log {logs}/$(hostname)-$(date +%s).log; "
        script = f"{command} > run.log 2>&1; code=$?; {keep * bool(self.args.bucket)}"
        script += "echo $code > run.code"
        return self.on(
            "all",
            "cd transformer && rm -f run.code run.stopped && "
            f"(setsid nohup sh -c {shlex.quote(script)} > /dev/null 2>&1 &)",
        )

    def follow(self) -> int:
        """Prints the first worker's output until its run ends.

        Returns the run's exit code, or STOPPED if `stop` ended it.
        """
        watch = (
            "tail -n +1 -F run.log 2> /dev/null & while [ ! -s run.code ]; do sleep 5; done; "
            f"sleep 2; kill $!; [ -e run.stopped ] && exit {STOPPED}; exit $(cat run.code)"
        )
        return self.on("0", f"cd transformer || exit; {watch}")

    def stop(self) -> int:
        """Stops the run as a preemption does: it saves a checkpoint and ends.

        The pattern only matches at the beginning of a command. The shell that waits to write
        run.code contains the same words further on, and must not be stopped.
        """
        return self.on(
            "all",
            "touch transformer/run.stopped; pkill -TERM -f '^[^ ]*python -m transformer' || true",
        )

    def status(self) -> int:
        """Prints the state of the TPU."""
        return self.gcloud("describe", "--format=value(state)")

    def delete(self) -> int:
        """Deletes the TPU."""
        return self.gcloud("delete", "--quiet")

    def state(self) -> str:
        """Returns READY, PREEMPTED, ..., or "" if the TPU does not exist.

        Exits with code 2 if it is of another --type.
        """
        if self.dry:
            return ""
        describe = [*GCLOUD, "describe", *self.where, "--format=value(state,acceleratorType)"]
        output = subprocess.run(describe, capture_output=True, text=True, check=False).stdout
        state, kind = (*output.split(), "", "")[:2]
        target_type, _ = product(self.args.type)
        if kind and kind.rpartition("/")[2] != target_type:
            mistake(
                f"--type: {self.args.name} exists and is a {kind.rpartition('/')[2]}, not a "
                f"{target_type}; delete it, or choose another name"
            )
        return state

    def up(self) -> int:
        """Creates, installs, starts and follows. Retries after failures that may pass."""
        for attempt in range(self.args.restarts + 1):
            if attempt:
                print(f"launch: restarting ({attempt} of {self.args.restarts})", file=sys.stderr)
                time.sleep(self.args.wait)
            state = self.state()
            if state not in ("", "READY"):
                self.delete()
            code = 0 if state == "READY" else self.create()
            is_up = code == 0
            code = code or self.install() or self.start() or self.follow()
            if code in (0, MISTAKE, STOPPED):
                break
        if code == 0 and self.args.delete:
            return self.delete()
        if is_up and not self.dry:
            delete = shlex.join(["python", "launch/tpu_vm.py", "delete", *self.where])
            print(
                f"launch: {self.args.name} stays up and is billed until it is deleted: {delete}",
                file=sys.stderr,
            )
        return code


def _uncommitted() -> list[str]:
    """Returns the files with changes that are not committed, relative to ROOT."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=all"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [line[3:] for line in lines]


def _check_files(command: list[str], changed: list[str]) -> None:
    """Exits with code 2 if the run reads files that are not copied. Reports other changes.

    The run reads the experiment file, the modules next to it that it imports, and text. A path of
    text is refused if it exists here outside of the commit.
    """
    config = option(command, "--config").partition(":")[0]
    needed, texts = [config] if config else [], []
    for file in needed:
        if not (ROOT / file).is_file():
            continue
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules = [f"{name.replace('.', '/')}.py" for name in names]
            found = [m for name in modules for m in (name, str(Path(file).parent / name))]
            needed += [m for m in found if (ROOT / m).is_file() and m not in needed]
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts += [node.value] if node.value.startswith(("/", "~")) else []
    if missing := [file for file in needed if file in changed]:
        mistake(
            f"--config: {missing[0]} has changes that are not committed, so it would not travel"
        )
    texts += [option(command, f"--config.data.{part}") for part in ("train", "valid", "test")]
    for text in filter(None, texts):
        path = Path(text).expanduser()
        if (path if path.is_absolute() else ROOT / path).exists():
            mistake(f"text: {text!r} is a path of this machine; copy it to a bucket, gs://...")
    names = changed[:5] + [f"and {len(changed) - 5} more"] * (len(changed) > 5)
    if names:
        print(f"launch: uncommitted changes are not copied: {', '.join(names)}", file=sys.stderr)


def _variable(text: str) -> tuple[str, str]:
    """Returns (name, value) of a variable, from NAME=VALUE or NAME, with its value here."""
    name, is_set, value = text.partition("=")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        mistake(f"--env: {name!r} is not the name of a variable; write NAME or NAME=VALUE")
    if not is_set and name not in os.environ:
        mistake(f"--env: {name} is not set here; set it, or write {name}=VALUE")
    return name, value if is_set else os.environ[name]


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    verbs = ("up", "create", "install", "start", "follow", "status", "stop", "delete")
    parser.add_argument("verb", choices=verbs)
    parser.add_argument("name", help="name of the TPU VM")
    parser.add_argument("--zone", required=True, help="zone of the TPU, such as us-east5-a")
    parser.add_argument("--project", default="", help="default: the project of gcloud's config")
    parser.add_argument("--type", default="", help="v4-64, v5e-16, v5p-128, v5p:4x4x4, v6e-64, ...")
    parser.add_argument("--bucket", type=bucket, help="bucket that keeps the runs")
    parser.add_argument(
        "--spot", action="store_true", help="use a cheaper TPU that may be preempted"
    )
    parser.add_argument(
        "--restarts", type=int, default=20, help="attempts after the first one (default: 20)"
    )
    parser.add_argument("--wait", type=float, default=60, help="seconds before a restart")
    parser.add_argument("--env", type=_variable, action="append", default=[], metavar="NAME")
    parser.add_argument("--create", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--ssh", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--delete", action="store_true", help="delete the TPU when `up` succeeds")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands without running them"
    )
    args = parse(parser, argv)
    args.env = dict(args.env)
    check_name(args.name)
    check_numbers(args, restarts=0)
    if args.verb in ("up", "start"):
        check_command(args.command, ROOT)
    if args.verb in ("up", "create"):
        if not args.type:
            mistake("--type: missing; set the kind of TPU, such as v5p-128")
        product(args.type)
        tpu = machine("--type", args.type, IMAGES)
        if (
            args.verb == "up"
            and not args.bucket
            and tpu.chips > (8 if tpu.chip.axes == 2 else HOST)
        ):
            mistake(
                f"--type: {args.type!r} has more than one host, and all must share --workdir; "
                "keep runs/ in a bucket with --bucket=NAME"
            )
    if args.verb == "up" and args.spot and not args.bucket:
        mistake(
            "--spot: the run's checkpoints would be lost when the TPU is preempted; "
            "keep them in a bucket with --bucket=NAME"
        )
    if args.bucket:
        check_workdir(args.command, args.bucket)
    if not args.dry_run:
        installed("gcloud")
    if args.verb in ("up", "install"):
        _check_files(args.command, _uncommitted())
    return getattr(Tpu(args), args.verb)()


if __name__ == "__main__":
    start(main)
