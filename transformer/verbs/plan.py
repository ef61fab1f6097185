"""`plan`: memory, time and price on a machine that is not here."""

import sys
from pathlib import Path

from transformer.errors import UserError, nearest
from transformer.files import write_whole

ABOUT = "memory, time and price on a machine that is not here"

ONLY_PRINTS = True

DETAIL = """What an experiment needs of a machine, before it is rented: its programs are compiled for it here, by its own compiler, on shapes
alone. Memory of a device by kind, messages, the least time of a step (each part at the chip's published rate), the run's time and price;
and if it does not fit, what would help.

  python -m transformer plan --config=experiments/scale/decoder_8b.py --topology=v5p:4x4x4 --price=4.2
  python -m transformer plan --config=... --topology=v5e-256 --slices=2 --config.mesh.fsdp=256 --config.mesh.data=2
  python -m transformer plan --config=... --topology=v6e-64 --search
  python -m transformer plan --config=experiments/positions.py --topology=v5e-16 --arms

  TPUs by shape (v5p:4x4x8) or by name (v5p-256): v4, v5e, v5p, v6e, tpu7x; the compiler comes with pip install -e '.[tpu]', no TPU needed.
  GPUs by number (a100:8, h100:64, h200:8, b200:8) and cpu:8: compiled for simulated devices; messages and what must be held are theirs,
  temporaries are not.
"""


def arguments(parser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE.py[:ARG]")
    parser.add_argument(
        "--topology", required=True, metavar="KIND:SHAPE", help="v5p:4x4x8, v5p-256, h100:64, cpu:8"
    )
    parser.add_argument(
        "--slices",
        type=int,
        default=1,
        metavar="N",
        help="so many of them, joined by the data centre's network",
    )
    parser.add_argument("--price", type=float, metavar="MONEY", help="of one chip for one hour")
    parser.add_argument(
        "--only",
        metavar="NAMES",
        help="compile these: train, evaluate, prefill, decode; default: all",
    )
    parser.add_argument(
        "--arms", action="store_true", help="every arm of the file's sweep(), side by side"
    )
    parser.add_argument(
        "--search",
        nargs="?",
        type=int,
        const=8,
        metavar="N",
        help="try N (8) meshes, remat policies and micro-batches; print the best",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")


def run(args, overrides) -> int:
    import json

    from transformer.config_io import load_arms, load_experiment
    from transformer.planning.chips import topology

    machine = topology(args.topology, args.slices)
    configs = (
        load_arms(args.config, overrides)[1]
        if args.arms
        else {"": load_experiment(args.config, overrides)}
    )
    only = _check(args, machine)
    from transformer.planning import page, programs, search
    from transformer.planning.plan import make_plan

    devices = programs.start(machine)
    tell = lambda line: print(line, file=sys.stderr)
    if args.search:
        found = search.search(configs[""], machine, devices, args.search, tell, args.price)
        fits, text, numbers = found[0].fits, search.page(found), [plan.to_json() for plan in found]
    else:
        plans = {}
        for arm, config in configs.items():
            about = (lambda line, arm=arm: tell(f"{arm}: {line}")) if arm else tell
            plans[arm] = make_plan(
                config, machine, devices, only=only, price=args.price, tell=about
            )
        fits = all(plan.fits for plan in plans.values())
        text = page.compare(plans) if args.arms else page.page(plans[""])
        numbers = {arm: plan.to_json() for arm, plan in plans.items()}
        numbers = numbers if args.arms else numbers[""]
    if args.json:
        write_whole(args.json, json.dumps(numbers, indent=2) + "\n")
    print(text, end="")
    return 0 if fits else 1


def _check(args, machine) -> tuple[str, ...]:
    """The programs to compile. Raises UserError for arguments that do not go together."""
    from transformer.planning.programs import PROGRAMS

    chip = machine.chip
    if args.json and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json: no folder {args.json.absolute().parent}")
    if args.search is not None and (args.search < 1 or args.arms or args.only):
        raise UserError(
            f"--search: {args.search}; how many to try, 1 or more, and neither --arms nor --only beside it"
        )
    if args.search and not chip.flops:
        raise UserError(f"--search: how fast a {chip.title} is, is not known; name a TPU or a GPU")
    only = ("train",) if args.arms else tuple(args.only.split(",")) if args.only else PROGRAMS
    for name in only:
        if name not in PROGRAMS:
            raise UserError(f"--only: no program {name!r}; {nearest(name, PROGRAMS)}")
    if args.arms and args.only:
        raise UserError("--arms: every arm's training step is planned; leave out --only")
    if args.price is not None:
        why = None
        if args.price <= 0:
            why = "the price of one chip for one hour"
        elif not chip.flops:
            why = f"the run's time is not known on a {chip.title}"
        if "train" not in only:
            why = "of the run, for which --only must name train"
        if why:
            raise UserError(f"--price: {args.price:g}; {why}")
    return only
