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
"""

import re
import shlex
import subprocess
import sys
import tempfile
import time

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

ARCHIVE = "transformer.tar.gz"

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
        return self.gcloud("ssh", f"--worker={worker}", f"--command={command}")

    def create(self) -> int:
        """Creates the TPU. Returns MISTAKE if a second try would also fail."""
        kind, image = product(self.args.type)
        spot = ["--spot"] if self.args.spot else []
        lines: list[str] = []
        code = self.gcloud(
            "create", f"--accelerator-type={kind}", f"--version={image}", *spot, stderr_lines=lines
        )
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
            steps.append(
                "(mountpoint -q runs || gcsfuse --implicit-dirs --rename-dir-limit=100000 "
                f"{self.args.bucket} runs)"
            )
        with tempfile.TemporaryDirectory() as folder:
            archive = f"{'/tmp' if self.dry else folder}/{ARCHIVE}"
            return (
                run(
                    [
                        "git",
                        "-C",
                        str(ROOT),
                        "archive",
                        "--format=tar.gz",
                        f"--output={archive}",
                        "HEAD",
                    ],
                    self.dry,
                )
                or run(
                    [
                        *GCLOUD,
                        "scp",
                        *self.where[1:],
                        archive,
                        f"{self.args.name}:",
                        "--worker=all",
                    ],
                    self.dry,
                )
                or self.on("all", f"{{ {' && '.join(steps)}; }} || exit {MISTAKE}")
            )

    def start(self) -> int:
        """Starts the command on all workers. They write run.log and, at the end, run.code."""
        command = shlex.join([".venv/bin/python", "-m", "transformer", *self.args.command])
        script = f"{command} > run.log 2>&1; echo $? > run.code"
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


def _uncommitted() -> str:
    """Returns the names of files with changes that are not committed, at most five."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    names = [line[3:] for line in lines]
    return ", ".join(names[:5] + [f"and {len(names) - 5} more"] * (len(names) > 5))


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
    parser.add_argument("--delete", action="store_true", help="delete the TPU when `up` succeeds")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands without running them"
    )
    args = parse(parser, argv)
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
    if args.verb in ("up", "install") and (changed := _uncommitted()):
        print(f"launch: uncommitted changes are not copied: {changed}", file=sys.stderr)
    return getattr(Tpu(args), args.verb)()


if __name__ == "__main__":
    start(main)
