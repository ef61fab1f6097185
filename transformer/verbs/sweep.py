"""`sweep`: train and evaluate every arm and seed of a study."""

import argparse
import sys

from transformer.errors import UserError
from transformer.verbs.common import folder, start_jax
from transformer.verbs.evaluate import evaluate_run

ABOUT = "train and evaluate every arm and seed of a study"

DETAIL = """Train and evaluate every arm of an experiment file's sweep(), once for each seed. What is done is skipped, what was cut off goes on,
what diverges or dies is noted and the rest goes on; the same command again does what is left. Before anything runs it shows what each
arm changes in the model that is built, and refuses arms that differ in anything that is not declared.

  python -m transformer sweep --config=experiments/ablation.py --workdir=runs/ablation
  python -m transformer sweep --config=... --workdir=/shared/ablation --shard=2/4      the second of four machines that share a folder
  python -m transformer sweep --workdir=runs/ablation                                  go on with what is there

Runs that differ in numbers alone (seed, learning rate, weight decay, dropout) are trained as one program. On a pod, where every host is given
this command, each run is on all of its chips, one after another.
"""


def arguments(parser) -> None:
    parser.add_argument(
        "--config", metavar="FILE.py", help="an experiment file that defines sweep()"
    )
    parser.add_argument(
        "--workdir",
        required=True,
        type=folder,
        metavar="DIR",
        help="a run directory for every arm and seed goes here",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="so many processes at a time"
    )
    parser.add_argument(
        "--shard",
        default="1/1",
        metavar="I/N",
        help="of N machines that share DIR, this is number I",
    )
    parser.add_argument(
        "--together",
        type=int,
        default=8,
        metavar="N",
        help="train up to N (8) runs as one program; 1: each by itself",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the arms and what would run; write nothing"
    )
    parser.add_argument(
        "--runs", metavar="ARM/seed-S,...", help="these runs of DIR, in this process"
    )
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)


def run(args, overrides) -> int:
    from transformer.lab import prepare, runner
    from transformer.lab.study import load_study
    from transformer.parallel.processes import barrier, place

    if args.runs:
        if args.config or overrides:
            raise UserError("--runs: of a sweep that is there; leave out --config")
        start_jax()
        return runner.work(args.workdir, args.runs.split(","), lambda run: evaluate_run(run.folder))
    shard = prepare.parse_shard(args.shard)
    if args.jobs < 1 or args.together < 1:
        raise UserError(f"--jobs and --together: {args.jobs} and {args.together}; 1 or more")
    here = place()
    if here[1] > 1 and args.jobs > 1:
        raise UserError(
            f"--jobs: {args.jobs}; each run is on all {here[1]} processes, one after another; leave it out"
        )
    most = args.together if here[1] == 1 else 1
    if args.config and (args.prepare or args.dry_run):
        start_jax()
        say = print if here[0] == 0 else lambda *_, **__: None
        study = prepare.study(
            args.config, args.workdir, overrides, lambda line: say(line, file=sys.stderr)
        )
        say(prepare.describe(study), end="")
        study.check()
        if args.prepare:
            barrier("the sweep is built")
            if here[0] == 0:
                study.write()
            return 0
    elif args.config:
        prepare.elsewhere(args.config, args.workdir, overrides)
    elif overrides:
        raise UserError(f"--config.{next(iter(overrides))}: goes with --config=FILE.py")
    study = study if args.dry_run and args.config else load_study(args.workdir)
    if args.dry_run:
        if here[0] == 0:
            print(prepare.describe_runs(study, shard, most), end="")
        return 0
    code = runner.run_study(study, jobs=args.jobs, shard=shard, most=most, host=here)
    if code == 143:
        print("stopped; the same command goes on from there", file=sys.stderr)
    elif code == 0 and here[0] == 0:
        print(f"next: python -m transformer compare {args.workdir}", file=sys.stderr)
    return code
