"""`train`: train an experiment, or resume its run.

Train an experiment, or resume its run. After Ctrl-C, a crash or a preemption, the same
command with the same --workdir resumes at the last checkpoint, bit for bit.

  --config=FILE.py            an experiment file, such as those in experiments/
  --config=FILE.py:ARM        an arm of the file's sweep() (norm_placement.py:post)
  --config=FILE.py:ARG[:ARM]  a file that takes an argument (findings/xiong_2020.py:paper:post)
  --config.a.b=VALUE          sets one field: --config.model.d_model=256
                              --config.optimizer.learning_rate=3e-4
                              or an option: --config.model.position.theta=500000

The run directory contains config.json, manifest.json (versions, hashes, devices), metrics.jsonl,
tensorboard/, checkpoints/, tokenizer.model and loss.png."""

import sys

from transformer import buckets
from transformer.output import count
from transformer.verbs.common import folder


def arguments(parser) -> None:
    add, detail = parser.add_argument, "show the largest parameters and other details"
    add("--config", required=True, metavar="FILE.py[:ARG]", help="the experiment")
    add("--workdir", required=True, type=folder, metavar="DIR", help="the run directory")
    add("--verbose", action="store_true", help=detail)


def run(args, overrides) -> int:
    from transformer.config_io import load_experiment

    config = load_experiment(args.config, overrides)  # errors first: the next imports take seconds
    from transformer.api import cache_compiled_programs
    from transformer.runs.loop import train

    cache_compiled_programs()
    done = train(config, args.workdir, args.verbose)
    if done < config.train.steps:
        stopped = f"stopped at step {done:,} of {config.train.steps:,}"
        print(f"{stopped}; the same command resumes the run", file=sys.stderr)
        return 143
    workdir = buckets.shown(args.workdir)
    command = f"python -m transformer evaluate --workdir={workdir}"
    print(f"trained {count(done, 'step')}; next: {command}", file=sys.stderr)
    if config.train.tensorboard:
        print(f"curves: tensorboard --logdir={workdir}/tensorboard", file=sys.stderr)
    return 0
