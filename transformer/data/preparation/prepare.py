"""Prepares text of any size as a folder of training sequences (`data prepare`, data/records.py).

Apache Beam distributes the work over processes or machines:

    scan          raw file           -> the hashes of its examples, and which pass the filters
    duplicates    range of hashes    -> the examples that repeat an earlier one
    select        raw file           -> held-out examples, and a sample to train the tokenizer on
    write         range of examples  -> a shard of training sequences

Beam passes only the numbers of files and ranges between workers; texts stay in files. Each task
writes its result to OUTPUT/unfinished when it is complete. If restarted, it skips these tasks.

Held-out examples are those whose normalized sources (data/split.py) have the smallest hashes:
`data.held_out` sources, or that fraction, for test; as many for valid. The tokenizer's sample has
the next larger hashes. Examples that share a side with a held-out one are not trained on."""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import tempfile
from collections import Counter
from pathlib import Path

from transformer.data import sources
from transformer.data.preparation import stages
from transformer.data.preparation.job import UNFINISHED, Job, distribute, publish
from transformer.data.records import FORMAT, INDEX
from transformer.data.store import RawText, provide_tokenizer, tokenize
from transformer.data.tokenizer import Tokenizer, find_tokenizer, read_tokenizer
from transformer.errors import UserError
from transformer.mapping import to_mapping

_REASON = "all is held out, or shares a text with what is held out"
_NONE_LEFT = f"data: no text is left for training: {_REASON}; lower data.held_out"


def prepare(job: Job) -> dict:
    """Writes the folder `job.output`. Returns the counts of the training text."""
    _begin(job)
    files = range(len(job.files))
    distribute(job, "scan", stages.scan, files)
    if not job.keep_duplicates:
        ranges = -(-sum(len(job.scanned(file)["kept"]) for file in files) // stages.AT_ONCE)
        distribute(job, "duplicates", stages.duplicates, range(ranges), ranges=ranges)
    distribute(job, "select", stages.select, files, limits=stages.limits(job))
    held_out, sample = stages.selected(job)
    pieces = stages.pieces(job)
    with tempfile.TemporaryDirectory() as folder:
        file = find_tokenizer(job.folder / UNFINISHED)  # of a preparation that is continued
        data = job.data.with_tokenizer(file) if file else job.data
        if not data.tokenizer.path and not sample:
            raise UserError(_NONE_LEFT)
        lines = itertools.chain.from_iterable(sample)
        tokenizer = provide_tokenizer(Path(folder), data, job.model.vocab_size, lines)
        meta = {"tokenizer_sha256": tokenizer.sha256, "overlap": {}}
        for part, examples in held_out.items():
            meta[part] = tokenize(Path(folder), part, iter(examples), tokenizer, job.columns)
        for file in Path(folder).iterdir():
            is_tokenizer = file.name == tokenizer.name
            publish(file, (job.folder / UNFINISHED if is_tokenizer else job.folder) / file.name)
    distribute(job, "write", stages.write, range(len(pieces)), pieces=pieces)
    return _finish(job, tokenizer, meta, len(pieces))


def _begin(job: Job) -> None:
    data = job.data
    stages.load_filter(job.filter)
    for name, least in {"shard_mb": 1, "min_chars": 1, "max_chars": 0}.items():
        if getattr(job, name) < least:
            raise UserError(f"--{name}: {getattr(job, name)} must be at least {least}")
    folder = sources.as_path(job.output, "--output")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output: {job.output} is not a folder; name another one")
    if data.tokenizer.path:
        read_tokenizer(data.tokenizer.path)
    refused = {
        "objective": (not data.chosen.can_prepare, "its sequences cannot be stored"),
        "format": (data.format in ("probe", "prepared"), "only files of text can be prepared"),
        "mixture": (bool(data.mixture), "prepare each source, and mix the prepared ones"),
        "buckets": (bool(data.buckets), "prepared sequences have one length"),
        "max_examples": (bool(data.max_examples), "the whole text is prepared; leave it out"),
    }
    for field, (is_refused, reason) in refused.items():
        if is_refused:
            raise UserError(f"data.{field}: {reason}")
    if (job.folder / INDEX).exists():
        raise UserError(f"--output: {job.output} holds prepared text; name another folder")
    described = to_mapping(dataclasses.replace(job, beam="", output=""))
    described["files"] = RawText(job.data).fingerprint()
    described["content of --filter"] = stages.source(job.filter)
    described = json.loads(json.dumps(described, default=str))
    file = job.folder / UNFINISHED / "job.json"
    if file.exists():
        before = json.loads(file.read_text())
        if differ := [name for name in described if before.get(name) != described[name]]:
            problem = f"{job.output} holds an unfinished preparation with other {differ[0]}"
            raise UserError(f"--output: {problem}; name another folder, or delete this one")
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(f"--output: {job.output} is not empty; name another folder")
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as local:
            (Path(local) / "job.json").write_text(json.dumps(described))
            publish(Path(local) / "job.json", file)


def _finish(job: Job, tokenizer: Tokenizer, meta: dict, num_pieces: int) -> dict:
    """Writes what describes the folder, the index last, and removes the intermediate results."""
    results = [json.loads(job.result("write", n).read_text()) for n in range(num_pieces)]
    total: Counter = sum((Counter(x["counts"] | {"sha256": 0}) for x in results), Counter())
    digests = "".join(result["counts"]["sha256"] for result in results)
    meta["train"] = {**total, "sha256": hashlib.sha256(digests.encode()).hexdigest()}
    shards = [result for result in results if result["take"]]
    if not shards:
        raise UserError(_NONE_LEFT)
    sequences = sum(shard["take"] for shard in shards)
    filled = sum(shard["filled"] * shard["take"] for shard in shards) / sequences
    (job.folder / tokenizer.name).write_bytes(tokenizer.content)
    arrays = itertools.product(("valid", "test"), range(len(job.columns)), ("ids", "ends"))
    names = [tokenizer.name, *(f"{part}.{text}.{kind}.npy" for part, text, kind in arrays)]
    names += ["valid.jsonl", "test.jsonl"]
    digest = lambda name: hashlib.sha256((job.folder / name).read_bytes()).hexdigest()
    index = {
        "format": FORMAT, "files": {name: digest(name) for name in names},
        "layout": job.data.chosen.layout(job), "tokenizer": to_mapping(job.data.tokenizer),
        "report": dict(sum((Counter(shard["report"]) for shard in shards), Counter())),
        "shards": [{x: s[x] for x in ("filename", "take", "size", "sha256")} for s in shards],
    }  # fmt: skip
    summary = {
        "examples": total["examples"], "tokens": total["tokens"], "sequences": sequences,
        "shards": len(shards), "padding": 1 - filled,
        "bytes": sum(shard["size"] for shard in shards),
        "dropped": _dropped(job, total["examples"], meta),
    }  # fmt: skip
    (job.folder / "meta.json").write_text(json.dumps(meta, indent=1))
    (job.folder / "card.md").write_text(_card(job, tokenizer, meta, summary))
    (job.folder / INDEX).write_text(json.dumps(index, indent=1))
    (job.folder / UNFINISHED).rmtree()
    return summary


def _dropped(job: Job, trained: int, meta: dict) -> dict[str, int]:
    """Why examples of the raw files are not training examples -> their number."""
    files = range(len(job.files))
    fits = [job.scanned(file)["kept"] for file in files]
    kept = sum(int(job.training(file).sum()) for file in files)
    held_out = sum(meta[p]["examples"] for p in ("valid", "test") if not getattr(job.data, p))
    return {
        "dropped by filters": sum(int((~x).sum()) for x in fits),
        "repeat another": sum(int(x.sum()) for x in fits) - kept,
        "held out": held_out,
        "share a text with held-out ones": kept - trained - held_out,
    }


def _card(job: Job, tokenizer: Tokenizer, meta: dict, summary: dict) -> str:
    data, files = job.data, ", ".join(job.files[:3]) + (", ..." if len(job.files) > 3 else "")
    options = ("min_chars", "max_chars", "filter", "keep_duplicates", "shard_mb")
    versions = {name: importlib.metadata.version(name) for name in ("transformer", "sentencepiece")}
    lines = {
        "Source": f"{len(job.files):,} file(s): {files}",
        "License": job.license or "not stated",
        "Text": f"{summary['examples']:,} examples, {summary['tokens']:,} tokens (of the targets)",
        "Not for training": ", ".join(f"{n:,} {why}" for why, n in summary["dropped"].items()),
        "Held out": f"{meta['valid']['examples']:,} valid, {meta['test']['examples']:,} test",
        "Sequences": f"{summary['sequences']:,} in {summary['shards']:,} shard(s); "
        f"{summary['padding']:.1%} of their tokens are padding",
        "Layout": json.dumps(data.chosen.layout(job)),
        "Tokenizer": f"{tokenizer.name}, SHA-256 {tokenizer.sha256}",
        "Options": ", ".join(f"{name} = {getattr(job, name)!r}" for name in options),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return "# Prepared text\n\n" + "".join(f"- {name}: {text}\n" for name, text in lines.items())
