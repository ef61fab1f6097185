"""`inspect`: write a page with attention maps, logit lens and profiles of a run for a text.

Inspect a trained model on a text, as an HTML page: the loss of each token, the prediction of each
layer (the logit lens), where each head attends, and how the residual stream grows.

  python -m transformer inspect --workdir=runs/quickstart --text="Where is the library?"
  python -m transformer inspect --workdir=runs/quickstart --text="Where is the library?" \\
      --target="¿Dónde está la biblioteca?"
  python -m transformer inspect --workdir=runs/lm --text="Rome is in Italy" --ablate \\
      --patch="Bonn is in Italy"

Without --text, the command prompts for a text or reads standard input. The decoder of an
encoder-decoder reads the model's own translation unless --target is set."""

import sys
import textwrap
from pathlib import Path

from transformer import buckets
from transformer.errors import UserError
from transformer.files import write_atomic
from transformer.verbs.common import ask, check_text, folder, load, read_lines


def arguments(parser) -> None:
    add = parser.add_argument
    add("--workdir", required=True, type=folder, metavar="DIR", help="the run")
    text = "the input of the model; default: read from a prompt or standard input"
    add("--text", metavar="TEXT", help=text)
    target = "the input of an encoder-decoder's decoder; default: the model's translation"
    add("--target", default="", metavar="TEXT", help=target)
    add("--ablate", action="store_true", help="measure the loss without each attention head")
    patch = "a text of as many tokens, whose residual stream replaces the text's, part by part"
    add("--patch", default="", metavar="TEXT", help=patch)
    add("--output", type=Path, metavar="FILE", help="default: inspect.html in DIR")


def run(args, overrides) -> int:
    from transformer.lab import inspection
    from transformer.parallel.mesh import use

    output = args.output or args.workdir / "inspect.html"
    if not output.resolve().parent.is_dir() or output.is_dir():
        raise UserError(f"--output: {output} is a folder, or its folder is missing; name a file")
    trained = load(args, overrides)
    family, has_source = trained.config.model.family, trained.config.model.is_encoder_decoder
    if args.target and not has_source:
        raise UserError(f"--target: a {family} takes one text; put it into --text")
    for name in ("text", "target", "patch"):
        check_text(getattr(args, name) or "", f"--{name}")
    if (text := args.text) is None:
        try:
            text = ask("text: ") if sys.stdin.isatty() else "\n".join(read_lines("-"))
        except EOFError:  # Ctrl-D
            text = ""
    with use(trained.mesh):
        view = inspection.observe_text(trained, text, args.target, args.ablate, args.patch)
    about, start = [f"Step {trained.step:,} of {trained.workdir}."], textwrap.shorten(text, 60)
    title = f"Token losses, predictions and attention of {buckets.shown(args.workdir)} on: {start}"
    write_atomic(output, inspection.page(view, title, about))
    print(f"page: {output}", file=sys.stderr)
    return 0
