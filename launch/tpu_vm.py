"""A run on a Cloud TPU VM, from creating it to deleting it.

    python launch/tpu_vm.py up NAME --zone=us-east5-a --type=v5p-128 --bucket=MY_BUCKET --spot -- \\
        train --config=experiments/scale/decoder_8b.py --workdir=runs/8b --config.mesh.fsdp=-1 --config.mesh.data=1

`up` does everything: creates the TPU, copies the committed code to all of its workers and installs it there, starts the command on
all of them, follows what the first one says, and, when the TPU was preempted or a worker died, begins again, `--restarts` times at
most: the run goes on from its last checkpoint. --type is written as --topology is for `plan`: v5p-128 or v5p:4x4x4. Each part has a
verb of its own:

    create   install   start   follow   status   stop   delete

The bucket is mounted as ~/transformer/runs on every worker (gcsfuse), so that all see one --workdir and it outlives the TPU. Ctrl-C
ends the following alone; the run goes on. Exit codes are the run's own; 2, a mistake, is not tried again. The TPU stays up, unless
--delete was given and all went well. A sweep's runs are each on the whole TPU, one after another; to share it out instead, start several
TPUs, with --shard=1/4, --shard=2/4, ...
"""

import re
import shlex
import subprocess
import sys
import tempfile
import time

from shell import (
    MISTAKE,
    ROOT,
    Parser,
    check_command,
    check_name,
    check_numbers,
    check_workdir,
    installed,
    machine,
    mistake,
    parse,
    run,
)

IMAGES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
"""The software of a TPU VM, by kind of chip (cloud.google.com/tpu/docs/runtimes). TPU7x is to be had on GKE alone."""

PASSES = re.compile(
    r'capacity|RESOURCE_EXHAUSTED|UNAVAILABLE|INTERNAL|preempted|code"?:? (8|13|14)\b'
)
"""What gcloud says when it cannot create a TPU now and perhaps can later."""

STAYS = re.compile(r"(?i)quota\b.*\bexceeded")
"""What it says with the code of a lack of capacity, though waiting does not help."""

GCLOUD = ("gcloud", "compute", "tpus", "tpu-vm")

ARCHIVE = "transformer.tar.gz"


def product(text: str) -> tuple[str, str]:
    """--type as gcloud's --accelerator-type and its --version: v5e:4x4 is a v5litepod-16."""
    tpu = machine("--type", text, IMAGES)
    name = f"{tpu.kind}-{tpu.chips * tpu.chip.cores}"
    if tpu.chips & (tpu.chips - 1) == 0 and (usual := machine("--type", name, IMAGES)) != tpu:
        mistake(
            f"--type: {text!r}; a TPU VM with so many chips is {usual}, launch/gke.py makes the others"
        )
    return name.replace("v5e", "v5litepod"), IMAGES[tpu.kind]


class Tpu:
    """One TPU VM, and what is done with it by gcloud."""

    def __init__(self, args):
        self.args, self.dry = args, args.dry_run
        self.where = [args.name, f"--zone={args.zone}"] + (
            [f"--project={args.project}"] if args.project else []
        )

    def gcloud(self, verb: str, *options: str, said: list[str] | None = None) -> int:
        return run([*GCLOUD, verb, *self.where, *options], self.dry, said=said)

    def on(self, worker: str, command: str) -> int:
        """A shell command on one worker, or on "all"."""
        return self.gcloud("ssh", f"--worker={worker}", f"--command={command}")

    def create(self) -> int:
        """0; MISTAKE, if it would fail again; or gcloud's exit code."""
        kind, image = product(self.args.type)
        spot = ["--spot"] if self.args.spot else []
        lines: list[str] = []
        code = self.gcloud(
            "create", f"--accelerator-type={kind}", f"--version={image}", *spot, said=lines
        )
        said = "".join(lines)
        return MISTAKE if code and (STAYS.search(said) or not PASSES.search(said)) else code

    def install(self) -> int:
        steps = f"mkdir -p transformer/runs && tar xzf {ARCHIVE} -C transformer && cd transformer && python3 -m venv .venv && "
        steps += (
            ".venv/bin/pip install --quiet --constraint constraints.txt --editable '.[tpu,gcs]'"
        )
        if self.args.bucket:
            steps += f" && (mountpoint -q runs || gcsfuse --implicit-dirs --rename-dir-limit=100000 {self.args.bucket} runs)"
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
                or self.on("all", steps)
            )

    def start(self) -> int:
        """Each worker keeps what it says in run.log, and afterwards its exit code in run.code."""
        command = shlex.join([".venv/bin/python", "-m", "transformer", *self.args.command])
        inside = f"{command} > run.log 2>&1; echo $? > run.code"
        return self.on(
            "all",
            f"cd transformer && rm -f run.code && (setsid nohup sh -c {shlex.quote(inside)} > /dev/null 2>&1 &)",
        )

    def follow(self) -> int:
        """What the first worker says, until it has ended; its exit code."""
        watch = "tail -n +1 -F run.log 2> /dev/null & while [ ! -s run.code ]; do sleep 5; done; sleep 2; kill $!; exit $(cat run.code)"
        return self.on("0", f"cd transformer || exit; {watch}")

    def stop(self) -> int:
        """Saves, and ends: what a preemption does. The shell that waits to write run.code has these words in its command too, further on."""
        return self.on("all", "pkill -TERM -f '^[^ ]*python -m transformer' || true")

    def status(self) -> int:
        return self.gcloud("describe", "--format=value(state)")

    def delete(self) -> int:
        return self.gcloud("delete", "--quiet")

    def state(self) -> str:
        """READY, PREEMPTED, ...; "" if there is no such TPU."""
        if self.dry:
            return ""
        installed("gcloud")
        describe = [*GCLOUD, "describe", *self.where, "--format=value(state)"]
        return subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()

    def up(self) -> int:
        """All of it, again and again where it was not the run's fault."""
        for attempt in range(self.args.restarts + 1):
            if attempt:
                print(
                    f"launch: beginning again ({attempt} of {self.args.restarts})", file=sys.stderr
                )
                time.sleep(self.args.wait)
            state = self.state()
            if state not in ("", "READY"):
                self.delete()
            code = 0 if state == "READY" else self.create()
            there = code == 0
            code = code or self.install() or self.start() or self.follow()
            if code in (0, MISTAKE):
                break
        if code == 0 and self.args.delete:
            return self.delete()
        if there and not self.dry:
            delete = shlex.join(["python", "launch/tpu_vm.py", "delete", *self.where])
            print(
                f"launch: {self.args.name} stays up, and is paid for, until it is deleted: {delete}",
                file=sys.stderr,
            )
        return code


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    verbs = ("up", "create", "install", "start", "follow", "status", "stop", "delete")
    parser.add_argument("verb", choices=verbs)
    parser.add_argument("name", help="of the TPU VM")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project", default="")
    parser.add_argument("--type", default="", help="v4-64, v5e-16, v5p-128, v5p:4x4x4, v6e-64, ...")
    parser.add_argument("--bucket", default="", help="holds the runs")
    parser.add_argument("--spot", action="store_true", help="cheaper, and may be taken away")
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--wait", type=float, default=60, help="seconds before beginning again")
    parser.add_argument("--delete", action="store_true", help="when `up` has ended well")
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    args = parse(parser, argv)
    check_name(args.name)
    check_numbers(args, restarts=0)
    if args.verb in ("up", "start"):
        check_command(args.command, ROOT)
    if args.verb in ("up", "create"):
        if not args.type:
            mistake("--type: what kind of TPU, as v5p-128")
        product(args.type)
    if args.verb == "up" and args.spot and not args.bucket:
        mistake(
            "--spot: the run's checkpoints go when the TPU is taken away; keep them in a bucket with --bucket=NAME"
        )
    if args.bucket:
        check_workdir(args.command, args.bucket)
    return getattr(Tpu(args), args.verb)()


if __name__ == "__main__":
    sys.exit(main())
