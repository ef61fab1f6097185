"""The launcher for TPU VMs: queued resources, several slices, interrupts and prices."""

import functools
import os
import re
import signal
import subprocess
import sys

import pytest
from test_launch import ROOT, TRAIN, UP, launch

QUEUED = [*UP, "--queued", "--bucket=b"]


def queue(tmp_path, states: str) -> str:
    """Returns a fake gcloud whose queued resource goes through `states`, one a call of describe.

    Creating it fails while it exists. A run ends with the code in the file `code`, or 0.
    """
    return f"""
log={tmp_path}/log; echo "$@" >> $log
case "$*" in
  *failedData*) cat {tmp_path}/problem 2> /dev/null;;
  *describe*) n=$(cat {tmp_path}/n 2> /dev/null || echo 0); echo $((n + 1)) > {tmp_path}/n
    set -- {states}; shift $n; [ "$1" = absent ] && echo NOT_FOUND >&2 && exit 1
    [ "$1" = unknown ] && echo "no network" >&2 && exit 1; printf "$1\\tv5p-8\\t\\n";;
  *run.code*exit*) code=$(cat {tmp_path}/code 2> /dev/null || echo 0); rm -f {tmp_path}/code
    exit $code;;
esac
"""


def test_queued_tpu_waits_for_the_cloud(fake_tool, tmp_path):
    states = "absent ACCEPTED WAITING_FOR_RESOURCES WAITING_FOR_RESOURCES PROVISIONING ACTIVE"
    path = fake_tool("gcloud", queue(tmp_path, states))
    launch("tpu_vm.py", *QUEUED, *TRAIN, path=path)
    log = (tmp_path / "log").read_text()
    assert log.count(" create ") == 1 and log.count(" describe ") == 6
    create = next(line for line in log.splitlines() if " create " in line)
    assert create == (
        "compute tpus queued-resources create my-tpu --zone=z --accelerator-type=v5p-8 "
        "--runtime-version=v2-alpha-tpuv5 --node-id=my-tpu"
    )
    assert log.index(" describe ") < log.index(" create ") < log.index(" scp ")


def test_queued_tpu_is_requested_again_after_a_preemption(fake_tool, tmp_path):
    """The run fails when the TPU is preempted. The suspended request is deleted and made again."""
    (tmp_path / "code").write_text("255")
    path = fake_tool("gcloud", queue(tmp_path, "absent ACTIVE SUSPENDED SUSPENDED CREATING ACTIVE"))
    launch("tpu_vm.py", *QUEUED, "--spot", *TRAIN, path=path)
    verbs = [line.split()[3] for line in (tmp_path / "log").read_text().splitlines()]
    attempt = ["scp", "ssh", "ssh", "ssh"]
    assert [verb for verb in verbs if verb != "describe"] == (
        ["create", *attempt, "delete", "create", *attempt]
    )
    assert " delete my-tpu --zone=z --quiet --force" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("problem", "code", "created"),
    [("Quota limit 'TPUs' has been exceeded. Limit: 0", 2, 1), ("no capacity in time", 1, 2)],
)
def test_request_that_fails_is_made_again_unless_the_quota_is_exceeded(
    fake_tool, tmp_path, problem, code, created
):
    (tmp_path / "problem").write_text(problem)
    path = fake_tool("gcloud", queue(tmp_path, "absent FAILED FAILED FAILED"))
    errors = launch("tpu_vm.py", *QUEUED, "--restarts=1", *TRAIN, path=path, code=code)
    assert (tmp_path / "log").read_text().count(" create ") == created
    assert f"launch: my-tpu is FAILED: {problem}" in errors and "billed" not in errors


@pytest.mark.parametrize("states", ["absent ACCEPTED absent", "absent ACTIVE absent"])
def test_request_that_someone_deletes_is_not_made_again(fake_tool, tmp_path, states):
    """While it waits in the queue, and while the run is followed."""
    (tmp_path / "code").write_text("255")
    path = fake_tool("gcloud", queue(tmp_path, states))
    errors = launch("tpu_vm.py", *QUEUED, *TRAIN, path=path, code=130)
    assert (tmp_path / "log").read_text().count(" create ") == 1
    assert errors.endswith("launch: my-tpu was deleted\n")


def test_lost_network_is_not_a_missing_tpu(fake_tool, tmp_path):
    path = fake_tool("gcloud", queue(tmp_path, "unknown ACCEPTED unknown ACTIVE"))
    launch("tpu_vm.py", *QUEUED, *TRAIN, path=path)
    assert " create " not in (tmp_path / "log").read_text()
    (tmp_path / "n").unlink()
    fake_tool("gcloud", queue(tmp_path, "unknown unknown unknown"))
    errors = launch("tpu_vm.py", *QUEUED, "--restarts=1", *TRAIN, path=path, code=2)
    assert errors.endswith("may exist and be billed; its state is unknown (no network)\n")


def test_request_for_another_number_of_slices_is_refused(fake_tool, tmp_path):
    script = "case \"$*\" in *describe*) printf 'ACTIVE\\tv5p-8\\t2\\n';; *) exit 9;; esac"
    path = fake_tool("gcloud", script)
    errors = launch("tpu_vm.py", *QUEUED, "--slices=4", *TRAIN, path=path, code=2)
    assert "--type: my-tpu exists and is 2 x v5p-8, not 4 x v5p-8; delete it" in errors


def test_installation_that_fails_on_one_slice_ends_up(fake_tool, tmp_path):
    script = queue(tmp_path, "absent ACTIVE").replace("v5p-8\\t", "v5p-8\\t2")
    script += 'case "$*" in *"ssh my-tpu-1"*uv*) exit 2;; esac'
    path = fake_tool("gcloud", script)
    errors = launch("tpu_vm.py", *QUEUED, "--slices=2", *TRAIN, path=path, code=2)
    log = (tmp_path / "log").read_text()
    assert "ssh my-tpu-0 " in log and "setsid" not in log
    assert "my-tpu stays up and is billed; delete it: " in errors


def test_slices_are_one_request(tmp_path):
    options = ["my-tpu", "--zone=z", "--type=v5e-16", "--slices=4", "--bucket=b", "--spot"]
    lines = launch("tpu_vm.py", "up", *options, "--dry-run", *TRAIN).splitlines()
    create, _, *pairs, follow = lines
    assert create == (
        "gcloud compute tpus queued-resources create my-tpu --zone=z "
        "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --node-count=4 "
        "--node-prefix=my-tpu --spot"
    )
    assert len(pairs) == 12 and all(" --worker=all" in line for line in pairs)
    nodes = [re.search(r"my-tpu-\d", line).group() for line in pairs]
    assert nodes == [f"my-tpu-{i}" for i in range(4)] * 3  # scp, install, start
    assert "tpu-vm ssh my-tpu-0 --zone=z --worker=0 " in follow
    assert launch("tpu_vm.py", "stop", *options, "--dry-run").count("\n") == 4
    for verb in ("status", "delete"):
        assert "queued-resources" in launch("tpu_vm.py", verb, *options, "--dry-run")


def interrupt(environment, said: str, *options: str) -> tuple[int, str]:
    """Starts tpu_vm.py, sends SIGINT when it has printed `said`, and returns code and output."""
    process = subprocess.Popen(
        [sys.executable, "launch/tpu_vm.py", *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background of a shell ignores this signal, and so would its children.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    printed = ""
    while said not in printed:
        printed += process.stdout.readline()
    process.send_signal(signal.SIGINT)
    printed += process.communicate(timeout=20)[0]
    return process.returncode, printed


@pytest.mark.parametrize("queued", [False, True])
def test_interrupted_launcher_says_what_remains(fake_tool, tmp_path, queued):
    """Ctrl-C while the run is followed, and while the request waits in the queue."""
    script = 'case "$*" in *run.code*exit*) echo "step 1"; sleep 2;; esac'
    if queued:
        script = 'case "$*" in *describe*) echo WAITING_FOR_RESOURCES;; esac'
    path = fake_tool("gcloud", script)
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    options = [*UP, *(["--queued"] * queued), "--wait=1"]
    said = "my-tpu is WAITING_FOR_RESOURCES" if queued else "step 1"
    code, printed = interrupt(environment, said, *options, *TRAIN)
    assert code == 130 and "Traceback" not in printed
    waits = "waits in the queue, and is billed once it is filled"
    left, flag = waits if queued else "stays up and is billed", " --queued" * queued
    assert printed.endswith(
        f"launch: my-tpu {left}; delete it: python launch/tpu_vm.py delete my-tpu --zone=z{flag}\n"
    )


@pytest.mark.parametrize(
    ("options", "price"),
    [
        (["--type=v5p-128"], "launch: 64 chips, 268.80 USD per hour, 6,451.20 per day (4.20 per "),
        (["--type=v5e-16", "--slices=2"], "launch: 32 chips, 38.40 USD per hour, "),
        (["--type=v5e:1x1", "--price=0.5"],
         "launch: 1 chip, 0.50 USD per hour, 12.00 per day (0.50 per chip-hour)\n"),
    ],
)  # fmt: skip
def test_price_is_shown_first(options, price):
    """The chips of all slices are counted. Without --price, the price is the list price."""
    command = ["launch/tpu_vm.py", "create", "n", "--zone=z", *options, "--dry-run"]
    result = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        text=True,
        check=True,
    )
    assert result.stdout.startswith(price)
    assert ("list price" in result.stdout) == ("--price=0.5" not in options)
