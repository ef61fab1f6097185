"""`evaluate`: evaluate a run on its held-out text: loss, perplexity, BLEU, chrF, bits per byte.

Evaluate a run on its held-out text. Or evaluate it on tasks of EleutherAI's lm-evaluation-harness
(extra [eval]), whose results are written to tasks.json in the run directory."""

import sys
from pathlib import Path

from transformer import buckets
from transformer.errors import UserError, from_extra
from transformer.output import BOLD, event, styled
from transformer.verbs.common import folder

HEADLINES = ("bleu", "exact", "bits_per_byte", "labels_accuracy", "loss")
"""The metric that is printed first, in bold: the first of these that the run has."""


def arguments(parser) -> None:
    add, parts = parser.add_argument, ("valid", "test")
    add("--workdir", required=True, type=folder, metavar="DIR", help="the run")
    add("--part", default="test", choices=parts, help="the text (default: test)")
    add("--tasks", metavar="A,B", help="tasks of lm-evaluation-harness, instead of the text")
    add("--include-path", type=Path, metavar="DIR", help="a folder with tasks of your own")
    add("--num-fewshot", type=int, metavar="N", help="examples in each prompt")
    add("--limit", type=int, metavar="N", help="documents of each task; default: all")


def run(args, overrides) -> int:
    from transformer.api import evaluate, load_run
    from transformer.parallel.processes import is_first

    for option in ("include_path", "num_fewshot", "limit"):
        if getattr(args, option) is not None and not args.tasks:
            raise UserError(f"--{option.replace('_', '-')}: no effect without --tasks; name tasks")
    trained = load_run(args.workdir, overrides)
    if args.tasks:
        with from_extra("eval", "--tasks: needs"):
            from transformer.harness import evaluate_tasks
        names = [name.strip() for name in args.tasks.split(",") if name.strip()]
        options = {"num_fewshot": args.num_fewshot, "limit": args.limit}
        table = evaluate_tasks(trained, names, args.include_path, **options)
        if is_first():
            print(table)
        return 0
    metrics = evaluate(trained, args.part)
    # Without the values of each layer and head
    summary = {name: value for name, value in metrics.items() if name.count("/") < 3}
    headline = next((name for name in HEADLINES if name in summary), "loss")
    for name in sorted(summary, key=lambda name: name != headline) if is_first() else ():
        value = summary[name]
        line = f"{name:<22} {value if isinstance(value, str) else f'{value:,.4g}'}"
        line = event(value, name) if " " in name else line  # texts that were left out
        print(styled(line, BOLD, sys.stdout) if name == headline else line)
    if (omitted := len(metrics) - len(summary)) and is_first():
        print(f"and {omitted:,} values by layer: {buckets.shown(args.workdir / args.part)}.json")
    return 0
