"""`data`: list and fetch known corpora; prepare text of any size for training.

Without a name, lists the known corpora; with a name, fetches, verifies and caches one.

Prepares the text of an experiment as sharded training sequences:

  python -m transformer data prepare --config=FILE.py --output=FOLDER

It reads the files of config.data, drops exact repetitions and what the filters refuse, holds out
text, trains the tokenizer on a sample (config.data.tokenizer), tokenizes, packs, and writes
ArrayRecord shards with an index, checksums and a data card. Apache Beam (extra [prepare]) runs it
on all cores of this machine, or elsewhere:

  --beam="--runner=DataflowRunner --project=... --region=... --temp_location=gs://..."

Run it again to continue it. The experiment then reads the folder:

  python -m transformer train --config=FILE.py --config.data.format=prepared \\
      --config.data.train=FOLDER --workdir=...

Compares the shards of a folder with their checksums:

  python -m transformer data verify --output=FOLDER"""

import argparse
import dataclasses
import shlex
from pathlib import Path

from transformer.errors import UserError


def arguments(parser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="a corpus, such as wikitext2; or prepare, verify")
    add("--config", metavar="FILE.py[:ARG]", help="prepare: the experiment")
    add("--output", metavar="FOLDER", help="prepare (local or gs://), verify: the prepared text")
    add("--license", default="", metavar="TEXT", help="prepare: license of the text, for the card")
    add("--min_chars", type=int, default=1, metavar="N", help="prepare: drop shorter texts")
    longer = "prepare: drop longer texts (default: 0, no limit)"
    add("--max_chars", type=int, default=0, metavar="N", help=longer)
    keep = "prepare: keep the examples, tuples of texts, for which this function is true"
    add("--filter", default="", metavar="MODULE:FUNCTION", help=keep)
    add("--keep_duplicates", action="store_true", help="prepare: keep exact repetitions")
    size = "prepare: MB of raw text in a shard (default: 256)"
    add("--shard_mb", type=int, default=256, metavar="N", help=size)
    add("--beam", default="", metavar="OPTIONS", help="prepare: Beam's options")


def run(args, overrides) -> int:
    from transformer.data.corpora import CORPORA, fetch

    if args.name == "prepare":
        return _prepare(args, overrides)
    arguments(parser := argparse.ArgumentParser())
    unset = vars(parser.parse_args([])) | {"name": args.name}
    unset |= {"output": args.output} if args.name == "verify" else {}
    if overrides or any(getattr(args, option) != value for option, value in unset.items()):
        problem = "options are for `data prepare`, and --output also for `data verify`"
        raise UserError(f"data: {problem}; leave them out")
    if args.name == "verify":
        from transformer.data.records import verify

        if not args.output:
            raise UserError("data verify needs --output=FOLDER")
        print(f"{verify(Path(args.output)):,} shard(s) are as they were prepared")
        return 0
    if args.name is None:
        for name, corpus in CORPORA.items():
            print(f"{name:<16}{corpus.about}\n{'':<16}{corpus.license}; {corpus.attribution}")
        return 0
    corpus, folder = fetch(args.name)
    print(f"{args.name}: {corpus.about}")
    print(f"license      {corpus.license}\nattribution  {corpus.attribution}")
    for file in sorted(folder.iterdir()):
        print(f"             {file}  {file.stat().st_size:,} bytes")
    return 0


def _prepare(args, overrides) -> int:
    from transformer.config_io import load_experiment
    from transformer.data import sources
    from transformer.data.config import DataConfig
    from transformer.data.corpora import fetch
    from transformer.data.preparation.job import Job
    from transformer.data.preparation.prepare import prepare
    from transformer.mapping import to_mapping

    if not args.config or not args.output:
        raise UserError("data prepare needs --config=FILE.py and --output=FOLDER")
    config = load_experiment(args.config, overrides)
    text = config.data
    if text.corpus:
        corpus, folder = fetch(text.corpus)
        paths = {part: str(folder / file) for part, file in corpus.files.items()}
        text = dataclasses.replace(text, corpus="", format=corpus.format, **paths)
    names = ("output", "license", "min_chars", "max_chars", "filter", "keep_duplicates", "shard_mb")
    options = {name: getattr(args, name) for name in names} | {"beam": args.beam}
    # `prepare` refuses a mixture, which has no files of its own.
    files = () if text.mixture else tuple(sources.files(text.format, text.train))
    made = prepare(Job(config.model, text, config.seed, files, **options))
    print("not read: " + ", ".join(f"{n:,} {why}" for why, n in made["dropped"].items()))
    print(
        f"{made['examples']:,} examples, {made['tokens']:,} tokens -> {made['sequences']:,} "
        f"sequences in {made['shards']:,} shard(s), {made['bytes'] / 1e6:,.1f} MB "
        f"({made['bytes'] / made['tokens']:.2f} bytes per token); {made['padding']:.1%} padding"
    )
    # Fields that have no effect any more return to their defaults.
    data, default = to_mapping(config.data), to_mapping(DataConfig())
    mount = "MOUNT/" * args.output.startswith("gs://")  # instead of gs://BUCKET/
    changes = {"format": "prepared", "train": mount + args.output.split("/", 3 * bool(mount))[-1]}
    no_effect = ("corpus", "valid", "test", "fields", "reverse", "held_out")
    changes |= {field: default[field] for field in no_effect if data[field] != default[field]}
    tokenizer = default["tokenizer"].items()
    changes |= {f"tokenizer.{k}": v for k, v in tokenizer if data["tokenizer"][k] != v}
    where = " (MOUNT: where the bucket is mounted, runs/ by the launchers)" * bool(mount)
    print(f"read it{where} with", shlex.join(f"--config.data.{k}={x}" for k, x in changes.items()))
    return 0
