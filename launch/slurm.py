"""Runs a command as a SLURM job, on GPUs or CPUs.

    python launch/slurm.py --nodes=4 --gpus-per-node=8 --time=24:00:00 -- \\
        train --config=experiments/vaswani_big.py --workdir=/shared/runs/vaswani_big
    python launch/slurm.py --array=4 --gpus-per-node=1 -- \\
        sweep --config=experiments/ablation.py --workdir=/shared/runs/ablation

The job has one task per GPU, or without GPUs one per node. Tasks find each other through SLURM's
environment variables. Two minutes before the time limit, every task receives SIGTERM, saves and
exits with code 143, and the job requeues itself, at most `--restarts` times. It also does so when a
process or a node dies. The run resumes from its last checkpoint. A finished run is not requeued,
nor is a run that exits with code 2 (user error).

A sweep on one node is one task, which starts processes for its runs. --array=N splits the sweep
over N such jobs (--shard=1/N to N/N). On several nodes, each run of a sweep uses all of them, one
run after another.

--workdir must be on a file system that all nodes share, and so must this folder and its .venv.
Other options of the cluster (partition, account, constraint) are set with --sbatch, once for each:
--sbatch=--partition=gpu --sbatch=--account=me.
"""

import re
import shlex
import sys
from pathlib import Path

from shell import (
    MISTAKE,
    ROOT,
    Parser,
    check_command,
    check_numbers,
    mistake,
    option,
    parse,
    run,
    start,
)


def script(args) -> str:
    """Returns the script for sbatch."""
    tasks = 1 if args.command[0] == "sweep" and args.nodes == 1 else args.gpus_per_node or 1
    options = [
        f"--job-name={args.name}",
        f"--nodes={args.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--time={args.time}",
        "--signal=TERM@120",
        "--requeue",
        "--open-mode=append",
        f"--output={args.log}",
        *args.sbatch,
    ]
    if args.gpus_per_node:
        options.append(f"--gpus-per-node={args.gpus_per_node}")
    if args.cpus_per_task:
        options.append(f"--cpus-per-task={args.cpus_per_task}")
    if args.array:
        options.append(f"--array=0-{args.array - 1}")
    prefix = [] if args.gpus_per_node else ["env", "JAX_PLATFORMS=cpu"]
    command = shlex.join([*prefix, ".venv/bin/python", "-m", "transformer", *args.command])
    command += f" --shard=$((SLURM_ARRAY_TASK_ID+1))/{args.array}" if args.array else ""
    must_requeue = (
        f"[ $code -ne 0 ] && [ $code -ne {MISTAKE} ] && "
        f"[ ${{SLURM_RESTART_COUNT:-0}} -lt {args.restarts} ]"
    )
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        f"cd {shlex.quote(str(args.folder))}",
    ]
    lines += [f"srun --wait=120 {command}", "code=$?"]
    lines += [f"if {must_requeue}; then scontrol requeue $SLURM_JOB_ID; fi", "exit $code"]
    return "\n".join(lines) + "\n"


def check(args) -> None:
    """Exits with code 2 if SLURM would reject or misread an option, or if .venv is missing.

    Warns if the folder is not on this machine, so that its .venv cannot be seen.
    """
    check_command(args.command, Path(args.folder))
    check_numbers(args, nodes=1, gpus_per_node=0, cpus_per_task=0, array=0, restarts=0)
    if not re.fullmatch(r"(\d+-)?\d+(:[0-5]?\d){,2}", args.time):
        mistake(
            f"--time: {args.time!r} is not a time; write minutes, MM:SS, HH:MM:SS, D-HH, "
            "D-HH:MM or D-HH:MM:SS, such as 24:00:00"
        )
    sweep = args.command[0] == "sweep"
    if args.array and not sweep:
        mistake(f"--array: {args.array} splits a sweep, not {args.command[0]}; leave it out")
    if args.array and option(args.command, "--shard"):
        mistake(f"--shard: is set for every task by --array={args.array}; leave it out")
    folder = Path(args.folder)
    if folder.is_dir() and not (folder / ".venv").is_dir() and not args.dry_run:
        mistake(
            f"--folder: no {folder}/.venv, whose bin/python the job runs; run make install there"
        )
    if not folder.is_dir():
        print(f"launch: {folder} is not on this machine; it must have a .venv", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="0: CPUs only")
    parser.add_argument("--cpus-per-task", type=int, default=0)
    parser.add_argument(
        "--array",
        type=int,
        default=0,
        metavar="N",
        help="split a sweep over N jobs; 0: one job",
    )
    parser.add_argument("--time", default="24:00:00")
    parser.add_argument(
        "--restarts", type=int, default=20, help="requeues after a failure (default: 20)"
    )
    parser.add_argument("--name", default="transformer")
    parser.add_argument("--log", default="slurm-%j.log")
    parser.add_argument("--folder", default=ROOT, help="folder of the code on the cluster")
    parser.add_argument("--sbatch", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the job script without submitting it"
    )
    args = parse(parser, argv)
    check(args)
    return run(["sbatch"], args.dry_run, stdin=script(args))


if __name__ == "__main__":
    start(main)
