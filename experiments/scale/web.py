r"""How long does a decoder of 8 B parameters train on a mixture of web pages, code and mathematics?

    python -m transformer plan --config=experiments/scale/web.py --topology=v5e-256 --only=train

The last tenth of the run has more code and mathematics, while the learning rate decays (mid-
training). The same mixture at a small size, on text that the first command generates:

    python experiments/scale/web.py data/web
    python -m transformer train --config=experiments/scale/web.py:small --workdir=runs/web

Data      C4, StarCoderData and OpenWebMath as files of JSON lines in your bucket, with a
          tokenizer; replace BUCKET with its name. Prepare each source once. The run reads the
          mounted bucket:
    python -m transformer data prepare --config=experiments/scale/web.py:web \
        --output=gs://BUCKET/prepared/web
    python -m transformer data prepare --config=experiments/scale/web.py:code \
        --output=gs://BUCKET/prepared/code
    python -m transformer data prepare --config=experiments/scale/web.py:math \
        --output=gs://BUCKET/prepared/math
Hardware  a TPU pod. This was planned, not run: compiled by libtpu 0.0.42.1 (jax 0.10.2) on two
          cores of an AMD EPYC 9004

    machine     v5e:16x16: 256 x TPU v5e, 16.0 GiB each
    mesh        fsdp 256
    model       8,030,261,248 parameters, 48.2 GFLOPs per token in training
    batch       2,097,152 tokens; 50,000 steps are 104.9B tokens
    attention   flash: train

    memory per device            train
      parameters             120.7 MiB
      optimizer              241.3 MiB
      cache and inputs       160.0 KiB
      padding                  1.5 KiB
      activations              2.2 GiB
      temporaries              9.8 GiB
      results, code           33.8 MiB
      peak of 16.0 GiB  12.4 GiB (78%)

    minimum time                       train
      compute at 197.0 TFLOP/s        2.53 s
      HBM at 819.0 GB/s               1.05 s
      network                       355.5 ms
      step                            2.53 s
      bound by                       compute
      MFU at most 79.4%; 3.2k tokens/s per chip, 71.7B tokens per day in total
      run: at least 35:06 h, 8,988 chip-hours, without evaluation and checkpoints

    sent per device in one training step         count  within the slice
      all-reduce                                   164          31.7 GiB
      all-gather                                   386          27.8 GiB
"""

import json
import random
import sys
from pathlib import Path

import ml_collections

from transformer import architecture

ARGUMENTS = ("pod", "small", "web", "code", "math")
FOLDER = "data/web"
RAW = {
    "web": dict(train="gs://BUCKET/c4/en/c4-train.*.json.gz", fields=("text",)),
    "code": dict(train="gs://BUCKET/starcoderdata/*.jsonl.gz", fields=("content",)),
    "math": dict(train="gs://BUCKET/open-web-math/*.jsonl.gz", fields=("text",)),
}


def get_config(scale="pod"):
    config = ml_collections.ConfigDict()
    config.data = dict(objective="causal_lm")
    if scale == "small":
        config.model = dict(
            family="decoder",
            vocab_size=512,
            num_decoder_layers=2,
            d_model=64,
            num_heads=4,
            max_length=64,
            position="rotary",
        )
        config.data.update(length=64, batch_size=16, held_out=0.03)
        config.optimizer = dict(
            learning_rate=3e-3, schedule="wsd", warmup_steps=20, decay_fraction=0.1
        )
        config.train = dict(steps=200, eval_every=100, eval_batches=10, log_every=20)
        source = lambda name: dict(train=f"{FOLDER}/{name}.jsonl", format="jsonl")
    else:
        config.model = architecture(
            "llama3_8b", max_length=4096, dtype="bfloat16", remat="full", vocab_size=128_256
        )
        config.data.update(length=4096, batch_size=512)
        config.optimizer = dict(
            learning_rate=3e-4,
            schedule="wsd",
            decay_fraction=0.1,
            warmup_steps=2000,
            b2=0.95,
            epsilon=1e-8,
            weight_decay=0.1,
            clip_norm=1.0,
        )
        config.train = dict(steps=50_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
        config.mesh = dict(data=1, fsdp=-1)
        config.platform = "tpu"
        limit = {"math": 4}
        source = lambda name: dict(
            train=f"runs/prepared/{name}", format="prepared", max_epochs=limit.get(name, 0)
        )
    if scale in RAW:
        tokenizer = dict(path="gs://BUCKET/tokenizer.json")
        # By hash: no source contains what another holds out.
        config.data.update(format="jsonl", tokenizer=tokenizer, held_out=1e-4, **RAW[scale])
        return config
    decay = config.train.steps * 9 // 10  # where the schedule begins to decay
    weights = {"web": (0.8, 0.4), "code": (0.15, 0.3), "math": (0.05, 0.3)}
    config.data.mixture = tuple(
        dict(name=name, weight=((0, before), (decay, after)), **source(name))
        for name, (before, after) in weights.items()
    )
    return config


def write(folder, documents=2000, seed=0):
    """Writes web.jsonl, code.jsonl and math.jsonl: pages, programs and sums that look the part."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("aeioulnrst", k=rng.randint(2, 8))) for _ in range(1000)]
    frequency = [1 / rank for rank in range(1, len(words) + 1)]  # Zipf's law
    sentence = lambda: " ".join(rng.choices(words, frequency, k=rng.randint(5, 15))) + "."

    def program() -> str:
        name, *arguments = rng.choices(words, k=3)
        body = f"{arguments[0]} {rng.choice('+-*')} {arguments[1]}"
        return f"def {name}({', '.join(arguments)}):\n    return {body}\n"

    def sums() -> str:
        pairs = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in range(8)]
        return "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs)

    kinds = {
        "web": lambda: " ".join(sentence() for _ in range(8)),
        "code": lambda: "\n".join(program() for _ in range(4)),
        "math": sums,
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, document in kinds.items():
        with (Path(folder) / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": document()}) + "\n" for _ in range(documents))


if __name__ == "__main__":
    write(*sys.argv[1:2] or [FOLDER])
