"""`compare`: a report of a sweep, or of several runs."""

import sys

from transformer.errors import UserError
from transformer.verbs.common import folder

ABOUT = "a report of a sweep, or of several runs"

DETAIL = """Compare the arms of a sweep, or several runs, and write a report: index.html (one file, opens from disk), report.md, summary.csv, runs.csv,
curves.csv, profiles.csv, figures/*.png and *.pdf. What it says is what intervals over seeds allow, and no more.

  python -m transformer compare runs/ablation
  python -m transformer compare runs/a runs/b --metric=test/bits_per_byte
"""


def arguments(parser) -> None:
    parser.add_argument(
        "folders",
        nargs="+",
        type=folder,
        metavar="DIR",
        help="a sweep's directory, or run directories",
    )
    parser.add_argument(
        "--metric",
        default="",
        metavar="NAME",
        help="what decides: test/loss, test/bleu, eval/loss, ...",
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--higher-is-better",
        action="store_true",
        default=None,
        help="of a metric whose name does not say",
    )
    way.add_argument(
        "--lower-is-better", dest="higher_is_better", action="store_false", default=None
    )
    parser.add_argument(
        "--baseline", default="", metavar="ARM", help="what the others are compared with"
    )
    parser.add_argument(
        "--output", type=folder, metavar="DIR", help="default: report/ in the first DIR"
    )


def run(args, overrides) -> int:
    from transformer.lab import report, results, verdict

    if overrides:
        raise UserError("compare: takes no --config.*; it reads what the runs have logged")
    found = results.read(args.folders, args.metric, args.baseline, args.higher_is_better)
    judged = verdict.judge(found)
    page = report.write(judged, args.output or args.folders[0] / "report")
    for line in found.left_out:
        print(f"left out: {line}", file=sys.stderr)
    print("\n".join(judged.sentences))
    print(f"report: {page}", file=sys.stderr)
    return 0
