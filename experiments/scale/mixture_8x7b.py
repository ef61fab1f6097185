"""A mixture of eight experts, Mixtral 8x7B's shape (Jiang et al. 2024), on a v5p-256.

python -m transformer plan --config=experiments/scale/mixture_8x7b.py --topology=v5p-256
"""

import ml_collections

from transformer import architecture


def get_config():
    config = ml_collections.ConfigDict()
    config.model = architecture(
        "mistral_7b",
        window=0,
        max_length=4096,
        position=dict(name="rotary", theta=1e6),
        feed_forward=dict(name="experts", num_experts=8, top_k=2, capacity_factor=1.25),
        dtype="bfloat16",
        remat="full",
    )
    config.data = dict(
        train="gs://BUCKET/c4/en/*.json.gz",
        format="jsonl",
        fields=("text",),
        objective="causal_lm",
        length=4096,
        batch_size=512,
    )
    config.optimizer = dict(
        learning_rate=3e-4, warmup_steps=2000, b2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0
    )
    config.train = dict(steps=100_000, checkpoint_every=1000, eval_every=1000, eval_batches=20)
    config.mesh = dict(data=1, fsdp=-1, expert=8)
    config.platform = "tpu"
    return config
