"""`plan`: estimate memory, time and price for a machine that you do not have.

Estimate what an experiment needs on a machine, before you rent the machine. The
programs of the experiment are compiled here, with the machine's compiler and from array shapes
alone. The plan shows the memory of a device by kind, the collectives, the minimum time of a step
at the chip's published rates, and the time and price of the run, and suggests changes if needed.

  python -m transformer plan --config=experiments/scale/decoder_8b.py --topology=v5p:4x4x4 \\
      --price=4.2
  python -m transformer plan --config=... --topology=v5e-256 --slices=2 --config.mesh.fsdp=256 \\
      --config.mesh.data=2
  python -m transformer plan --config=... --topology=v6e-64 --search
  python -m transformer plan --config=experiments/findings/press_2022.py:paper \\
      --topology=v5e-16 --arms --kernels

  TPUs by shape (v5p:4x4x8) or by name (v5p-256): v4, v5e, v5p, v6e, tpu7x. The compiler comes with
  pip install -e '.[tpu]'; no TPU is needed.
  GPUs by number (a100:8, h100:64, h200:8, b200:8), and cpu:8. Their programs are compiled for
  simulated devices: the collectives and the memory of parameters, optimizer state and inputs are
  those of the machine; temporaries and memory traffic are those of the CPU compiler."""

import sys
from pathlib import Path

from transformer.errors import UserError, nearest
from transformer.files import write_json


def arguments(parser) -> None:
    add = parser.add_argument
    parser.set_defaults(only_prints=True)
    add("--config", required=True, metavar="FILE.py[:ARG]", help="the experiment")
    machines = "v5p:4x4x8, v5p-256, h100:64, cpu:8"
    add("--topology", required=True, metavar="KIND:SHAPE", help=machines)
    slices = "number of slices, joined by the data center's network"
    add("--slices", type=int, default=1, metavar="N", help=slices)
    add("--price", type=float, metavar="MONEY", help="price of one chip per hour")
    programs = "programs to compile: train, evaluate, prefill, decode; default: all"
    add("--only", metavar="NAMES", help=programs)
    add("--arms", action="store_true", help="plan and compare the arms of the file's sweep()")
    cycles = "count the cycles of the attention kernels, in the schedules of the TPU's compiler"
    add("--kernels", action="store_true", help=cycles)
    layouts = "try N combinations of mesh, remat policy and micro-batches (default: 8); best first"
    add("--search", nargs="?", type=int, const=8, metavar="N", help=layouts)
    add("--json", type=Path, metavar="FILE", help="write all numbers to this file")


def run(args, overrides) -> int:
    from transformer.config_io import load_arms, load_experiment
    from transformer.planning.chips import topology

    machine = topology(args.topology, args.slices)
    source = args.config, overrides
    sweep, configs = load_arms(*source) if args.arms else (None, {"": load_experiment(*source)})
    only = _check(args, machine)
    from transformer.planning import cycles, page, programs, search
    from transformer.planning.plan import make_plan

    kernels = cycles.measure(*source, args.topology, args.slices, args.arms) if args.kernels else {}
    devices = programs.start(machine)
    log = lambda line: print(line, file=sys.stderr)
    if args.search:
        ranked = search.search(configs[""], machine, devices, args.search, log, args.price)
        fits, text = ranked[0].fits, search.page(ranked)
        numbers = [plan.to_json() for plan in ranked]
    else:
        plans = {}
        for arm, config in configs.items():
            log_arm = (lambda line, arm=arm: log(f"{arm}: {line}")) if arm else log
            options = {"only": only, "price": args.price, "kernels": kernels.get(arm, ())}
            plans[arm] = make_plan(config, machine, devices, report=log_arm, **options)
        fits = all(plan.fits for plan in plans.values())
        text = page.compare(plans, sweep) if args.arms else page.page(plans[""])
        if args.kernels and not args.arms:
            text += "\n".join(["", *page.kernels(plans[""]), ""])
        numbers = {x: y.to_json() for x, y in plans.items()} if args.arms else plans[""].to_json()
    if args.json:
        write_json(args.json, numbers)
    print(text, end="")
    return 0 if fits else 1


def _check(args, machine) -> tuple[str, ...]:
    """Returns the programs to compile. Raises UserError for arguments that cannot be combined."""
    from transformer.planning.programs import PROGRAMS

    chip = machine.chip
    if args.json and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json: no folder {args.json.absolute().parent}")
    if args.search is not None and (args.search < 1 or args.arms or args.only):
        raise UserError(f"--search: {args.search}; set 1 or more, without --arms and --only")
    if args.kernels and (args.search or not machine.chip.mxu):
        refused = "a search" if args.search else f"a {chip.title}"
        raise UserError(f"--kernels: not available for {refused}; leave it out")
    if args.search and not chip.flops:
        raise UserError(f"--search: the speed of a {chip.title} is unknown; name a TPU or a GPU")
    only = ("train",) if args.arms else tuple(args.only.split(",")) if args.only else PROGRAMS
    if unknown := [name for name in only if name not in PROGRAMS]:
        raise UserError(f"--only: no program {unknown[0]!r}; {nearest(unknown[0], PROGRAMS)}")
    if args.arms and args.only:
        raise UserError("--arms: plans the training step of every arm; leave out --only")
    if args.price is not None and "train" not in only:
        raise UserError(f"--price: {args.price:g} is for the training run; add train to --only")
    if args.price is not None and args.price <= 0:
        raise UserError(f"--price: {args.price:g} is not a price; set that of one chip per hour")
    if args.price is not None and not chip.flops:
        problem = f"has no effect on a {chip.title}, whose speed is unknown"
        raise UserError(f"--price: {args.price:g} {problem}; leave it out")
    return only
