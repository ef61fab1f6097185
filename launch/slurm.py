"""A run as a SLURM job, on GPUs or CPUs.

    python launch/slurm.py --nodes=4 --gpus-per-node=8 --time=24:00:00 -- \\
        train --config=experiments/scale/decoder_1b.py --workdir=/shared/runs/1b --config.mesh.fsdp=-1 --config.mesh.data=1

One task a GPU (or, without GPUs, one a node); they find each other by what SLURM tells them. Two minutes before the time is up every
task gets SIGTERM, saves and ends with exit code 143, and the job puts itself into the queue again, `--restarts` times at most; so it
does when a process or a node dies. The run goes on from its last checkpoint. A run that is done, or was a mistake (exit code 2), is not
queued again.

--workdir must lie on a file system that all nodes share, and so must this folder and its .venv. Whatever else a cluster asks for
(partition, account, constraint) goes into --sbatch, once for each: --sbatch=--partition=gpu --sbatch=--account=me.
"""

import argparse
import shlex
import sys
from pathlib import Path

from shell import MISTAKE, need_command, parse, run

ROOT = Path(__file__).resolve().parent.parent


def script(args) -> str:
    """What sbatch is given."""
    tasks = args.gpus_per_node or 1
    options = [f"--job-name={args.name}", f"--nodes={args.nodes}", f"--ntasks-per-node={tasks}", f"--time={args.time}",
               "--signal=TERM@120", "--requeue", "--open-mode=append", f"--output={args.log}", *args.sbatch]  # fmt: skip
    if args.gpus_per_node:
        options.append(f"--gpus-per-node={args.gpus_per_node}")
    if args.cpus_per_task:
        options.append(f"--cpus-per-task={args.cpus_per_task}")
    platform = [] if args.gpus_per_node else ["env", "JAX_PLATFORMS=cpu"]
    command = shlex.join([*platform, ".venv/bin/python", "-m", "transformer", *args.command])
    again = f"[ $code -ne 0 ] && [ $code -ne {MISTAKE} ] && [ ${{SLURM_RESTART_COUNT:-0}} -lt {args.restarts} ]"
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), f"cd {shlex.quote(str(args.folder))}"]
    lines += [f"srun --wait=120 {command}", "code=$?"]
    lines += [f"if {again}; then scontrol requeue $SLURM_JOB_ID; fi", "exit $code"]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] -- VERB ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="0: CPUs")
    parser.add_argument("--cpus-per-task", type=int, default=0)
    parser.add_argument("--time", default="24:00:00")
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--name", default="transformer")
    parser.add_argument("--log", default="slurm-%j.log")
    parser.add_argument("--folder", default=ROOT, help="where the code is, on the cluster")
    parser.add_argument("--sbatch", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    args = parse(parser, argv)
    need_command(parser, args)
    return run(["sbatch"], args.dry_run, stdin=script(args))


if __name__ == "__main__":
    sys.exit(main())
