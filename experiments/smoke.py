"""Does everything work without a network? A tiny language model of Python's built-in help texts.

    python -m transformer train    --config=experiments/smoke.py --workdir=runs/smoke
    python -m transformer evaluate --workdir=runs/smoke

Hardware  any; under a minute on two CPU cores
"""

import ml_collections


def get_config():
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=1024,
        num_decoder_layers=2,
        d_model=64,
        d_ff=256,
        num_heads=4,
        max_length=128,
        position="rotary",
        norm_placement="pre",
        activation="gelu",
    )
    config.data = dict(corpus="pydoc", objective="causal_lm", length=128, batch_size=8, held_out=8)
    config.optimizer = dict(learning_rate=3e-3, warmup_steps=50)
    config.train = dict(steps=300, eval_every=100)
    config.decoding = dict(temperature=0.8, top_k=40, max_extra=40)
    return config
