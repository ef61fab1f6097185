"""A run on a Cloud TPU VM, from creating it to deleting it.

    python launch/tpu_vm.py up NAME --zone=us-east5-a --type=v5p-128 --bucket=MY_BUCKET --spot -- \\
        train --config=experiments/scale/decoder_8b.py --workdir=runs/8b --config.mesh.fsdp=-1 --config.mesh.data=1

`up` does everything: creates the TPU, copies the committed code to all of its workers and installs it there, starts the command on
all of them, follows what the first one says, and, when the TPU was preempted or a worker died, begins again, `--restarts` times at
most: the run goes on from its last checkpoint. Each part has a verb of its own:

    create   install   start   follow   status   stop   delete

The bucket is mounted as ~/transformer/runs on every worker (gcsfuse), so that all see one --workdir and it outlives the TPU. Ctrl-C
ends the following alone; the run goes on. Exit codes are the run's own; 2, a mistake, is not tried again.
"""

import argparse
import shlex
import subprocess
import sys
import time

from shell import MISTAKE, need_command, parse, run

IMAGES = {
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
"""The software of a TPU VM, by kind of chip (cloud.google.com/tpu/docs/runtimes)."""

ARCHIVE = "transformer.tar.gz"


class Tpu:
    """One TPU VM, and what is done with it by gcloud."""

    def __init__(self, args):
        self.args, self.dry = args, args.dry_run
        self.where = [args.name, f"--zone={args.zone}"] + ([f"--project={args.project}"] if args.project else [])

    def gcloud(self, verb: str, *options: str) -> int:
        return run(["gcloud", "compute", "tpus", "tpu-vm", verb, *self.where, *options], self.dry)

    def on(self, worker: str, command: str) -> int:
        """A shell command on one worker, or on "all"."""
        return self.gcloud("ssh", f"--worker={worker}", f"--command={command}")

    def create(self) -> int:
        image = IMAGES.get(self.args.type.split("-")[0])
        if image is None:
            print(
                f"launch: no --type {self.args.type!r}; one of {', '.join(IMAGES)} and a size, as v5p-128",
                file=sys.stderr,
            )
            return MISTAKE
        spot = ["--spot"] if self.args.spot else []
        return self.gcloud("create", f"--accelerator-type={self.args.type}", f"--version={image}", *spot)

    def install(self) -> int:
        steps = f"mkdir -p transformer/runs && tar xzf {ARCHIVE} -C transformer && cd transformer && python3 -m venv .venv && "
        steps += ".venv/bin/pip install --quiet --constraint constraints.txt --editable '.[tpu,gcs]'"
        if self.args.bucket:
            steps += (
                f" && (mountpoint -q runs || gcsfuse --implicit-dirs --rename-dir-limit=100000 {self.args.bucket} runs)"
            )
        return (
            run(["git", "archive", "--format=tar.gz", f"--output={ARCHIVE}", "HEAD"], self.dry)
            or self.gcloud("scp", ARCHIVE, f"{self.args.name}:", "--worker=all")
            or self.on("all", steps)
        )

    def start(self) -> int:
        """Each worker keeps what it says in run.log, and afterwards its exit code in run.code."""
        command = shlex.join([".venv/bin/python", "-m", "transformer", *self.args.command])
        inside = f"{command} > run.log 2>&1; echo $? > run.code"
        return self.on(
            "all", f"cd transformer && rm -f run.code && (setsid nohup sh -c {shlex.quote(inside)} > /dev/null 2>&1 &)"
        )

    def follow(self) -> int:
        """What the first worker says, until it has ended; its exit code."""
        watch = "tail -n +1 -F run.log 2> /dev/null & while [ ! -f run.code ]; do sleep 5; done; sleep 2; kill %1; exit $(cat run.code)"
        return self.on("0", f"cd transformer && {watch}")

    def stop(self) -> int:
        """Saves, and ends: what a preemption does."""
        return self.on("all", "pkill -TERM -f 'python -m transformer' || true")

    def status(self) -> int:
        return self.gcloud("describe", "--format=value(state)")

    def delete(self) -> int:
        return self.gcloud("delete", "--quiet")

    def is_ready(self) -> bool:
        if self.dry:
            return True
        describe = ["gcloud", "compute", "tpus", "tpu-vm", "describe", *self.where, "--format=value(state)"]
        return subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip() == "READY"

    def up(self) -> int:
        """All of it, again and again where it was not the run's fault."""
        code = 0
        for attempt in range(self.args.restarts + 1):
            if attempt:
                print(f"launch: beginning again ({attempt} of {self.args.restarts})", file=sys.stderr)
                time.sleep(self.args.wait)
            if attempt and not self.is_ready():
                self.delete()
            code = (
                (self.create() if not attempt or not self.is_ready() else 0)
                or self.install()
                or self.start()
                or self.follow()
            )
            if code in (0, MISTAKE):
                break
        return code or (self.delete() if self.args.delete else 0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = ("up", "create", "install", "start", "follow", "status", "stop", "delete")
    parser.add_argument("verb", choices=verbs)
    parser.add_argument("name", help="of the TPU VM")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project", default="")
    parser.add_argument("--type", default="", help="v4-64, v5litepod-16, v5p-128, v6e-64, ...")
    parser.add_argument("--bucket", default="", help="holds the runs")
    parser.add_argument("--spot", action="store_true", help="cheaper, and may be taken away")
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--wait", type=float, default=60, help="seconds before beginning again")
    parser.add_argument("--delete", action="store_true", help="when `up` has ended well")
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    args = parse(parser, argv)
    if args.verb in ("up", "start"):
        need_command(parser, args)
    if args.verb in ("up", "create") and not args.type:
        parser.error("--type: what kind of TPU, as v5p-128")
    return getattr(Tpu(args), args.verb)()


if __name__ == "__main__":
    sys.exit(main())
