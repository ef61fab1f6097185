"""The launchers for GKE and for local processes, and the errors of all launchers."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_launch import GKE, ROOT, TRAIN, UP, V5P, launch

LOCAL = """
import sys
sys.path.insert(0, "launch")
import local
sys.exit(local.run([sys.executable, "-c", sys.argv[1]], 2, 1, 12355, []))
"""


def test_local_relays_output_without_gloo_messages():
    child = (
        "import sys; print('[Gloo] Rank 0 is connected to 1 peer ranks.'); print('said'); "
        "sys.stderr.write('told\\n')"
    )
    result = subprocess.run(
        [sys.executable, "-c", LOCAL, child], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "said\n" and sorted(result.stderr.splitlines()) == [
        "[1] said",
        "[1] told",
        "told",
    ]


def test_local_distinguishes_a_stop_from_a_failure():
    child = (
        "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(143)); "
        "print('ready', flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", LOCAL, child],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert {launcher.stdout.readline(), launcher.stdout.readline()} == {"ready\n", "[1] ready\n"}
    launcher.send_signal(signal.SIGINT)
    assert re.fullmatch(
        r"process [01] of 2 was stopped \(exit code 143\); the same command resumes the run\n",
        launcher.communicate()[0],
    )
    assert launcher.returncode == 143


XPK = """
bare = ["--help", "--dry-run", "--spot", "--flex", "--on-demand", "--no-use-parallel-containers"]
valued = {"--workload", "--cluster", "--tpu-type", "--num-slices", "--docker-image", "--storage",
    "--max-restarts", "--restart-on-exit-codes", "--termination-grace-period-seconds", "--command",
    "--env-file", "--project", "--zone", "--priority", "--reservation"}
import json, os, sys
if sys.argv[1:3] != ["workload", "create"]:
    sys.exit(f"no {sys.argv[1:3]}")
options = dict(word.partition("=")[::2] for word in sys.argv[3:] if word not in bare)
if unknown := options.keys() - valued:
    sys.exit(f"unknown {unknown}")
if file := options.get("--env-file"):
    options["env"], options["mode"] = open(file).read(), os.stat(file).st_mode & 0o777
json.dump(options, open(FOLDER + "/called", "w"))
sys.exit(CODE)
"""
"""A fake xpk with the options of `xpk workload create` (version 1.9) that are used here."""


def fake_xpk(fake_tool, tmp_path, code: int = 0):
    script = XPK.replace("FOLDER", repr(str(tmp_path))).replace("CODE", str(code))
    (tmp_path / "xpk.py").write_text(script)
    return fake_tool("xpk", f'exec {sys.executable} {tmp_path}/xpk.py "$@"')


def test_gke_creates_a_workload_with_xpk(fake_tool, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "the secret")
    options = [*GKE, V5P, "--slices=2", "--env=WANDB_API_KEY", "--env=LEVEL=2"]
    path = fake_xpk(fake_tool, tmp_path)
    out = launch("gke.py", *options, "--xpk=--zone=z", "--xpk=--spot", *TRAIN, path=path)
    called = json.loads((tmp_path / "called").read_text())
    assert (
        called.pop("env") == "WANDB_API_KEY=the secret\nLEVEL=2\n" and called.pop("mode") == 0o600
    )
    assert not Path(called.pop("--env-file")).exists() and "the secret" not in out
    assert called == {
        "--workload": "n",
        "--cluster": "c",
        "--tpu-type": "v5p-4x4x4",
        "--num-slices": "2",
        "--docker-image": "i",
        "--storage": "runs",
        "--max-restarts": "20",
        "--restart-on-exit-codes": "1,3-126",
        "--termination-grace-period-seconds": "120",
        "--zone": "z",
        "--command": "cd /transformer && exec python -m transformer train "
        "--config=experiments/smoke.py '--workdir=runs/a b'",
    }


def test_gke_returns_the_code_of_xpk(fake_tool, tmp_path):
    launch("gke.py", *GKE, V5P, *TRAIN, path=fake_xpk(fake_tool, tmp_path, 3), code=3)


def test_run_in_the_container_receives_the_signal_of_xpk(tmp_path):
    """xpk's container sends SIGTERM to the subshell of the command, which must be the run."""
    (tmp_path / "python").write_text(
        "#!/bin/bash\ntrap 'kill %1; echo saved; exit 143' TERM\nsleep 20 &\necho up\nwait\n"
    )
    (tmp_path / "python").chmod(0o755)
    printed = launch("gke.py", *GKE, V5P, "--dry-run", *TRAIN)
    (command,) = (word for word in shlex.split(printed) if word.startswith("--command="))
    command = command.removeprefix("--command=").replace("/transformer ", f"{tmp_path} ", 1)
    wrapper = f"""
_sigterm() (kill -SIGTERM $! 2>/dev/null;); trap _sigterm SIGTERM
({command}) & PID=$!
while kill -0 $PID 2>/dev/null; do sleep 0.2; done
wait $PID; exit $?
"""
    process = subprocess.Popen(
        ["bash", "-c", wrapper],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=15)[0] == "saved\n" and process.returncode == 143


SHAPES = "a TPU v5e slice is one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("gke.py", [*GKE, "--topology=v9:2x2", *TRAIN], "--topology: no chip 'v9'"),
        ("gke.py", [*GKE, "--topology=v5e:3x5", *TRAIN],
         f"--topology: 'v5e:3x5' does not exist; {SHAPES}"),
        ("gke.py", [*GKE, "--topology=v5e:1x3", *TRAIN],
         f"--topology: 'v5e:1x3' does not exist; {SHAPES}"),
        ("gke.py", [*GKE, "--topology=h100:8", *TRAIN],
         "--topology: 'h100:8' is not available here; choose one of v4,"),
        ("gke.py", [*GKE, "--topology=v5p:3x5x7", *TRAIN],
         "--topology: 'v5p:3x5x7' does not exist; a TPU v5p slice consists of hosts"),
        ("gke.py", [*GKE, V5P, "--slices=0", *TRAIN], "--slices: 0 is too small; set 1 or more"),
        ("gke.py", [*GKE, V5P, "--restarts=-1", *TRAIN],
         "--restarts: -1 is too small; set 0 or more"),
        ("gke.py", ["n_1", *GKE[1:], V5P, *TRAIN],
         "NAME: 'n_1' is not a valid name; write at most 40 lowercase letters"),
        ("gke.py", [*GKE[:-1], V5P, *TRAIN],
         "--workdir: 'runs/a b' would be lost with the machine; keep runs/ in a bucket with --"),
        ("gke.py", ["n", "--image=i", V5P, *TRAIN],
         "the following arguments are required: --cluster; see gke.py --help"),
        ("gke.py", [*GKE, V5P, "--", "train", "--workdir=runs/a\nb"],
         "an option after -- contains a line break, which xpk cannot pass on"),
        ("gke.py", [*GKE, V5P, '--env=A=1"', *TRAIN], "--env: the value of A has one of"),
        ("gke.py", [*GKE, V5P, "--price=nan", *TRAIN], "--price: nan is not a price; set USD"),
        ("gke.py", [*GKE, V5P, "--env=A=1\n2", *TRAIN], "--env: the value of A has several lines"),
        ("gke.py", [*GKE, V5P, "--", "train", "--workdir", "out/a"],
         "--workdir: 'out/a' would be lost with the machine; write runs/"),
        ("gke.py", [*GKE, V5P, "--", "train", "--workdir=runs/../a"],
         "--workdir: 'runs/../a' would be lost with the machine"),
        ("gke.py", [*GKE, V5P, "--", "trian"], "no verb 'trian' after --; choose from: train, "),
        ("tpu_vm.py", ["up", "n", "--zone=z", *TRAIN], "--type: missing; set the kind of TPU"),
        ("tpu_vm.py", ["up", "n"],
         "the following arguments are required: --zone; see tpu_vm.py --help"),
        ("tpu_vm.py", ["create", "n", "--zone=z", "--type=v9-8"],
         "--type: no chip 'v9'; choose from: v4, v5e"),
        ("tpu_vm.py", ["create", "n", "--zone=z", "--type=tpu7x-8"],
         "--type: 'tpu7x-8' is not available here; choose one of v4, v5e, v5p, v6e"),
        ("tpu_vm.py", ["create", "n", "--zone=z", "--type=v5p:2x2x16"],
         "--type: 'v5p:2x2x16' is not available; a TPU VM with this many chips is v5p:4x4x4"),
        ("tpu_vm.py", ["create", "My-tpu", "--zone=z", "--type=v4-8"],
         "NAME: 'My-tpu' is not a valid name; write at most 40 lowercase letters"),
        ("tpu_vm.py", ["create", "a" * 41, "--zone=z", "--type=v4-8"],
         "write at most 40 lowercase letters"),
        ("tpu_vm.py", ["create", "a-", "--zone=z", "--type=v4-8"],
         "NAME: 'a-' is not a valid name; write at most 40 lowercase letters"),
        ("tpu_vm.py", [*UP, "--bucket=b/runs", *TRAIN],
         "--bucket: 'b/runs' is not the name of a bucket; write NAME or gs://NAME"),
        ("tpu_vm.py", [*UP, "--slices=0", *TRAIN], "--slices: 0 is too small; set 1 or more"),
        ("tpu_vm.py", ["up", "n", "--zone=z", "--type=v5e-8", "--slices=2", *TRAIN],
         "--type: 2 times 'v5e-8' has more than one host, and all must share --workdir"),
        ("tpu_vm.py", [*UP, "--spot", *TRAIN],
         "--spot: the run's checkpoints would be lost when the TPU is preempted"),
        ("tpu_vm.py", ["up", "n", "--zone=z", "--type=v5e-16", "--", "train", "--workdir=/data/x"],
         "--type: 'v5e-16' has more than one host, and all must share --workdir; keep runs/ in a"),
        ("tpu_vm.py", ["up", "n", "--zone=z", "--type=v5p-16", *TRAIN], "has more than one host"),
        ("tpu_vm.py", [*UP, "--spot", "--bucket=b", "--", "train", "--workdir=out"],
         "--workdir: 'out' would be lost with the machine"),
        ("tpu_vm.py", [*UP, "--", "train", "--workdir=gs://b/runs/1"],
         "--workdir: 'gs://b/runs/1' is not a folder; write the path where the bucket is mounted"),
        ("tpu_vm.py", [*UP, "--restarts=-1", *TRAIN], "--restarts: -1 is too small; set 0 or more"),
        ("tpu_vm.py", [*UP, "--", "train", "--config=experiments/no.py:post"],
         "experiments/no.py'"),
        ("tpu_vm.py", [*UP, "--", "train", f"--config={ROOT / 'experiments/smoke.py'}"],
         "does not exist where the run is"),
        ("tpu_vm.py", [*UP, "--", "train", "--config=../smoke.py"],
         "--config: '../smoke.py' does not exist where the run is"),
        ("slurm.py", [], "no command to run; put it after --"),
        ("slurm.py", ["--nodes=0", *TRAIN], "--nodes: 0 is too small; set 1 or more"),
        ("slurm.py", ["--time=24h", *TRAIN], "--time: '24h' is not a time; write minutes, MM:SS"),
        ("slurm.py", ["--time=1:2:3:4", *TRAIN], "--time: '1:2:3:4' is not a time; write minutes"),
        ("slurm.py", ["--array=3", *TRAIN], "--array: 3 splits a sweep, not train"),
        ("slurm.py", ["--array=-1", "--", "sweep"], "--array: -1 is too small; set 0 or more"),
        ("slurm.py", ["--array=3", "--", "sweep", "--shard=1/2"],
         "--shard: is set for every task by --array=3"),
        ("slurm.py", ["--", "train", "--config=/smoke.py"],
         "--config: '/smoke.py' does not exist where the run is"),
        ("local.py", ["--", "train", "--config", "experiments/no.py"], "experiments/no.py'"),
        ("local.py", ["--", "trian"], "no verb 'trian'"),
        ("local.py", TRAIN[1:], "put -- before the verb: local.py ... -- train ..."),
        ("local.py", ["--procs=2", *TRAIN],
         "no option '--procs=2'; put options of python -m transformer after --"),
        ("local.py", ["--processes=0", *TRAIN], "--processes: 0 is too small; set 1 or more"),
    ],
)  # fmt: skip
def test_invalid_options_fail_before_anything_runs(script, options, message):
    """Errors are one line, and also occur with --dry-run."""
    errors = launch(script, "--dry-run", *options, code=2)
    assert message in errors and errors.count("\n") == 1


def test_missing_tool_is_named():
    environment = {"PATH": ""}
    for script, options, tool in (
        ("slurm.py", [], "sbatch"),
        ("tpu_vm.py", UP, "gcloud"),
        ("gke.py", [*GKE, V5P], "xpk"),
    ):
        command = [sys.executable, f"launch/{script}", *options, *TRAIN]
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 2 and result.stderr.endswith(
            f"launch: {tool} is not installed on this machine\n"
        )


def test_launchers_list_the_verbs_of_the_command_line(capsys):
    from transformer.cli import main

    main([])
    listed = capsys.readouterr().out.partition("verbs:")[2]
    verbs = launch("slurm.py", "--", "trian", code=2).partition("choose from: ")[2]
    assert set(re.findall(r"^ {4}(\w+) ", listed, re.M)) == set(verbs.strip().split(", "))
