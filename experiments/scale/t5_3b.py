"""An encoder-decoder of 3 B parameters, T5's shape, on a v4-64.

python -m transformer plan --config=experiments/scale/t5_3b.py --topology=v4-64
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture(
        "t5_3b", dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, dtype="bfloat16", remat="full"
    )
    config.data = dict(
        train="gs://BUCKET/c4/en/*.json.gz",
        format="jsonl",
        fields=("text",),
        objective="span_corruption",
        length=512,
        target_length=128,
        batch_size=2048,
    )
    config.optimizer = dict(name="adafactor", learning_rate=1e-2, schedule="inverse_sqrt", warmup_steps=10_000)
    config.train = dict(steps=500_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1)
    config.platform = "tpu"
    return config
