"""`convert`: convert Hugging Face weights to a run directory, and back.

Convert Hugging Face weights (config.json, safetensors, tokenizer) to a run directory, and back.

  python -m transformer convert --from=DOWNLOADED --workdir=runs/gpt2
  python -m transformer generate --workdir=runs/gpt2
  python -m transformer convert --workdir=runs/gpt2 --to=EXPORTED

  --config.model.scan_layers=False, other --config.model.* and --config.mesh.* set how it runs."""

import sys

from transformer import buckets
from transformer.errors import UserError
from transformer.files import read_json
from transformer.verbs.common import folder, load


def arguments(parser) -> None:
    add = parser.add_argument
    add("--workdir", required=True, type=folder, metavar="DIR", help="the run directory")
    direction = parser.add_mutually_exclusive_group(required=True).add_argument
    source = "create the run directory DIR from this folder (config.json, safetensors)"
    direction("--from", dest="source", type=folder, metavar="HF_DIR", help=source)
    target = "export the run in DIR to this folder, in the format of Transformers"
    direction("--to", type=folder, metavar="HF_DIR", help=target)
    family = "with --to: gpt2, t5, ...; default: the first that fits"
    add("--family", metavar="MODEL_TYPE", help=family)


def run(args, overrides) -> int:
    if args.source is None:
        from transformer.runs.exchange import to_hf

        to_hf(load(args, overrides), args.to, args.family)
        (name,) = read_json(args.to / "config.json")["architectures"]
        code = f"transformers.{name}.from_pretrained({str(args.to)!r})"
        print(f"{args.to}: written; load it with {code}", file=sys.stderr)
        return 0
    if args.family:
        raise UserError("--family: applies to --to only; leave it out (--from reads config.json)")
    if keys := [x for x in overrides if x.split(".")[0] not in ("model", "mesh", "platform")]:
        way_out = "set only model, mesh and platform"
        raise UserError(f"--config.{keys[0]}: a converted model has no training; {way_out}")
    from transformer.api import cache_compiled_programs
    from transformer.data.tokenizer import find_tokenizer
    from transformer.parallel.processes import start_processes
    from transformer.runs.exchange import from_hf

    cache_compiled_programs()
    if start_processes():
        raise UserError("convert: cannot run on several processes; start one process")
    config = from_hf(args.source, args.workdir, overrides)
    generates = config.model.family != "encoder" and find_tokenizer(args.workdir) is not None
    further = "generate --workdir=" if generates else "train --config=... --config.train.init_from="
    workdir = buckets.shown(args.workdir)
    print(f"{workdir}: created; next: python -m transformer {further}{workdir}", file=sys.stderr)
    return 0
