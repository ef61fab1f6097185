"""The launcher for SLURM, tested with fake versions of sbatch, srun and scontrol."""

import os
import subprocess

import pytest
from test_launch import TRAIN, launch


def test_slurm_script_requeues_itself(fake_tool, tmp_path):
    printed = launch(
        "slurm.py",
        "--nodes=4",
        "--gpus-per-node=8",
        "--sbatch=--partition=gpu",
        "--dry-run",
        *TRAIN,
    )
    for line in (
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--signal=TERM@120",
        "--partition=gpu",
    ):
        assert f"#SBATCH {line}\n" in printed
    assert "JAX_PLATFORMS" not in printed
    assert (
        "JAX_PLATFORMS=cpu" in (cpu := launch("slurm.py", "--dry-run", *TRAIN))
        and "ntasks-per-node=1" in cpu
    )
    # Run the script with several exit codes of srun.
    script = tmp_path / "job.sh"
    fake_tool("sbatch", f"cat > {script}")
    path = fake_tool("scontrol", f'echo "$@" > {tmp_path}/queued')
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    # The output can be pasted into a shell.
    subprocess.run(["bash", "-c", printed], stdin=subprocess.DEVNULL, env=environment, check=True)
    assert script.read_text().startswith("#!/bin/bash\n#SBATCH ") and script.read_text().endswith(
        "exit $code\n"
    )
    for code, restarts, queued in (
        (143, 0, True),
        (134, 3, True),
        (0, 0, False),
        (2, 0, False),
        (143, 20, False),
    ):
        fake_tool("srun", f'printf "%s|" "$@" > {tmp_path}/ran\nexit {code}')
        result = subprocess.run(
            ["bash", str(script)],
            env=environment | {"SLURM_RESTART_COUNT": str(restarts)},
            check=False,
        )
        assert result.returncode == code
        assert (tmp_path / "queued").exists() == queued
        (tmp_path / "queued").unlink(missing_ok=True)
    assert (
        "|-m|transformer|train|--config=experiments/smoke.py|--workdir=runs/a b|"
        in (tmp_path / "ran").read_text()
    )


def test_slurm_array_shards_a_sweep(fake_tool, tmp_path):
    sweep = ["--", "sweep", "--config=experiments/norm_placement.py", "--workdir=runs/a b"]
    printed = launch("slurm.py", "--array=3", "--gpus-per-node=8", "--dry-run", *sweep)
    assert "#SBATCH --array=0-2\n" in printed and "#SBATCH --ntasks-per-node=1\n" in printed
    path = fake_tool("srun", f'printf "%s|" "$@" >> {tmp_path}/ran; echo >> {tmp_path}/ran')
    fake_tool(
        "sbatch",
        f"cat > {tmp_path}/job; "
        f"for i in 0 1 2; do SLURM_ARRAY_TASK_ID=$i bash {tmp_path}/job; done",
    )
    subprocess.run(
        ["bash", "-c", printed],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PATH": f"{path}:{os.environ['PATH']}"},
        check=True,
    )
    ran = (tmp_path / "ran").read_text().splitlines()
    assert [line.split("|")[-3:-1] for line in ran] == [
        ["--workdir=runs/a b", f"--shard={i}/3"] for i in (1, 2, 3)
    ]
    assert "--array" not in launch("slurm.py", "--dry-run", *sweep)
    # Without --array, each run uses all nodes.
    whole = launch("slurm.py", "--nodes=2", "--gpus-per-node=8", "--dry-run", *sweep)
    assert "#SBATCH --nodes=2\n" in whole and "#SBATCH --ntasks-per-node=8\n" in whole


@pytest.mark.parametrize("time", ["90", "90:30", "24:00:00", "2-12", "2-12:30", "2-12:30:00"])
def test_slurm_accepts_its_time_formats(time):
    assert f"#SBATCH --time={time}\n" in launch("slurm.py", f"--time={time}", "--dry-run", *TRAIN)


def test_slurm_needs_an_environment(fake_tool, tmp_path):
    path = fake_tool("sbatch", f"cat > {tmp_path}/job")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "smoke.py").touch()
    options = ["slurm.py", f"--folder={tmp_path}", *TRAIN]
    error = launch(*options, path=path, code=2)
    assert f"--folder: no {tmp_path}/.venv, whose bin/python the job runs" in error
    assert not (tmp_path / "job").exists()
    (tmp_path / ".venv").mkdir()
    launch(*options, path=path)
    assert (tmp_path / "job").read_text().startswith("#!/bin/bash")
