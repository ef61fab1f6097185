"""`evaluate`: loss, perplexity, BLEU, chrF, bits per byte of a run on its held-out text."""

import argparse
from pathlib import Path

from transformer.verbs.common import folder, open_run

ABOUT = "loss, perplexity, BLEU, chrF, bits per byte of a run on its held-out text"

DETAIL = ""


def arguments(parser) -> None:
    parser.add_argument("--workdir", required=True, type=folder, metavar="DIR")
    parser.add_argument("--part", default="test", choices=("valid", "test"))


def run(args, overrides) -> int:
    from transformer.parallel.mesh import use
    from transformer.parallel.processes import is_first
    from transformer.runs.evaluate import evaluate, load_trained

    config, mesh = open_run(args, overrides)
    with use(mesh):
        found = evaluate(load_trained(args.workdir, config, mesh), mesh, args.part)
    short = {
        name: value for name, value in found.items() if name.count("/") < 3
    }  # not of each layer and head
    for name, value in short.items() if is_first() else ():
        print(f"{name:<22} {value if isinstance(value, str) else f'{value:,.4g}'}")
    if len(short) < len(found) and is_first():
        print(f"and {len(found) - len(short):,} numbers by layer: {args.workdir / args.part}.json")
    return 0


def evaluate_run(workdir: Path) -> None:
    """What `evaluate --workdir=DIR` does."""
    from transformer.parallel.mesh import use
    from transformer.runs.evaluate import evaluate, load_trained

    config, mesh = open_run(argparse.Namespace(workdir=workdir, verb="evaluate"), {})
    with use(mesh):
        evaluate(load_trained(workdir, config, mesh), mesh, "test")
