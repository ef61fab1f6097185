"""TPU VMs and queued resources, controlled with gcloud, for launch/tpu_vm.py."""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shell import MISTAKE, ROOT, machine, mistake, run, run_together, write_variables

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

ALIVE = "^[^ ]*python -m transformer"
"""A pattern for pgrep and pkill that only matches the beginning of the run's own command. The shell
that waits to write run.code contains the same words further on."""


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
    """One TPU VM. Methods return exit codes, except `state` and `describe`."""

    group, ready, pending, over = "tpu-vm", "READY", (), ("PREEMPTED",)
    described = "state,acceleratorType"
    delete_options = ("--quiet",)

    def __init__(self, args):
        self.args, self.dry = args, args.dry_run
        # What is left in the cloud when `up` ends: "", or words for the user.
        self.left = ""
        self.place = [f"--zone={args.zone}"]
        self.place += [f"--project={args.project}"] if args.project else []

    @property
    def nodes(self) -> list[str]:
        """The names of the TPU VMs."""
        return [self.args.name]

    def gcloud(self, verb: str, *options: str, stderr_lines: list[str] | None = None) -> int:
        """Runs a gcloud command for this TPU VM or queued resource."""
        return run(self._words(verb, *options), self.dry, stderr_lines=stderr_lines)

    def _words(self, verb: str, *options: str) -> list[str]:
        words = ["gcloud", "compute", "tpus", self.group, verb, self.args.name]
        return [*words, *self.place, *options]

    def _on_node(self, verb: str, *options: str) -> list[str]:
        """A gcloud command that connects to workers of a TPU VM. gcloud has the same for queued
        resources, but that also exits with 0 if it could not connect."""
        return ["gcloud", "compute", "tpus", "tpu-vm", verb, *options, *self.args.ssh]

    def on_all(self, command: str) -> int:
        """Runs a shell command on all workers of all TPU VMs."""
        options = [*self.place, "--worker=all", f"--command={command}"]
        return run_together([self._on_node("ssh", node, *options) for node in self.nodes], self.dry)

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
            copy = [*self.place, *map(str, files)]
            copies = [
                self._on_node("scp", *copy, f"{node}:", "--worker=all") for node in self.nodes
            ]
            return (
                run([*git, "HEAD"], self.dry)
                or run_together(copies, self.dry)
                or self.on_all(f"{{ {' && '.join(steps)}; }} || exit {MISTAKE}")
            )

    def start(self) -> int:
        """Starts the command on all workers, unless it runs there. They write run.log and, at the
        end, run.code.

        Before that, all workers copy run.log to runs/logs/NAME/ in the bucket. For the goodput, the
        machine is paid since it started, or since the end of the run before.
        """
        command = shlex.join([".venv/bin/python", "-m", "transformer", *self.args.command])
        if self.args.env:
            command = f". ../{VARIABLES}; {command}"
        logs = f"runs/logs/{self.args.name}"
        keep = f"mkdir -p {logs} && cp run.log {logs}/$(hostname)-$(date +%s).log; "
        script = f"{command} > run.log 2>&1; code=$?; {keep * bool(self.args.bucket)}"
        script += "echo $code > run.code"
        since = 'stat -c %Y run.code 2> /dev/null || date -d "$(uptime -s)" +%s'
        paid = f"export TRANSFORMER_PAID_SINCE=$({since}); " * (self.args.command[0] == "train")
        return self.on_all(
            f"cd transformer && if [ ! -e run.code ] && pgrep -f '{ALIVE}' > /dev/null; "
            f"then echo 'launch: the run is active; following it'; else {paid}"
            "rm -f run.code run.stopped; "
            f"(setsid nohup sh -c {shlex.quote(script)} > /dev/null 2>&1 &); fi",
        )

    def follow(self) -> int:
        """Prints the first worker's output until its run ends.

        Returns the run's exit code, or STOPPED if `stop` ended it.
        """
        watch = (
            "tail -n +1 -F run.log 2> /dev/null & while [ ! -s run.code ]; do sleep 5; done; "
            f"sleep 2; kill $!; [ -e run.stopped ] && exit {STOPPED}; exit $(cat run.code)"
        )
        options = [*self.place, "--worker=0", f"--command=cd transformer || exit; {watch}"]
        return run(self._on_node("ssh", self.nodes[0], *options), self.dry)

    def stop(self) -> int:
        """Stops the run as a preemption does: it saves a checkpoint and ends."""
        return self.on_all(f"touch transformer/run.stopped; pkill -TERM -f '{ALIVE}' || true")

    def status(self) -> int:
        """Prints the state of the TPU."""
        return self.gcloud("describe", f"--format=value({self.described})")

    def delete(self) -> int:
        """Deletes the TPU."""
        return self.gcloud("delete", *self.delete_options)

    def describe(self, fields: str) -> list[str]:
        """Returns fields of gcloud's description, or [] if the TPU does not exist.

        Repeats the question, at most `--restarts` times, if it has no answer.
        """
        command = self._words("describe", f"--format=value({fields})")
        for _ in range(self.args.restarts + 1):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return result.stdout.rstrip("\n").split("\t")
            if "NOT_FOUND" in result.stderr:
                return []
            problem = (result.stderr.strip().splitlines() or ["gcloud failed"])[-1]
            print(f"launch: the state of {self.args.name} is unknown: {problem}", file=sys.stderr)
            time.sleep(self.args.wait)
        mistake(f"{self.args.name} may exist and be billed; its state is unknown ({problem})")

    def state(self) -> str:
        """Returns READY, PREEMPTED, ..., or "" if the TPU does not exist, and sets `left`.

        Exits with code 2 if it is of another --type or has other --slices.
        """
        if self.dry:
            return ""
        state, kind, slices = (*self.describe(self.described), "", "", "")[:3]
        kind, wanted = kind.rpartition("/")[2], product(self.args.type)[0]
        if kind and (kind, slices or "1") != (wanted, str(self.args.slices)):
            has, needs = f"{slices or 1} x {kind}", f"{self.args.slices} x {wanted}"
            mistake(
                f"--type: {self.args.name} exists and is {has}, not {needs}; delete it, or choose "
                "another name"
            )
        waits = dict.fromkeys(self.pending, "waits in the queue, and is billed once it is filled")
        words = waits | dict.fromkeys(("", *self.over), "")
        words[self.ready] = "stays up and is billed"
        self.left = words.get(state, "may exist and be billed")
        return state

    def wait(self) -> int:
        """Waits until the TPU is there, after `create`."""
        return 0

    def attempt(self) -> int:
        """Creates, installs, starts and follows, as far as that is not done."""
        state = self.state()
        exists = state in (self.ready, *self.pending)
        if state and not exists and (code := self.delete()):
            return code
        if not exists:
            self.left = "may exist and be billed"
            if code := self.create():
                self.state()
                return code
        if code := self.wait():
            return code
        self.left = "stays up and is billed"
        return self.install() or self.start() or self.follow()

    def up(self) -> int:
        """Does all parts, repeats what may pass, and says what is left in the cloud."""
        try:
            for attempt in range(self.args.restarts + 1):
                if attempt:
                    count = f"{attempt} of {self.args.restarts}"
                    print(f"launch: restarting ({count})", file=sys.stderr)
                    time.sleep(self.args.wait)
                    if self.left and not self.dry and not self.state():
                        print(f"launch: {self.args.name} was deleted", file=sys.stderr)
                        return STOPPED
                code = self.attempt()
                if code in (0, MISTAKE, STOPPED):
                    break
        except KeyboardInterrupt:
            code = STOPPED
        if code == 0 and self.args.delete:
            return self.delete()
        if self.left and not self.dry:
            options = [self.args.name, *self.place, *["--queued"] * (self.group != "tpu-vm")]
            delete = shlex.join(["python", "launch/tpu_vm.py", "delete", *options])
            print(f"launch: {self.args.name} {self.left}; delete it: {delete}", file=sys.stderr)
        return code


class Queued(Tpu):
    """A queued resource: one TPU VM per slice, which the cloud creates when it has room.

    The states are those of cloud.google.com/tpu/docs/queued-resources. If a slice is preempted, the
    request becomes SUSPENDED, and must be deleted and made again.
    """

    group, ready, over = "queued-resources", "ACTIVE", ("FAILED", "SUSPENDED")
    pending = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
    described = (
        "state.state,tpu.nodeSpec[0].node.acceleratorType,"
        "tpu.nodeSpec[0].multisliceParams.nodeCount"
    )
    delete_options = ("--quiet", "--force")

    @property
    def nodes(self):
        name, slices = self.args.name, self.args.slices
        return [f"{name}-{i}" for i in range(slices)] if slices > 1 else [name]

    def requested(self, kind: str, image: str) -> list[str]:
        name, slices = self.args.name, self.args.slices
        several = [f"--node-count={slices}", f"--node-prefix={name}"]
        nodes = several if slices > 1 else [f"--node-id={name}"]
        return [f"--accelerator-type={kind}", f"--runtime-version={image}", *nodes]

    def wait(self) -> int:
        """Waits until the request is filled. Returns MISTAKE if another would also fail, and
        STOPPED if someone deletes it."""
        last = ""
        while not self.dry and (state := self.state()) != self.ready:
            if state in ("", "DELETING"):
                print(f"launch: {self.args.name} was deleted", file=sys.stderr)
                return STOPPED
            if state not in self.pending:
                problem = "".join(self.describe("state.failedData.error.message")).strip()
                print(f"launch: {self.args.name} is {state}: {problem}", file=sys.stderr)
                return MISTAKE if STAYS.search(problem) else 1
            if state != last:
                print(f"launch: {self.args.name} is {state}", file=sys.stderr)
            last = state
            time.sleep(self.args.wait)
        return 0
