"""Runs a command on a Cloud TPU VM, from creating the VM to deleting it.

    python launch/tpu_vm.py up NAME --zone=us-east5-a --type=v5p-128 --bucket=MY_BUCKET --spot -- \\
        train --config=experiments/scale/decoder_8b.py --workdir=runs/8b \\
        --config.mesh.fsdp=-1 --config.mesh.data=1

`up` does everything: it prints the price, creates the TPU, copies the committed code to all
workers, installs it there, starts the command on all of them, and follows the output of the first.
When the TPU was preempted or a worker died, it starts over, at most `--restarts` times, and the run
resumes from its last checkpoint. --type has the syntax of --topology in `plan`: v5p-128 or
v5p:4x4x4. Each part is also a verb:

    create   install   start   follow   status   stop   delete

With --queued, the TPU is a queued resource: if the zone has no room, the request waits in the queue
of the cloud, for as long as it takes or for --create=--valid-until-duration=6h, and costs nothing
meanwhile. --slices=4 requests four TPUs of this type, which train together as one run (multislice).
It implies --queued. Give --queued or --slices to the other verbs too.

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

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from files import check_files, uncommitted
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
    print_price,
    run,
    start,
    variable,
    write_variables,
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

    group, ready, pending = "tpu-vm", "READY", ()
    described = "state,acceleratorType"
    everyone, delete_options = ["--worker=all"], ["--quiet"]

    def __init__(self, args):
        self.args, self.dry, self.is_up = args, args.dry_run, False
        self.where = [args.name, f"--zone={args.zone}"] + (
            [f"--project={args.project}"] if args.project else []
        )

    def words(self, verb: str) -> list[str]:
        """Returns the words of a gcloud command up to its verb."""
        return ["gcloud", "compute", "tpus", self.group, verb]

    def gcloud(self, verb: str, *options: str, stderr_lines: list[str] | None = None) -> int:
        """Runs a gcloud command for this TPU."""
        return run([*self.words(verb), *self.where, *options], self.dry, stderr_lines=stderr_lines)

    def on(self, workers: list[str], command: str) -> int:
        """Runs a shell command on the workers that these options name."""
        return self.gcloud("ssh", *workers, *self.args.ssh, f"--command={command}")

    def requested(self, kind: str, image: str) -> list[str]:
        """Returns the options of `create` that say what to create."""
        return [f"--accelerator-type={kind}", f"--version={image}"]

    def create(self) -> int:
        """Creates the TPU. Returns MISTAKE if a second try would also fail."""
        spot = ["--spot"] if self.args.spot else []
        lines: list[str] = []
        options = [*self.requested(*product(self.args.type)), *spot, *self.args.create]
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
                lines = (f"export {name}={shlex.quote(value)}" for name, value in self.args.env)
                write_variables(variables, lines)
            git = ["git", "-C", str(ROOT), "archive", "--format=tar.gz", f"--output={archive}"]
            copy = [*self.words("scp"), *self.where[1:], *map(str, files), f"{self.args.name}:"]
            return (
                run([*git, "HEAD"], self.dry)
                or run([*copy, *self.everyone, *self.args.ssh], self.dry)
                or self.on(self.everyone, f"{{ {' && '.join(steps)}; }} || exit {MISTAKE}")
            )

    def start(self) -> int:
        """Starts the command on all workers. They write run.log and, at the end, run.code.

        Before that, all workers copy run.log to runs/logs/NAME/ in the bucket.
        """
        command = shlex.join([".venv/bin/python", "-m", "transformer", *self.args.command])
        if self.args.command[0] == "train":  # for the goodput: paid since the machine started
            command = f'export TRANSFORMER_PAID_SINCE=$(date -d "$(uptime -s)" +%s); {command}'
        if self.args.env:
            command = f". ../{VARIABLES}; {command}"
        logs = f"runs/logs/{self.args.name}"
        keep = f"mkdir -p {logs} && cp run.log {logs}/$(hostname)-$(date +%s).log; "
        script = f"{command} > run.log 2>&1; code=$?; {keep * bool(self.args.bucket)}"
        script += "echo $code > run.code"
        return self.on(
            self.everyone,
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
        return self.on(["--worker=0"], f"cd transformer || exit; {watch}")

    def stop(self) -> int:
        """Stops the run as a preemption does: it saves a checkpoint and ends.

        The pattern only matches at the beginning of a command. The shell that waits to write
        run.code contains the same words further on, and must not be stopped.
        """
        return self.on(
            self.everyone,
            "touch transformer/run.stopped; pkill -TERM -f '^[^ ]*python -m transformer' || true",
        )

    def status(self) -> int:
        """Prints the state of the TPU."""
        return self.gcloud("describe", f"--format=value({self.described})")

    def delete(self) -> int:
        """Deletes the TPU."""
        return self.gcloud("delete", *self.delete_options)

    def describe(self, fields: str) -> str:
        """Returns fields of gcloud's description of the TPU, or "" if it does not exist."""
        command = [*self.words("describe"), *self.where, f"--format=value({fields})"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def state(self) -> str:
        """Returns READY, PREEMPTED, ..., or "" if the TPU does not exist.

        Exits with code 2 if it is of another --type.
        """
        if self.dry:
            return ""
        state, kind = (*self.describe(self.described).split(), "", "")[:2]
        target_type, _ = product(self.args.type)
        if kind and kind.rpartition("/")[2] != target_type:
            mistake(
                f"--type: {self.args.name} exists and is a {kind.rpartition('/')[2]}, not a "
                f"{target_type}; delete it, or choose another name"
            )
        return state

    def wait(self) -> int:
        """Waits until the TPU is there, after `create`."""
        return 0

    def attempts(self) -> int:
        """Creates, installs, starts and follows. Retries after failures that may pass."""
        for attempt in range(self.args.restarts + 1):
            if attempt:
                print(f"launch: restarting ({attempt} of {self.args.restarts})", file=sys.stderr)
                time.sleep(self.args.wait)
            state = self.state()
            exists = state in (self.ready, *self.pending)
            code = self.delete() if state and not exists else 0
            code = code or (0 if exists else self.create()) or self.wait()
            self.is_up = code == 0
            code = code or self.install() or self.start() or self.follow()
            if code in (0, MISTAKE, STOPPED):
                break
        return code

    def up(self) -> int:
        """Does all parts, and then says what is still billed."""
        try:
            code = self.attempts()
        except KeyboardInterrupt:
            code = STOPPED
        if code == 0 and self.args.delete:
            return self.delete()
        queued = self.pending and code == STOPPED
        if (self.is_up or queued) and not self.dry:
            options = [*self.where, *["--queued"] * bool(self.pending)]
            delete = shlex.join(["python", "launch/tpu_vm.py", "delete", *options])
            stays = "stays up and is billed" if self.is_up else "stays in the queue"
            print(
                f"launch: {self.args.name} {stays} until it is deleted: {delete}", file=sys.stderr
            )
        return code


class Queued(Tpu):
    """A queued resource: one TPU VM per slice, which the cloud creates when it has room.

    The verbs are those of a TPU VM (cloud.google.com/tpu/docs/queued-resources). If a slice is
    preempted, the request becomes SUSPENDED, and must be deleted and made again.
    """

    group, ready = "queued-resources", "ACTIVE"
    pending = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
    described = "state.state,tpu.nodeSpec[0].node.acceleratorType"
    everyone, delete_options = ["--node=all", "--worker=all"], ["--quiet", "--force"]

    def requested(self, kind: str, image: str) -> list[str]:
        name, slices = self.args.name, self.args.slices
        several = [f"--node-count={slices}", f"--node-prefix={name}"]
        nodes = several if slices > 1 else [f"--node-id={name}"]
        return [f"--accelerator-type={kind}", f"--runtime-version={image}", *nodes]

    def wait(self) -> int:
        """Waits until the request is filled. Returns MISTAKE if another would also fail."""
        last = ""
        while not self.dry and (state := self.state()) != self.ready:
            if state not in self.pending:
                problem = self.describe("state.failedData.error.message").strip()
                print(f"launch: {self.args.name} is {state}: {problem}", file=sys.stderr)
                return MISTAKE if STAYS.search(problem) else 1
            if state != last:
                print(f"launch: {self.args.name} is {state}", file=sys.stderr)
            last = state
            time.sleep(self.args.wait)
        return 0


def _parser() -> Parser:
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
    parser.add_argument("--queued", action="store_true", help="wait in the queue of the cloud")
    parser.add_argument("--slices", type=int, default=1, help="number of TPUs (default: 1)")
    parser.add_argument("--price", type=float, metavar="USD", help="price of one chip per hour")
    parser.add_argument(
        "--restarts", type=int, default=20, help="attempts after the first one (default: 20)"
    )
    parser.add_argument("--wait", type=float, default=60, help="seconds before a restart")
    several = {"action": "append", "default": [], "help": "see above"}
    parser.add_argument("--env", type=variable, metavar="NAME", **several)
    for verb in ("create", "ssh"):
        parser.add_argument(f"--{verb}", metavar="--OPTION=VALUE", **several)
    parser.add_argument("--delete", action="store_true", help="delete the TPU when `up` succeeds")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands without running them"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parse(_parser(), argv)
    check_name(args.name)
    check_numbers(args, restarts=0, slices=1)
    if args.verb in ("up", "start"):
        check_command(args.command, ROOT)
    if args.verb in ("up", "create"):
        if not args.type:
            mistake("--type: missing; set the kind of TPU, such as v5p-128")
        product(args.type)
        tpu = machine("--type", args.type, IMAGES, args.slices)
        hosts = args.slices > 1 or tpu.chips > (8 if tpu.chip.axes == 2 else HOST)
        if args.verb == "up" and hosts and not args.bucket:
            several = f"{args.slices} times " * (args.slices > 1)
            mistake(
                f"--type: {several}{args.type!r} has more than one host, and all must share "
                "--workdir; keep runs/ in a bucket with --bucket=NAME"
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
        check_files(args.command, uncommitted())
    if args.verb in ("up", "create"):
        print_price(machine("--type", args.type, IMAGES, args.slices), args.price)
    kind = Queued if args.queued or args.slices > 1 else Tpu
    return getattr(kind(args), args.verb)()


if __name__ == "__main__":
    start(main)
