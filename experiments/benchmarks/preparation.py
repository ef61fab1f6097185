"""Measures how fast text is prepared, and how fast prepared text is read.

    python experiments/benchmarks/preparation.py prepare [--mb=64]
    python experiments/benchmarks/preparation.py read [--tokens=1e9] [--seconds=60] [--pace=10]

prepare: writes MB of text (lines of WikiText-2 with their words in another order) into eight files,
    and prepares them with one worker process and with two. `datasets.map` (extra [hf]) tokenizes
    the same files with the same tokenizer in one process and in two. Prints MB of raw text per
    second, bytes per token on disk, and the peak memory of the largest worker.
read: writes sequences of 2,048 random tokens, and reads them in random order as the batches of a
    host of experiments/scale/decoder_1b.py. Prints the seconds until the first batch, tokens per
    second as a multiple of what the host needs (planned: 524,288 tokens per 1.82 s on 4 hosts), and
    the memory: at the beginning, the highest of each tenth of the time. With --pace, batches are
    read at this multiple of the need, which leaves the processor to other work.
"""

import argparse
import hashlib
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

NEED = 524_288 / 1.82 / 4  # tokens per second of one host
LENGTH = 2048


def experiment(train: str, data_format: str, **data):
    from transformer.config import Experiment
    from transformer.mapping import from_mapping

    model = {"family": "decoder", "vocab_size": 8_000, "d_model": 64, "num_heads": 1}
    text = {"train": train, "format": data_format, "objective": "causal_lm", "length": LENGTH}
    return from_mapping(
        Experiment,
        {"model": model | {"max_length": LENGTH}, "data": text | {"batch_size": 64} | data},
    )


def write_texts(folder: Path, mb: int) -> None:
    """Eight files with lines of WikiText-2, each in another order of its words."""
    from transformer.data import sources
    from transformer.data.corpora import fetch

    rng, size = np.random.default_rng(0), 0
    articles = sources.read("jsonl", str(fetch("wikitext2")[1] / "train.jsonl"))
    lines = [line.split() for (text,) in articles for line in text.split("\n") if len(line) > 40]
    files = [(folder / f"{i}.txt").open("w") for i in range(8)]
    while size < mb * 10**6:
        for i, words in enumerate(lines):
            line = " ".join(words[j] for j in rng.permutation(len(words)))
            size += files[i % 8].write(line + "\n")
    for file in files:
        file.close()


def timed(work, *args) -> tuple[float, float]:
    """(seconds, peak MB of the largest child process) of `work(*args)` in a new process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_time, args=(queue, work, *args))
    process.start()
    result = queue.get()
    process.join()
    return result


def _time(queue, work, *args) -> None:
    start = time.perf_counter()
    work(*args)
    seconds = time.perf_counter() - start
    queue.put((seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3))


def prepare_files(files: tuple[str, ...], tokenizer: str, output: str, workers: int) -> None:
    from transformer.data.preparation.job import Job
    from transformer.data.preparation.prepare import prepare

    config = experiment(files[0], "text", tokenizer={"path": tokenizer})
    beam = "--runner=FnApiRunner --direct_running_mode=multi_processing"
    beam += f" --direct_num_workers={workers}"
    prepare(Job(config.model, config.data, 0, files, output, beam=beam, shard_mb=8))


def tokenize_files(files: tuple[str, ...], tokenizer: str, output: str, workers: int) -> None:
    import datasets

    from transformer.data.tokenizer import load_tokenizer

    datasets.disable_progress_bars()
    encode = load_tokenizer(tokenizer).encode
    rows = datasets.load_dataset("text", data_files=list(files), split="train", cache_dir=output)
    tokenize = lambda rows: {"ids": encode(rows["text"])}
    rows.map(tokenize, batched=True, num_proc=workers, remove_columns=["text"])


def measure_preparation(mb: int) -> None:
    from transformer.data.pipeline import open_data

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        write_texts(folder / "texts", mb)
        files = tuple(map(str, sorted((folder / "texts").iterdir())))
        raw = sum(Path(file).stat().st_size for file in files) / 1e6
        tokenizer = folder / "tokenizer.model"
        tokenizer.write_bytes(open_data(experiment(files[0], "text")).tokenizer.content)
        for workers in (1, 2):
            for work, what in ((prepare_files, "data prepare"), (tokenize_files, "datasets.map")):
                output = folder / f"{work.__name__}{workers}"
                seconds, peak = timed(work, files, str(tokenizer), str(output), workers)
                print(
                    f"{what} with {workers} process(es): {raw / seconds:6.2f} MB/s "
                    f"({seconds:.1f} s for {raw:.0f} MB), "
                    f"a worker's peak {peak:,.0f} MB",
                    flush=True,
                )
        output = folder / "prepare_files2"
        tokens = json.loads((output / "meta.json").read_text())["train"]["tokens"]
        disk = sum(file.stat().st_size for file in output.glob("*.arrayrecord"))
        print(f"{disk / tokens:.3f} bytes per token on disk")


def write_sequences(folder: Path, tokens: int) -> None:
    """A folder of prepared text with random tokens, as `data prepare` writes it."""
    from array_record.python.array_record_module import ArrayRecordWriter

    from transformer.data.preparation.job import Job
    from transformer.data.preparation.prepare import prepare
    from transformer.data.records import encode

    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(3000)]
    (folder / "a.txt").write_text("\n".join(" ".join(rng.choice(words, 50)) for _ in range(3000)))
    config = experiment(str(folder / "a.txt"), "text", tokenizer={"kind": "char"})
    output, here = folder / "out", "--runner=BundleBasedDirectRunner"
    prepare(Job(config.model, config.data, 0, (config.data.train,), str(output), beam=here))
    index = json.loads((output / "index.json").read_text())
    index["shards"] = []
    per_shard = 64 * 2**20 // (2 * LENGTH)
    for number in range(-(-tokens // (per_shard * LENGTH))):
        file = output / f"train-{number:05d}.arrayrecord"
        writer = ArrayRecordWriter(str(file), "group_size:1,uncompressed")
        ids = rng.integers(4, 8_000, (per_shard, LENGTH + 1), np.uint16)
        for row in ids:
            writer.write(encode([(row,)], np.uint16))
        writer.close()
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        entry = {"filename": file.name, "take": per_shard, "size": file.stat().st_size}
        index["shards"].append(entry | {"sha256": digest})
    (output / "index.json").write_text(json.dumps(index))


def measure_reading(tokens: int, seconds: float, pace: float) -> None:
    import dataclasses

    from transformer.data.config import TokenizerConfig
    from transformer.data.pipeline import open_data

    memory = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sequences(folder, tokens)
        config = experiment(str(folder / "out"), "prepared", tokenizer={})
        assert config.data.tokenizer == TokenizerConfig()
        share = lambda n: np.arange(n)[: n // 4]  # one of four hosts
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, batch_size=524_288 // LENGTH)
        )
        start = time.perf_counter()
        batches = open_data(config).batches("train", share)
        stream = batches.stream()
        next(stream)
        print(f"{tokens:.1e} tokens: first batch after {time.perf_counter() - start:.2f} s")
        for _ in range(20):
            next(stream)
        first, start, count = memory(), time.perf_counter(), 0
        highest = [0.0] * 10
        while (spent := time.perf_counter() - start) < seconds:
            count += next(stream)["inputs"].size
            tenth = int(10 * spent / seconds)
            highest[tenth] = max(highest[tenth], memory())
            time.sleep(max(count / (pace * NEED) - spent, 0.0) if pace else 0.0)
        rate = count / (time.perf_counter() - start)
        print(
            f"{rate / 1e6:.2f} M tokens/s: {rate / NEED:.0f}x what a host of decoder_1b needs; "
            f"memory {first:,.0f} MB; in {count / 1e9:.2f} B tokens, the highest of each tenth: "
            f"{', '.join(f'{x:,.0f}' for x in highest)} MB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("prepare", "read"))
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pace", type=float, default=0.0)
    args = parser.parse_args()
    if args.what == "prepare":
        measure_preparation(args.mb)
    else:
        measure_reading(int(args.tokens), args.seconds, args.pace)


if __name__ == "__main__":
    sys.exit(main())
