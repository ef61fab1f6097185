"""`sweep`: train and evaluate every arm and seed of a study.

Train and evaluate every arm of an experiment file's sweep(), once for each seed.

Finished runs are skipped, and interrupted runs resume. A run that diverges or fails is recorded,
and the others continue. The same command continues an interrupted sweep. Before any run, the
command shows what each arm changes in the model, and rejects arms with undeclared differences.

If the sweep tunes hyperparameters, it first trains every arm with several values of each. Then it
trains each arm with its best values, and with those of the file. --untuned uses only the file's.

  python -m transformer sweep --config=experiments/ablation.py --workdir=runs/ablation
  python -m transformer sweep --config=... --workdir=/shared/ablation --shard=2/4
      on the second of four machines that share this folder
  python -m transformer sweep --workdir=runs/ablation
      resumes the sweep in that folder

Runs that differ only in seed, learning rate, weight decay, warm-up, b2 or dropout are trained as
one program. On a pod, start this command on every host. Each run then uses all chips."""

import argparse
import sys

from transformer import buckets
from transformer.errors import UserError
from transformer.verbs.common import folder


def arguments(parser) -> None:
    add = parser.add_argument
    add("--config", metavar="FILE.py", help="an experiment file that defines sweep()")
    runs = "the folder of the run directories, one per arm and seed"
    add("--workdir", required=True, type=folder, metavar="DIR", help=runs)
    add("--jobs", type=int, default=1, metavar="N", help="number of processes at a time")
    shard = "this machine is number I of N that share DIR"
    add("--shard", default="1/1", metavar="I/N", help=shard)
    together = "train up to N runs as one program (default: 8); 1: each run alone"
    add("--together", type=int, default=8, metavar="N", help=together)
    left = "show the arms and the runs that are left; write nothing"
    add("--dry-run", action="store_true", help=left)
    untuned = "tune nothing: compare the arms only at the settings of the file"
    add("--untuned", action="store_true", help=untuned)
    only = "train and evaluate only these runs of DIR, in this process"
    add("--runs", metavar="ARM/seed-S,...", help=only)
    add("--prepare", action="store_true", help=argparse.SUPPRESS)


def run(args, overrides) -> int:
    from transformer.api import cache_compiled_programs, evaluate
    from transformer.lab import prepare, runner, tuning
    from transformer.lab.study import load_study
    from transformer.parallel.processes import barrier, process_index_and_count

    if args.runs:
        if args.config or overrides or args.dry_run or args.untuned:
            raise UserError("--runs: trains runs of an existing sweep; leave out the other options")
        cache_compiled_programs()
        names = args.runs.split(",")
        return runner.train_and_evaluate(args.workdir, names, lambda run: evaluate(run.folder))
    shard = prepare.parse_shard(args.shard)
    if args.jobs < 1 or args.together < 1:
        raise UserError(f"--jobs and --together: {args.jobs} and {args.together}; set 1 or more")
    this_process = process_index_and_count()
    if this_process[1] > 1 and args.jobs > 1:
        processes = f"all {this_process[1]} processes"
        raise UserError(f"--jobs: {args.jobs}, but each run uses {processes}; leave it out")
    together, is_first = args.together if this_process[1] == 1 else 1, this_process[0] == 0
    say = print if is_first else lambda *_, **__: None
    log = lambda line: say(line, file=sys.stderr)
    if args.config and (args.prepare or args.dry_run):
        cache_compiled_programs()
        study = prepare.study(args.config, args.workdir, overrides, log)
        say(prepare.describe(study), end="")
        study.check()
        if args.prepare:
            barrier("the sweep is built")
            if is_first:
                study.write()
                buckets.sync(args.workdir)
            barrier("the sweep is written")
            buckets.sync(args.workdir)  # on the other machines
            return 0
    elif args.config:
        prepare.prepare_in_subprocess(args.config, args.workdir, overrides)
    elif overrides:
        raise UserError(f"--config.{next(iter(overrides))}: needs --config=FILE.py; add it")
    study = study if args.dry_run and args.config else load_study(args.workdir)
    stages = [study] if args.untuned else tuning.stages(study)
    if args.dry_run:
        say(prepare.describe_runs(next(iter(stages)), shard, together), end="")
        return 0
    options = {"jobs": args.jobs, "shard": shard, "max_group": together, "host": this_process}
    code = _run_stages(study, stages, options, log)
    if code == 143:
        log("stopped; the same command resumes")
    elif code == 0:
        log(f"next: python -m transformer compare {buckets.shown(args.workdir)}")
    return code


def _run_stages(study, stages, options, log) -> int:
    from transformer.lab import runner, tuning

    for stage in stages:
        if stage is not study:
            log(f"{stage.folder.name}:")
            tuning.publish(stage, options["host"][0] == 0)
        elif study.sweep.tune:
            log("untuned:")
        if code := runner.run_study(stage, **options):
            return code
        if stage is not study:
            tuning.wait_for(stage, log)
    return 0
