"""`convert`: Hugging Face weights to a run directory, and back."""

import sys
from pathlib import Path

from transformer.errors import UserError
from transformer.verbs.common import folder, open_run, start_jax

ABOUT = "Hugging Face weights to a run directory, and back"

DETAIL = """Hugging Face weights (config.json and safetensors) to a run directory, and back. The tokenizer comes along.

  python -m transformer convert --from=DOWNLOADED --workdir=runs/gpt2
  python -m transformer generate --workdir=runs/gpt2
  python -m transformer convert --workdir=runs/gpt2 --to=EXPORTED

  --config.model.scan_layers=False and other --config.model.*, --config.mesh.* change how it is run.
"""


def arguments(parser) -> None:
    parser.add_argument("--workdir", required=True, type=folder, metavar="DIR")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="HF_DIR",
        help="make DIR of this (config.json, safetensors)",
    )
    way.add_argument(
        "--to",
        type=Path,
        metavar="HF_DIR",
        help="write the run DIR there, as Transformers loads it",
    )
    parser.add_argument(
        "--family",
        metavar="MODEL_TYPE",
        help="with --to: gpt2, t5, ...; default: the first that fits",
    )


def run(args, overrides) -> int:
    if args.source is None:
        config, mesh = open_run(args, overrides)
        from transformer.runs.exchange import to_hf

        to_hf(args.workdir, args.to, config, mesh, args.family)
        print(
            f"{args.to}: written; transformers.AutoModel.from_pretrained({str(args.to)!r}) loads it",
            file=sys.stderr,
        )
        return 0
    if args.family:
        raise UserError("--family: goes with --to; --from reads it from config.json")
    for key in overrides:
        if key.split(".")[0] not in ("model", "mesh", "platform"):
            raise UserError(
                f"--config.{key}: a converted model has no training; only model, mesh and platform can be set"
            )
    start_jax()
    from transformer.data.tokenizer import find_tokenizer
    from transformer.parallel.processes import start_processes
    from transformer.runs.exchange import from_hf

    if start_processes():
        raise UserError("convert: several processes cannot do it; start one")
    config = from_hf(args.source, args.workdir, overrides)
    answers = config.model.family != "encoder" and find_tokenizer(args.workdir) is not None
    use = "generate --workdir={}" if answers else "train --config=... --config.train.init_from={}"
    print(
        f"{args.workdir}: made; next: python -m transformer {use.format(args.workdir)}",
        file=sys.stderr,
    )
    return 0
