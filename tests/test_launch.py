"""What the launchers would run, read from --dry-run; and what they do when something ends, with stand-ins for gcloud and sbatch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAIN = ["--", "train", "--config=experiments/smoke.py", "--workdir=runs/a b"]


def launch(script: str, *options: str, path: Path | None = None, code: int = 0) -> str:
    """What it prints; it must end with this exit code."""
    environment = os.environ | ({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / script), *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout if code in (0, 5) else done.stderr


def test_tpu_vm_does_one_thing_after_another():
    where = ["my-tpu", "--zone=us-east5-a", "--project=p"]
    lines = launch(
        "tpu_vm.py", "up", *where, "--type=v5p-128", "--bucket=b", "--spot", "--delete", "--dry-run", *TRAIN
    ).splitlines()
    create, archive, scp, install, start, follow, delete = lines
    vm = "gcloud compute tpus tpu-vm"
    assert (
        create
        == f"{vm} create my-tpu --zone=us-east5-a --project=p --accelerator-type=v5p-128 --version=v2-alpha-tpuv5 --spot"
    )
    assert (
        archive.startswith("git archive")
        and scp.startswith(f"{vm} scp")
        and scp.endswith("transformer.tar.gz my-tpu: --worker=all")
    )
    assert (
        "--worker=all" in install
        and "--constraint constraints.txt" in install
        and "gcsfuse" in install
        and " b runs" in install
    )
    assert (
        "--worker=all" in start
        and "-m transformer train --config=experiments/smoke.py" in start
        and "runs/a b" in start
    )
    assert "--worker=0" in follow and "run.code" in follow
    assert delete == f"{vm} delete my-tpu --zone=us-east5-a --project=p --quiet"
    for verb in ("stop", "status", "delete", "install", "follow"):
        assert "my-tpu" in launch("tpu_vm.py", verb, *where, "--dry-run")


@pytest.fixture
def tools(tmp_path):
    """A folder for stand-ins: tools("gcloud", script) writes one."""

    def write(name: str, script: str) -> Path:
        (tmp_path / name).write_text("#!/bin/bash\n" + script)
        (tmp_path / name).chmod(0o755)
        return tmp_path

    return write


def test_tpu_vm_begins_again_after_a_preemption_and_not_after_a_mistake(tools, tmp_path):
    """The first two times the run ends with 143, and the TPU is gone once; then all is well."""
    counting = f"""
log={tmp_path}/log; echo "$@" >> $log
case "$*" in
  *describe*) [ $(grep -c 'run.code.*exit' $log) -eq 1 ] && [ $(grep -c ' create ' $log) -eq 1 ] && echo PREEMPTED || echo READY;;
  *"exit "*) n=$(grep -c 'run.code.*exit' $log); [ $n -ge 3 ] && exit 0; exit 143;;
esac
"""
    path = tools("gcloud", counting)
    where = ["up", "t", "--zone=z", "--type=v4-8", "--wait=0"]
    launch("tpu_vm.py", *where, *TRAIN, path=path)
    log = (tmp_path / "log").read_text()
    assert log.count(" create ") == 2 and log.count(" delete ") == 1  # the first again, once it was gone
    assert log.count("setsid") == 3
    path = tools("gcloud", f'echo "$@" >> {tmp_path}/log2\ncase "$*" in *"exit "*) exit 2;; esac\n')
    launch("tpu_vm.py", *where, *TRAIN, path=path, code=2)
    assert (tmp_path / "log2").read_text().count("setsid") == 1


def test_slurm_writes_a_script_that_queues_itself_again(tools, tmp_path):
    printed = launch("slurm.py", "--nodes=4", "--gpus-per-node=8", "--sbatch=--partition=gpu", "--dry-run", *TRAIN)
    assert printed.startswith("sbatch\n#!/bin/bash\n")
    for line in ("--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--signal=TERM@120", "--partition=gpu"):
        assert f"#SBATCH {line}\n" in printed
    assert "JAX_PLATFORMS" not in printed
    assert "JAX_PLATFORMS=cpu" in (cpu := launch("slurm.py", "--dry-run", *TRAIN)) and "ntasks-per-node=1" in cpu
    # What it does, with a run that ends in one way or another.
    script = tmp_path / "job.sh"
    script.write_text(printed.partition("\n")[2])
    path = tools("scontrol", f'echo "$@" > {tmp_path}/queued')
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    for code, restarts, queued in ((143, 0, True), (134, 3, True), (0, 0, False), (2, 0, False), (143, 20, False)):
        tools("srun", f'printf "%s|" "$@" > {tmp_path}/ran\nexit {code}')
        done = subprocess.run(
            ["bash", str(script)], env=environment | {"SLURM_RESTART_COUNT": str(restarts)}, check=False
        )
        assert done.returncode == code
        assert (tmp_path / "queued").exists() == queued
        (tmp_path / "queued").unlink(missing_ok=True)
    assert "|-m|transformer|train|--config=experiments/smoke.py|--workdir=runs/a b|" in (tmp_path / "ran").read_text()


def test_gke_makes_a_job_of_every_slice_and_a_pod_of_every_host():
    options = [
        "big",
        "--topology=v5p:4x4x4",
        "--slices=2",
        "--image=i",
        "--bucket=b",
        "--service-account=s",
        "--dry-run",
    ]
    command, _, manifest = launch("gke.py", *options, *TRAIN).partition("\n")
    assert command == "kubectl apply --filename=-"
    spec = json.loads(manifest)["spec"]
    (job,) = spec["replicatedJobs"]
    assert (
        job["replicas"] == 2 and job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"] == 16
    )
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice", "cloud.google.com/gke-tpu-topology": "4x4x4"
    }  # fmt: skip
    (container,) = pod["containers"]
    assert (
        container["command"][:4] == ["python", "-m", "transformer", "train"]
        and container["command"][-1] == "--workdir=runs/a b"
    )
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "b" and pod["serviceAccountName"] == "s"
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2] and spec["failurePolicy"]["maxRestarts"] == 20


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("gke.py", ["n", "--topology=v9:2x2", "--image=i", *TRAIN], "--topology: no 'v9:2x2'"),
        ("tpu_vm.py", ["up", "n", "--zone=z", *TRAIN], "--type: what kind of TPU"),
        ("tpu_vm.py", ["create", "n", "--zone=z", "--type=v9-8"], "no --type 'v9-8'"),
        ("slurm.py", [], "name what to run behind --"),
        ("slurm.py", TRAIN, "sbatch is not installed here"),
    ],
)
def test_mistakes_are_told_before_anything_runs(script, options, message):
    assert message in launch(script, *options, code=2)
