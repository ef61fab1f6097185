"""A decoder of 1.3 B parameters on a v5e-16: what a small slice does in days.

python -m transformer plan --config=experiments/scale/decoder_1b.py --topology=v5e-16
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture(
        "llama2_7b",
        num_decoder_layers=24,
        d_model=2048,
        d_ff=5632,
        num_heads=16,
        num_kv_heads=16,
        max_length=2048,
        dtype="bfloat16",
        remat="full",
    )
    config.data = dict(
        train="gs://BUCKET/c4/en/*.json.gz",
        format="jsonl",
        fields=("text",),
        objective="causal_lm",
        length=2048,
        batch_size=256,
    )
    config.optimizer = dict(
        learning_rate=2e-4, warmup_steps=2000, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0
    )
    config.train = dict(steps=50_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1)
    config.platform = "tpu"
    return config
