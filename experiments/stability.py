"""How large a learning rate does each norm placement stand, and how much does the rate matter? (:rate) How short a warm-up? (:warmup)

    python -m transformer sweep --config=experiments/stability.py:rate --workdir=runs/stability_rate
    python -m transformer compare runs/stability_rate

and the same with --config=experiments/stability.py:warmup.

Wortsman et al. (2023), "Small-scale proxies for large-scale Transformer training instabilities": what becomes unstable in large models at a small rate
does so in small ones at a large one. Their sensitivity, the mean loss over all rates less the loss at the best, is in the report.

Hardware  two CPU cores, about 15 minutes each

Seen      not run yet.
"""

import ml_collections

from transformer import Sweep, product, scan, vary

ARGUMENTS = ("rate", "warmup")


def get_config(what="rate"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=2048,
        num_decoder_layers=4,
        d_model=64,
        d_ff=256,
        num_heads=4,
        max_length=64,
        position="rotary",
        norm_placement="pre",
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=64, batch_size=16)
    config.optimizer = dict(name="adamw", learning_rate=1e-2, schedule="cosine", warmup_steps=50)
    config.train = dict(steps=300, log_every=20, eval_every=100, eval_batches=10, tensorboard=False)
    return config


def sweep(what="rate"):
    numbers = {
        "rate": scan("optimizer.learning_rate", 3e-4, 1.0, 8),
        "warmup": vary("optimizer.warmup_steps", 1, 10, 30, 100, 200),
    }
    return Sweep(
        product(vary("model.norm_placement", "pre", "post", "peri"), numbers[what]),
        question={"rate": "How large a learning rate does each norm placement stand?", "warmup": "How short a warm-up does each norm placement stand?"}[what],
        declared={"parameters": "placements have other numbers of norms"},
        seeds=3,
    )
