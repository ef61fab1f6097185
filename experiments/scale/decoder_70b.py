"""A decoder of 70 B parameters, Llama 3's shape, on a v5p-512.

python -m transformer plan --config=experiments/scale/decoder_70b.py --topology=v5p-512
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture("llama3_70b", dtype="bfloat16", remat="full")
    config.data = dict(
        train="gs://BUCKET/c4/en/*.json.gz",
        format="jsonl",
        fields=("text",),
        objective="causal_lm",
        length=8192,
        batch_size=256,
    )
    config.optimizer = dict(
        learning_rate=1.5e-4, warmup_steps=2000, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0
    )
    config.train = dict(steps=100_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1)
    config.decoding = dict(batch_size=256, max_extra=2048)  # a row a device at least
    config.platform = "tpu"
    return config
