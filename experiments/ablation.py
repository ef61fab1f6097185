"""Is post-norm or pre-norm better, and does the answer depend on the position scheme?

    python -m transformer sweep --config=experiments/ablation.py --workdir=runs/ablation --untuned
    python -m transformer compare runs/ablation

`make ablation` runs both commands. Without --untuned (`make ablation-tuned`), the sweep also tunes
the learning rate of each arm, and compares the arms at their best. To train one arm:
--config=experiments/ablation.py:post-alibi.

The study is small on purpose. A result for four layers and 0.8 M tokens need not hold for deeper
models or longer training: Xiong et al. (2020) find that post-norm becomes harder to train with
depth.

Hardware  two CPU cores, 11 minutes; with tuning, 41 minutes

Measured without tuning (two cores of an AMD EPYC 9005; test split, mean and 95 % interval over
three seeds, p of paired t-tests with Holm's correction):

    arm          test/loss        difference from pre-rotary      p
    pre-rotary   4.840 +- 0.037
    pre-alibi    4.747 +- 0.018   -0.093 [-0.129, -0.058]     0.009
    post-rotary  4.609 +- 0.041   -0.231 [-0.299, -0.164]     0.009
    post-alibi   4.596 +- 0.005   -0.244 [-0.280, -0.208]     0.003

Post-norm is better here, by 0.191 [0.159, 0.223] nats over both position schemes. ALiBi is better
than rotary positions, by 0.053 [0.041, 0.065] nats over both placements. There is no detectable
difference between post-rotary and post-alibi.

Measured with tuning (two cores of an AMD EPYC). Rate: the arm's best learning rate. Gain: how much
lower the loss is than at the file's rate of 0.003:

    arm          rate    test/loss        difference from pre-rotary     p      gain
    pre-rotary   0.016   4.545 +- 0.037                                         0.295
    pre-alibi    0.015   4.475 +- 0.036   -0.070 [-0.088, -0.052]        0.011  0.272
    post-rotary  0.0048  4.491 +- 0.094   -0.05 [-0.18, +0.08]           0.22   0.118
    post-alibi   0.0048  4.476 +- 0.063   -0.068 [-0.168, +0.031]        0.19   0.120

With tuning, post-norm is no longer detectably better: averaged over both position schemes, it
changes the loss by -0.03 [-0.14, +0.09] nats (p = 0.42). Whether its effect depends on the position
scheme is inconclusive: -0.05 [-0.18, +0.08] with rotary positions, +0.002 [-0.092, +0.095] with
ALiBi, and the difference is +0.055 [+0.011, +0.099] (p = 0.032, corrected 0.065). With pre-norm,
ALiBi is still better than rotary positions. The file's rate is two thirds of the best rate of
post-norm and a fifth of that of pre-norm. Each rate is the best of six that were tried, or between
them; the next rates on both sides have higher losses.
"""

import ml_collections

from transformer import Sweep, product, tuned, vary


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
        question="Is post-norm as good as pre-norm in four layers, and does the answer depend on "
        "the position scheme?",
        seeds=3,
        tune=tuned("optimizer.learning_rate", 2e-3, 2e-2, points=5, more=1),
    )
