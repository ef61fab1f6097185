"""`compare`: write a report on a sweep, or on several runs.

Compare the arms of a sweep, or several runs, and write a report: index.html (one
self-contained file), report.md, tables as *.csv, figures/*.png and *.pdf. The report claims only
what the confidence intervals over seeds support.

  python -m transformer compare runs/ablation
  python -m transformer compare runs/a runs/b --metric=test/bits_per_byte"""

import sys

from transformer import buckets
from transformer.errors import UserError
from transformer.verbs.common import folder


def arguments(parser) -> None:
    add, runs = parser.add_argument, "the directory of a sweep, or run directories"
    add("folders", nargs="+", type=folder, metavar="DIR", help=runs)
    metric = "the metric to compare: test/loss, test/bleu, eval/loss, ..."
    add("--metric", default="", metavar="NAME", help=metric)
    direction = parser.add_mutually_exclusive_group().add_argument
    shared = {"dest": "higher_is_better", "default": None}
    hint = "for a metric whose name does not imply a direction"
    direction("--higher-is-better", action="store_true", help=hint, **shared)
    direction("--lower-is-better", action="store_false", **shared)
    add("--baseline", default="", metavar="ARM", help="the arm with which the others are compared")
    add("--output", type=folder, metavar="DIR", help="default: report/ in the first DIR")


def run(args, overrides) -> int:
    from transformer.lab import report

    if overrides:
        raise UserError("compare: takes no --config.*, it reads the logs of runs; leave it out")
    verdict, more = report.judge(args.folders, args.metric, args.baseline, args.higher_is_better)
    page = report.write(verdict, args.output or args.folders[0] / "report", more)
    for line in verdict.results.left_out:
        print(f"left out: {line}", file=sys.stderr)
    print(*verdict.sentences, sep="\n")
    print(f"report: {buckets.shown(page)}", file=sys.stderr)
    return 0
