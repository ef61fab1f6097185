"""`evaluate`: evaluate a run on its held-out text: loss, perplexity, BLEU, chrF, bits per byte."""

import sys

from transformer.output import BOLD, event, styled
from transformer.verbs.common import folder

HEADLINES = ("bleu", "exact", "bits_per_byte", "labels_accuracy", "loss")
"""The metric that is printed first, in bold: the first of these that the run has."""


def arguments(parser) -> None:
    add, parts = parser.add_argument, ("valid", "test")
    add("--workdir", required=True, type=folder, metavar="DIR", help="the run")
    add("--part", default="test", choices=parts, help="the text (default: test)")


def run(args, overrides) -> int:
    from transformer.api import evaluate, load_run
    from transformer.parallel.processes import is_first

    metrics = evaluate(load_run(args.workdir, overrides), args.part)
    # Without the values of each layer and head
    summary = {name: value for name, value in metrics.items() if name.count("/") < 3}
    headline = next((name for name in HEADLINES if name in summary), "loss")
    for name in sorted(summary, key=lambda name: name != headline) if is_first() else ():
        value = summary[name]
        line = f"{name:<22} {value if isinstance(value, str) else f'{value:,.4g}'}"
        line = event(value, name) if " " in name else line  # texts that were left out
        print(styled(line, BOLD, sys.stdout) if name == headline else line)
    if len(summary) < len(metrics) and is_first():
        omitted = len(metrics) - len(summary)
        print(f"and {omitted:,} values by layer: {args.workdir / args.part}.json")
    return 0
