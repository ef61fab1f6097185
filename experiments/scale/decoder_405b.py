"""A decoder of 405 B parameters, Llama 3.1's shape, on a v5p-2048.

python -m transformer plan --config=experiments/scale/decoder_405b.py --topology=v5p-2048
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture("llama3.1_405b", max_length=8192, dtype="bfloat16", remat="full")
    config.data = dict(
        train="gs://BUCKET/c4/en/*.json.gz",
        format="jsonl",
        fields=("text",),
        objective="causal_lm",
        length=8192,
        batch_size=512,
    )
    config.optimizer = dict(
        learning_rate=8e-5, warmup_steps=2000, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0
    )
    config.train = dict(steps=100_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1, tensor=8)
    config.decoding = dict(batch_size=128, max_extra=2048)  # a row a device at least
    config.platform = "tpu"
    return config
