"""python -m transformer VERB: the command line, thin over the package."""

import argparse
import dataclasses
import errno
import os
import sys
import traceback
from pathlib import Path

from transformer.errors import UserError, nearest
from transformer.files import write_whole

ABOUT = """Transformers in JAX: train, evaluate and use any architecture, from one experiment file, on any machine.

  python -m transformer train    --config=experiments/quickstart.py --workdir=runs/quickstart
  python -m transformer evaluate --workdir=runs/quickstart
  echo "Where is the library?" | python -m transformer generate --workdir=runs/quickstart
"""

TRAIN = """Train an experiment; or go on with it: the same command on the same --workdir resumes at the last checkpoint,
bit for bit, after Ctrl-C, a crash or a preemption.

  --config=FILE.py            an experiment file; experiments/ holds the shipped ones
  --config=FILE.py:ARM        an arm of the file's sweep() (norm_placement.py:post); of a file that takes an argument, FILE.py:ARG[:ARM]
                              (findings/xiong_2020.py:paper:post)
  --config.a.b=VALUE          change one field: --config.model.d_model=256 --config.optimizer.learning_rate=3e-4
                              a choice with options: --config.model.position.theta=500000

In the run directory: config.json, manifest.json (versions, hashes, devices), metrics.jsonl, tensorboard/, checkpoints/,
tokenizer.model, loss.png.
"""

PLAN = """What an experiment needs of a machine, before it is rented: its programs are compiled for it here, by its own compiler, on shapes
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

SWEEP = """Train and evaluate every arm of an experiment file's sweep(), once for each seed. What is done is skipped, what was cut off goes on,
what diverges or dies is noted and the rest goes on; the same command again does what is left. Before anything runs it shows what each
arm changes in the model that is built, and refuses arms that differ in anything that is not declared.

  python -m transformer sweep --config=experiments/ablation.py --workdir=runs/ablation
  python -m transformer sweep --config=... --workdir=/shared/ablation --shard=2/4      the second of four machines that share a folder
  python -m transformer sweep --workdir=runs/ablation                                  go on with what is there

Runs that differ in numbers alone (seed, learning rate, weight decay, dropout) are trained as one program.
"""

COMPARE = """Compare the arms of a sweep, or several runs, and write a report: index.html (one file, opens from disk), report.md, summary.csv, runs.csv,
curves.csv, figures/*.png and *.pdf. What it says is what intervals over seeds allow, and no more.

  python -m transformer compare runs/ablation
  python -m transformer compare runs/a runs/b --metric=test/bits_per_byte
"""

INSPECT = """Look inside a trained model while it reads a text: what each token cost, what each layer would have said (the logit lens), where each head
looks, how the stream grows. One page, which opens from disk.

  python -m transformer inspect --workdir=runs/quickstart --text="Where is the library?"
  python -m transformer inspect --workdir=runs/quickstart --text="Where is the library?" --target="¿Dónde está la biblioteca?"

Without --text it asks for one, or reads standard input. A translator reads its own translation, unless --target is given.
"""

CONVERT = """Hugging Face weights (config.json and safetensors) to a run directory, and back. The tokenizer comes along.

  python -m transformer convert --from=DOWNLOADED --workdir=runs/gpt2
  python -m transformer generate --workdir=runs/gpt2
  python -m transformer convert --workdir=runs/gpt2 --to=EXPORTED

  --config.model.scan_layers=False and other --config.model.*, --config.mesh.* change how it is run.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code. Mistakes of the user's print one line and return 2."""
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        _leave_the_others(2)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        reason = "the disk is full" if e.errno == errno.ENOSPC else e.strerror or str(e)
        print(f"error: {e.filename or type(e).__name__}: {reason}", file=sys.stderr)
        _leave_the_others(2)
        return 2
    except RuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e) and "Out of memory" not in str(e):
            _leave_the_others(1, e)
            raise
        print(
            f"error: out of memory ({str(e).splitlines()[0][:120]}); lower data.batch_size or the model, raise train.accumulate, "
            "set model.remat='full', or spread the parameters with mesh.fsdp",
            file=sys.stderr,
        )
        _leave_the_others(2)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        _leave_the_others(130)
        return 130
    except Exception as e:
        _leave_the_others(1, e)
        raise


def _leave_the_others(code: int, error: Exception | None = None) -> None:
    """One of several processes ends at once: it would wait for the others, which may wait for it. They notice, and end too."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        if error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Parser(argparse.ArgumentParser):
    """Its errors are those of the rest: one line."""

    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("empty; name a folder")
    return Path(text)


def _main(argv: list[str]) -> int:
    parser = _Parser(
        prog="python -m transformer", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(metavar="VERB", title="verbs")

    def verb(name, run, about, detail=""):
        sub = verbs.add_parser(
            name, help=about, description=detail or about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        sub.set_defaults(run=run, verb=name)
        return sub

    data = verb("data", _data, "fetch, verify and cache a known corpus; without a name, list them")
    data.add_argument("name", nargs="?", metavar="NAME")

    train = verb("train", _train, "train an experiment, or go on with it", TRAIN)
    train.add_argument("--config", required=True, metavar="FILE.py[:ARG]")
    train.add_argument("--workdir", required=True, type=_folder, metavar="DIR", help="where the run lives")

    evaluate = verb("evaluate", _evaluate, "loss, perplexity, BLEU, chrF, bits per byte of a run on its held-out text")
    evaluate.add_argument("--workdir", required=True, type=_folder, metavar="DIR")
    evaluate.add_argument("--part", default="test", choices=("valid", "test"))

    generate = verb(
        "generate", _generate, "translate or continue text, a line per line",
        "Translate (encoder-decoder) or continue (decoder) text: a line in, a line out.\n\n"
        "  --config.decoding.beam_size=4 and other --config.decoding.* change how, for this call.",
    )  # fmt: skip
    generate.add_argument("--workdir", required=True, type=_folder, metavar="DIR")
    generate.add_argument("--input", default="-", metavar="FILE", help="a text file; - (the default) is standard input")
    generate.add_argument("--output", default="-", metavar="FILE", help="default: standard output")
    generate.add_argument("--interactive", action="store_true", help="type a sentence, read the answer")

    plan = verb("plan", _plan, "memory, time and price on a machine that is not here", PLAN)
    plan.add_argument("--config", required=True, metavar="FILE.py[:ARG]")
    plan.add_argument("--topology", required=True, metavar="KIND:SHAPE", help="v5p:4x4x8, v5p-256, h100:64, cpu:8")
    plan.add_argument(
        "--slices", type=int, default=1, metavar="N", help="so many of them, joined by the data centre's network"
    )
    plan.add_argument("--price", type=float, metavar="MONEY", help="of one chip for one hour")
    plan.add_argument("--only", metavar="NAMES", help="compile these: train, evaluate, prefill, decode; default: all")
    plan.add_argument("--arms", action="store_true", help="every arm of the file's sweep(), side by side")
    plan.add_argument(
        "--search",
        nargs="?",
        type=int,
        const=8,
        metavar="N",
        help="try N (8) meshes, remat policies and micro-batches; print the best",
    )
    plan.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")

    sweep = verb("sweep", _sweep, "train and evaluate every arm and seed of a study", SWEEP)
    sweep.add_argument("--config", metavar="FILE.py", help="an experiment file that defines sweep()")
    sweep.add_argument("--workdir", required=True, type=_folder, metavar="DIR", help="a run directory for every arm and seed goes here")
    sweep.add_argument("--jobs", type=int, default=1, metavar="N", help="so many processes at a time")
    sweep.add_argument("--shard", default="1/1", metavar="I/N", help="of N machines that share DIR, this is number I")
    sweep.add_argument("--together", type=int, default=8, metavar="N", help="train up to N (8) runs as one program; 1: each by itself")
    sweep.add_argument("--dry-run", action="store_true", help="show the arms and what would run; write nothing")
    sweep.add_argument("--runs", metavar="ARM/seed-S,...", help="these runs of DIR, in this process")
    sweep.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)

    compare = verb("compare", _compare, "a report of a sweep, or of several runs", COMPARE)
    compare.add_argument("folders", nargs="+", type=_folder, metavar="DIR", help="a sweep's directory, or run directories")
    compare.add_argument("--metric", default="", metavar="NAME", help="what decides: test/loss, test/bleu, eval/loss, ...")
    compare.add_argument("--baseline", default="", metavar="ARM", help="what the others are compared with")
    compare.add_argument("--output", type=_folder, metavar="DIR", help="default: report/ in the first DIR")

    inspect = verb("inspect", _inspect, "attention maps, logit lens and profiles of a run for a text, as one page", INSPECT)
    inspect.add_argument("--workdir", required=True, type=_folder, metavar="DIR")
    inspect.add_argument("--text", metavar="TEXT", help="what the model is to read; default: asked for, or standard input")
    inspect.add_argument("--target", default="", metavar="TEXT", help="what an encoder-decoder's decoder is to read; default: its own translation")
    inspect.add_argument("--output", type=Path, metavar="FILE", help="default: inspect.html in DIR")

    convert = verb("convert", _convert, "Hugging Face weights to a run directory, and back", CONVERT)
    convert.add_argument("--workdir", required=True, type=_folder, metavar="DIR")
    way = convert.add_mutually_exclusive_group(required=True)
    way.add_argument(
        "--from", dest="source", type=Path, metavar="HF_DIR", help="make DIR of this (config.json, safetensors)"
    )
    way.add_argument("--to", type=Path, metavar="HF_DIR", help="write the run DIR there, as Transformers loads it")
    convert.add_argument(
        "--family", metavar="MODEL_TYPE", help="with --to: gpt2, t5, ...; default: the first that fits"
    )

    if argv and not argv[0].startswith("-") and argv[0] not in verbs.choices:
        raise UserError(f"no verb {argv[0]!r}; {nearest(argv[0], verbs.choices)}")
    args, rest = parser.parse_known_args(argv)
    if "run" not in args:
        parser.print_help()
        return 0
    return args.run(args, _overrides(rest)) or 0


def _overrides(rest: list[str]) -> dict[str, str]:
    """`--config.a.b=v` arguments as {"a.b": "v"}."""
    found, rest = {}, list(rest)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--config."):
            raise UserError(
                f"no argument {arg!r}; fields of the experiment are set with --config.SECTION.FIELD=VALUE, and --help shows the rest"
            )
        key, equals, value = arg.removeprefix("--config.").partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{arg}: no value; write {arg}=VALUE")
            value = rest.pop(0)
        found[key] = value
    return found


def _data(args, overrides) -> int:
    from transformer.data.corpora import CORPORA, fetch

    if args.name is None:
        for name, corpus in CORPORA.items():
            print(f"{name:<16}{corpus.about}\n{'':<16}{corpus.licence}; {corpus.attribution}")
        return 0
    corpus, folder = fetch(args.name)
    print(f"{args.name}: {corpus.about}\nlicence      {corpus.licence}\nattribution  {corpus.attribution}")
    for file in sorted(folder.iterdir()):
        print(f"             {file}  {file.stat().st_size:,} bytes")
    return 0


def _train(args, overrides) -> int:
    from transformer.config_io import load_experiment

    config = load_experiment(args.config, overrides)
    _start_jax()
    from transformer.training.loop import train

    done = train(config, args.workdir)
    if done < config.train.steps:
        print(
            f"stopped at step {done:,} of {config.train.steps:,}; the same command goes on from there", file=sys.stderr
        )
        return 143
    print(f"trained {done:,} steps; next: python -m transformer evaluate --workdir={args.workdir}", file=sys.stderr)
    return 0


def _plan(args, overrides) -> int:
    import json

    from transformer.config_io import load_arms, load_experiment
    from transformer.planning.chips import topology

    machine = topology(args.topology, args.slices)
    configs = load_arms(args.config, overrides)[1] if args.arms else {"": load_experiment(args.config, overrides)}
    from transformer.planning import programs, search
    from transformer.planning.plan import compare, make_plan

    if args.json and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json: no folder {args.json.absolute().parent}")
    if args.search is not None and (args.search < 1 or args.arms or args.only):
        raise UserError(f"--search: {args.search}; how many to try, 1 or more, and neither --arms nor --only beside it")
    if args.search and not machine.chip.flops:
        raise UserError(f"--search: how fast a {machine.chip.title} is, is not known; name a TPU or a GPU")
    only = ("train",) if args.arms else tuple(args.only.split(",")) if args.only else programs.PROGRAMS
    for name in only:
        if name not in programs.PROGRAMS:
            raise UserError(f"--only: no program {name!r}; {nearest(name, programs.PROGRAMS)}")
    if args.arms and args.only:
        raise UserError("--arms: every arm's training step is planned; leave out --only")
    if args.price is not None and (args.price <= 0 or not machine.chip.flops or "train" not in only):
        why = "the price of one chip for one hour" if args.price <= 0 else f"the run's time is not known on a {machine.chip.title}"
        raise UserError(f"--price: {args.price:g}; " + (why if "train" in only else "of the run, for which --only must name train"))
    devices = programs.start(machine)
    tell = lambda line: print(line, file=sys.stderr)
    if args.search:
        found = search.search(configs[""], machine, devices, args.search, tell, args.price)
        fits, page, numbers = found[0].fits, search.page(found), [plan.to_json() for plan in found]
    else:
        plans = {}
        for arm, config in configs.items():
            about = (lambda line, arm=arm: tell(f"{arm}: {line}")) if arm else tell
            plans[arm] = make_plan(config, machine, devices, only=only, price=args.price, tell=about)
        fits = all(plan.fits for plan in plans.values())
        page = compare(plans) if args.arms else plans[""].page()
        numbers = {arm: plan.to_json() for arm, plan in plans.items()} if args.arms else plans[""].to_json()
    if args.json:
        write_whole(args.json, json.dumps(numbers, indent=2) + "\n")
    print(page, end="")
    return 0 if fits else 1


def _sweep(args, overrides) -> int:
    from transformer.lab import prepare, runner
    from transformer.lab.study import load_study

    if args.runs:
        if args.config or overrides:
            raise UserError("--runs: of a sweep that is there; leave out --config")
        _start_jax()
        return runner.work(args.workdir, args.runs.split(","), lambda run: _evaluate_run(run.folder))
    shard = prepare.parse_shard(args.shard)
    if args.jobs < 1 or args.together < 1:
        raise UserError(f"--jobs and --together: {args.jobs} and {args.together}; 1 or more")
    if args.config and (args.prepare or args.dry_run):
        _start_jax()
        study = prepare.study(args.config, args.workdir, overrides, lambda line: print(line, file=sys.stderr))
        print(prepare.describe(study), end="")
        if args.prepare:
            study.write()
            return 0
    elif args.config:
        prepare.elsewhere(args.config, args.workdir, overrides)
    elif overrides:
        raise UserError(f"--config.{next(iter(overrides))}: goes with --config=FILE.py")
    study = study if args.dry_run and args.config else load_study(args.workdir)
    if args.dry_run:
        print(prepare.describe_runs(study, shard, args.together), end="")
        return 0
    code = runner.run_study(study, jobs=args.jobs, shard=shard, most=args.together)
    if code == 143:
        print("stopped; the same command goes on from there", file=sys.stderr)
    elif code == 0:
        print(f"next: python -m transformer compare {args.workdir}", file=sys.stderr)
    return code


def _compare(args, overrides) -> int:
    from transformer.lab import report, results, verdict

    if overrides:
        raise UserError("compare: takes no --config.*; it reads what the runs have logged")
    found = results.read(args.folders, args.metric, args.baseline)
    judged = verdict.judge(found)
    page = report.write(judged, args.output or args.folders[0] / "report")
    print("\n".join(judged.sentences))
    for line in found.left_out:
        print(f"left out: {line}", file=sys.stderr)
    print(f"report: {page}", file=sys.stderr)
    return 0


def _evaluate_run(workdir: Path) -> None:
    """What `evaluate --workdir=DIR` does."""
    from transformer.evaluation.evaluate import evaluate, load_trained
    from transformer.parallel.mesh import use

    config, mesh = _open(argparse.Namespace(workdir=workdir, verb="evaluate"), {})
    with use(mesh):
        evaluate(load_trained(workdir, config, mesh), mesh, "test")


def _open(args, overrides):
    """The config of a run, with overrides, and its mesh: one device, unless --config.mesh.* says more; of several processes, the run's."""
    from transformer.config import Experiment, MeshConfig
    from transformer.config_io import apply_overrides
    from transformer.training.rundir import converted, load_config

    free = {"decoding", "mesh", "platform", "seed"} | ({"data"} if converted(args.workdir) else set())
    for key in overrides:
        if key.split(".")[0] not in free and key != "data.eval_overlap":
            raise UserError(
                f"--config.{key}: a trained run keeps its config; only decoding, mesh, platform, seed and "
                f"data.eval_overlap can be set here"
            )
    config: Experiment = apply_overrides(load_config(args.workdir), overrides)
    _start_jax()
    from transformer.parallel.mesh import start
    from transformer.parallel.processes import start_processes

    together = start_processes()
    if together and (args.verb == "convert" or getattr(args, "input", "") == "-"):
        raise UserError(
            f"{args.verb}: several processes cannot do it; convert in one of them, generate from a file (--input=FILE)"
        )
    chosen = config.mesh if together or any(key.startswith("mesh") for key in overrides) else MeshConfig(data=1)
    platform = config.platform if "platform" in overrides else "auto"
    return dataclasses.replace(config, mesh=chosen), start(platform, chosen)


def _evaluate(args, overrides) -> int:
    from transformer.evaluation.evaluate import evaluate, load_trained
    from transformer.parallel.mesh import use
    from transformer.parallel.processes import is_first

    config, mesh = _open(args, overrides)
    with use(mesh):
        found = evaluate(load_trained(args.workdir, config, mesh), mesh, args.part)
    for name, value in found.items() if is_first() else ():
        print(f"{name:<22} {value if isinstance(value, str) else f'{value:,.4g}'}")
    return 0


def _generate(args, overrides) -> int:
    from transformer.decoding.generate import Generator
    from transformer.evaluation.evaluate import load_trained
    from transformer.parallel.mesh import use
    from transformer.parallel.processes import is_first

    config, mesh = _open(args, overrides)
    if args.interactive and args.input != "-":
        raise UserError("--interactive and --input: one asks at the terminal, the other reads a file; leave one out")
    if args.output != "-" and not Path(args.output).resolve().parent.is_dir():
        raise UserError(f"--output: no folder {Path(args.output).parent}")
    if args.output != "-" and Path(args.output).is_dir():
        raise UserError(f"--output: {args.output} is a folder; name a file")
    lines = None if args.interactive else _read_lines(args.input)
    with use(mesh):
        trained = load_trained(args.workdir, config, mesh)
        if args.interactive:
            return _converse(trained)
        generate = Generator(config, trained.params, trained.tokenizer)
        answers = generate(lines, _progress(len(lines)))
    if not is_first():
        return 0
    if generate.cut:
        print(f"{generate.cut} of {len(lines)} lines were longer than the model can read and were cut", file=sys.stderr)
    text = "".join(answer.replace("\n", "\\n") + "\n" for answer in answers)
    if args.output == "-":
        sys.stdout.write(text)
    else:
        write_whole(Path(args.output), text)
    return 0


def _inspect(args, overrides) -> int:
    from transformer.evaluation.evaluate import load_trained
    from transformer.lab import inside, inspect_page
    from transformer.parallel.mesh import use

    config, mesh = _open(args, overrides)
    output = args.output or args.workdir / "inspect.html"
    if not output.resolve().parent.is_dir() or output.is_dir():
        raise UserError(f"--output: {output} is a folder, or lies in none; name a file")
    if args.target and not config.model.two_sides:
        raise UserError(f"--target: model.family = {config.model.family!r} reads one text; put all of it into --text")
    text = args.text
    if text is None:
        text = input("text: ") if sys.stdin.isatty() else "\n".join(_read_lines("-"))
    with use(mesh):
        trained = load_trained(args.workdir, config, mesh)
        view = inside.look_inside(trained, mesh, text, args.target)
    write_whole(output, inspect_page.page(view, f"Inside {args.workdir}", [f"Step {trained.step:,} of {trained.workdir}."]))
    print(f"page: {output}", file=sys.stderr)
    return 0


def _convert(args, overrides) -> int:
    if args.source is None:
        config, mesh = _open(args, overrides)
        from transformer.training.exchange import to_hf

        to_hf(args.workdir, args.to, config, mesh, args.family)
        print(f"{args.to}: written; transformers.AutoModel.from_pretrained({str(args.to)!r}) loads it", file=sys.stderr)
        return 0
    if args.family:
        raise UserError("--family: goes with --to; --from reads it from config.json")
    for key in overrides:
        if key.split(".")[0] not in ("model", "mesh", "platform"):
            raise UserError(
                f"--config.{key}: a converted model has no training; only model, mesh and platform can be set"
            )
    _start_jax()
    from transformer.data.tokenizer import find_tokenizer
    from transformer.parallel.processes import start_processes
    from transformer.training.exchange import from_hf

    if start_processes():
        raise UserError("convert: several processes cannot do it; convert in one of them")
    config = from_hf(args.source, args.workdir, overrides)
    answers = config.model.family != "encoder" and find_tokenizer(args.workdir) is not None
    use = "generate --workdir={}" if answers else "train --config=... --config.train.init_from={}"
    print(f"{args.workdir}: made; next: python -m transformer {use.format(args.workdir)}", file=sys.stderr)
    return 0


def _read_lines(name: str) -> list[str]:
    if name != "-" and not Path(name).is_file():
        raise UserError(f"--input: no file {name!r}")
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        text = data.decode("utf-8").removesuffix("\n")
        return [line.removesuffix("\r") for line in text.split("\n")] if data else []
    except UnicodeDecodeError as e:
        what = "standard input" if name == "-" else name
        raise UserError(f"--input: {what} is not UTF-8 (line {data[: e.start].count(10) + 1})") from None


def _progress(total: int):
    """Tells how many lines are done, in a terminal that is not also showing the answers."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        return lambda done: None
    end = lambda done: "\n" if done == total else ""
    return lambda done: print(f"\r{done:,}/{total:,} lines", end=end(done), file=sys.stderr, flush=True)


def _converse(trained) -> int:
    """One line at a time, until an empty one or the end of input."""
    import readline  # noqa: F401  (arrow keys and history at the prompt)

    from transformer.decoding.generate import Generator

    one = dataclasses.replace(trained.config.decoding, batch_size=1)
    config = dataclasses.replace(trained.config, decoding=one)
    generate = Generator(config, trained.params, trained.tokenizer)
    does = "translates" if config.model.two_sides else "continues"
    print("Getting ready ...", end="", flush=True)
    generate(["."])  # compiles
    print(f"\rThe model {does} what you type. An empty line or Ctrl-D ends.")
    while True:
        try:
            line = input("\n> ")
        except EOFError:
            print()
            return 0
        if not line.strip():
            return 0
        cut = generate.cut
        answer = generate([line])[0]
        print("  " + answer.strip("\n").replace("\n", "\n  "))
        if generate.cut > cut:
            print("  (cut: longer than the model can read)")


def _start_jax() -> None:
    """Settings that must stand before the first computation: the persistent compilation cache."""
    import jax

    from transformer.data.corpora import data_home

    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(data_home() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
