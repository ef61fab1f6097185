"""Decodes a run's test set with and without replacing sentences that have ended.

    python experiments/benchmarks/decoding_batches.py --workdir=runs/quickstart [--rounds=3]

Without replacement, a batch runs until its longest text ends. With it, waiting sentences take the
places of those that have ended (transformer/decoding/generate.py). Decodes the sources of the
test set with one beam and with four, in alternation. Prints the median time of both, the median,
minimum and maximum of their ratio over the rounds, and the share of equal texts. Compilation is
not included.
"""

import argparse
import dataclasses
import statistics
import time

import transformer
from transformer.data.pipeline import open_data
from transformer.decoding.config import DecodingConfig
from transformer.decoding.generate import Generator
from transformer.evaluation.evaluators.translation import group
from transformer.runs.rundir import tokenizer_file


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", default="runs/quickstart")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    run = transformer.load_run(args.workdir)
    data = open_data(run.config, tokenizer_file(run.workdir))
    sources, _ = group(data.examples("test"))
    size = DecodingConfig().batch_size
    lengths = [len(ids) for ids in run.tokenizer.encode(sources)]
    sources = [source for _, source in sorted(zip(lengths, sources, strict=True), reverse=True)]
    batches = [sources[n : n + size] for n in range(0, len(sources), size)]
    print(f"{len(sources)} sentences, in batches of {size}")
    print("beams  without   with  ratio (minimum to maximum)  equal texts")
    for beams in (1, 4):
        config = dataclasses.replace(run.config, decoding=DecodingConfig(beam_size=beams))
        generate = Generator(config, run.params, run.tokenizer)
        run_batches = lambda batches, generate=generate: [t for x in batches for t in generate(x)]
        texts = [run_batches(x) for x in (batches, [sources])]  # also compiles
        equal = sum(map(str.__eq__, *texts)) / len(sources)
        seconds = []
        for _ in range(args.rounds):
            starts = []
            for side in (batches, [sources]):
                start = time.perf_counter()
                run_batches(side)
                starts.append(time.perf_counter() - start)
            seconds.append(starts)
        without, replaced = (statistics.median(column) for column in zip(*seconds, strict=True))
        ratios = [a / b for a, b in seconds]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"{beams:5}  {without:5.2f} s  {replaced:.2f} s  "
            f"{statistics.median(ratios):5.2f} ({spread})  {equal:18.1%}"
        )


if __name__ == "__main__":
    main()
