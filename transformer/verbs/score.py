"""`score`: compute the log-probability of given text, line by line.

Compute the log-probability of each line under a decoder. Each output line has the sum in nats, the
number of tokens and the text, separated by tabs. The last line on standard error has the totals."""

import math
import sys

from transformer.output import count
from transformer.verbs.common import folder, load, read_lines, text_file


def arguments(parser) -> None:
    add = parser.add_argument
    parser.set_defaults(only_prints=True)
    add("--workdir", required=True, type=folder, metavar="DIR", help="the run")
    add("--input", default="-", type=text_file, metavar="FILE", help="default: standard input")
    add("--tokens", action="store_true", help="one line per token: nats and piece")


def run(args, overrides) -> int:
    from transformer.api import score
    from transformer.parallel.processes import is_first

    trained = load(args, overrides)
    lines = read_lines("-") if args.input == "-" else args.input
    results = score(trained, lines)
    if not is_first():
        return 0
    for text, scores in zip(lines, results, strict=True):
        if args.tokens:
            for logp, piece in zip(scores.logp, scores.pieces, strict=True):
                print(f"{logp:.5f}\t{piece}".replace("\n", "\\n"))
        else:
            print(f"{scores.logp.sum():.5f}\t{len(scores.logp)}\t{text}")
    nats, tokens = -sum(x.logp.sum() for x in results), sum(len(x.logp) for x in results)
    size = sum(len(text.encode()) for text in lines)
    if size and tokens:
        means = f"{nats / tokens:.4f} nats per token, {nats / math.log(2) / size:.4f} bits per byte"
        print(f"{count(tokens, 'token')} without line ends: {means}", file=sys.stderr)
    return 0
