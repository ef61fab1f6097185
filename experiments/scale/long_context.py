r"""Does every position scheme train with 131,072 tokens in a sequence on a v5p slice?

    python -m transformer plan --config=experiments/scale/long_context.py --arms \
        --topology=v5p:4x4x4

A decoder of 1.4 B parameters. Each sequence is sharded over 8 chips (`mesh.context`), which pass
keys and values around a ring. CoPE, whose positions depend on all pairs of a query and a key, is
left out.

Least time of a step of 16 sequences, and peak memory of 95 GiB per chip:

    rotary                               5.10 s, compute    15.4 GiB
    none, learned, sinusoidal            5.09 s, compute    15.6 to 16.0 GiB
    alibi, t5, kerple, sandwich          5.09 s, compute    12.5 to 15.6 GiB
    shaw                                 4.96 s, compute    15.3 GiB
    deberta                              5.10 s, HBM        13.1 GiB
    transformer_xl                       5.53 s, network    15.5 GiB
    pope                                 7.33 s, compute    15.1 GiB
    xpos                                 9.71 s, compute    17.2 GiB
    fire                                 5.09 s, compute    12.5 GiB

The bounds of `shaw`, `deberta` and `transformer_xl` do not count the products with their tables,
and that of `fire` does not count its lines, with which attention takes at least twice as long
(docs/position_schemes.md).

Data      long documents in your bucket; replace BUCKET with its name
Hardware  a TPU slice. This was planned, not run (libtpu 0.0.42.1)
"""

import ml_collections

from transformer import Sweep, architecture, vary

LENGTH = 131_072
SCHEMES = (
    "rotary", "none", "learned", "sinusoidal", "xpos", "pope", "alibi", "t5", "kerple", "sandwich",
    "fire", "shaw", "transformer_xl", "deberta",
)  # fmt: skip


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture(
        "llama2_7b",
        num_decoder_layers=24,
        d_model=2048,
        d_ff=5632,
        num_heads=16,
        num_kv_heads=16,
        max_length=LENGTH,
        dtype="bfloat16",
        remat="full",
    )
    config.data = dict(
        train="gs://BUCKET/documents/train-*.jsonl",
        valid="gs://BUCKET/documents/valid-*.jsonl",
        test="gs://BUCKET/documents/test-*.jsonl",
        format="jsonl",
        fields=("text",),
        objective="causal_lm",
        length=LENGTH,
        batch_size=16,
    )
    config.optimizer = dict(
        learning_rate=2e-4,
        warmup_steps=1000,
        b2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train = dict(steps=10_000, checkpoint_every=500, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1, context=8)
    config.platform = "tpu"
    return config


def sweep():
    return Sweep(
        vary("model.position", *SCHEMES),
        question="Which position schemes train on long documents, and at what cost?",
        metric="test/bits_per_byte",
        seeds=1,
    )
