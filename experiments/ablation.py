"""Post-norm or pre-norm, and does the answer depend on the position scheme?

    python -m transformer sweep --config=experiments/ablation.py --workdir=runs/ablation
    python -m transformer compare runs/ablation

or `make ablation`. One arm: --config=experiments/ablation.py:post-alibi. Small on purpose: what holds for four layers and 0.8 M tokens need
not hold for more of either (Xiong et al. 2020 find post-norm harder to train the deeper it is).

Hardware  two CPU cores, about 10 minutes

Seen (two cores of an AMD EPYC 9005; test side, three seeds, mean and 95 % interval; p of paired t-tests, corrected by Holm):

    arm          test/loss        less pre-rotary        p
    pre-rotary   4.840 +- 0.037
    pre-alibi    4.747 +- 0.018   -0.093 -0.129 to -0.058   0.009
    post-rotary  4.609 +- 0.041   -0.231 -0.299 to -0.164   0.009
    post-alibi   4.596 +- 0.005   -0.244 -0.280 to -0.208   0.003

So post-norm is better here, by 0.191 [0.159, 0.223] over both schemes, and ALiBi by 0.053 [0.041, 0.065] over both placements. post-rotary and
post-alibi cannot be told apart.
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
        name="adamw",
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=50,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train = dict(steps=400, log_every=20, eval_every=100, eval_batches=10, tensorboard=False)
    return config


def sweep():
    return Sweep(
        product(
            vary("model.norm_placement", "pre", "post"), vary("model.position", "rotary", "alibi")
        ),
        question="Is post-norm as good as pre-norm in four layers, and does the answer depend on the position scheme?",
        declared={"parameters": "post-norm has no norm behind the last layer: 128 numbers fewer"},
        seeds=3,
    )
