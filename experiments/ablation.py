"""Post-norm or pre-norm, and does the answer hang on how positions are told?

    python -m transformer sweep --config=experiments/ablation.py --workdir=runs/ablation
    python -m transformer compare runs/ablation

Hardware  two CPU cores
"""

import ml_collections

from transformer import Sweep, product, vary


def get_config():
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=2048,
        num_decoder_layers=4,
        d_model=64,
        d_ff=256,
        num_heads=4,
        max_length=128,
        position="rotary",
        norm_placement="pre",
        activation="gelu",
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=128, batch_size=16)
    config.optimizer = dict(
        name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=50, weight_decay=0.1, clip_norm=1.0
    )
    config.train = dict(steps=400, log_every=20, eval_every=100, eval_batches=10, tensorboard=False)
    return config


def sweep():
    return Sweep(
        product(vary("model.norm_placement", "pre", "post"), vary("model.position", "rotary", "alibi")),
        question="Is post-norm as good as pre-norm in four layers, and does the answer hang on how positions are told?",
        declared={"parameters": "post-norm has no norm behind the last layer: 128 numbers fewer"},
        seeds=3,
    )
