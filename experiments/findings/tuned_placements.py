"""Does the ranking of norm placements survive tuning?

A comparison at one learning rate favors the arms that it suits. Here each placement, at 4 and at 12
layers, is trained with its own best warm-up and learning rate, and again at common settings.

    python -m transformer sweep --config=experiments/findings/tuned_placements.py \
        --workdir=runs/tuned_placements
    python -m transformer compare runs/tuned_placements

The warm-up is tuned first: with a short warm-up, post-norm trains only at small learning rates
(experiments/stability.py). At the scale of a publication (TPU v5e-16):
--config=experiments/findings/tuned_placements.py:paper

Hardware  two CPU cores, 150 runs, about two hours

Measured (two cores of an AMD EPYC; 300 steps; test/loss with its 95 % interval over three seeds;
difference from pre-norm with 4 layers, untuned and tuned; best warm-up and learning rate):

    4 layers   test/loss, tuned     untuned    tuned                     warm-up   rate
    pre          5.052 +- 0.070                                               66  0.012
    post         5.00  +- 0.10       +0.783   -0.049 [-0.088, -0.010]        240  0.0072
    peri         4.981 +- 0.036      -0.072   -0.071 [-0.140, -0.002]         38  0.015
    res_post     5.111 +- 0.034      +0.146   +0.059 [-0.026, +0.144]        240  0.03
    deepnorm     5.013 +- 0.081      +0.782   -0.038 [-0.085, +0.008]        240  0.0076

    12 layers  test/loss, tuned     untuned    tuned                     warm-up   rate
    pre          5.20  +- 0.14       +0.16    +0.148 [+0.072, +0.224]         89  0.010
    post         5.858 +- 0.001      +0.783   +0.806 [+0.735, +0.877]          4  0.0042
    peri         5.160 +- 0.074      +0.10    +0.109 [+0.103, +0.115]         74  0.009
    res_post     5.355 +- 0.039      +0.47    +0.304 [+0.204, +0.403]          4  0.033
    deepnorm     5.852 +- 0.018      +0.782   +0.801 [+0.742, +0.859]          4  0.0012

With 4 layers, the ranking does not survive tuning. At the common rate (0.01, warm-up 50), post-norm
and DeepNorm learn only the token frequencies, and would be called 0.78 nats worse than pre-norm.
With a long warm-up and a lower rate, they gain 0.86 and 0.85 nats, and no placement differs
detectably from pre-norm (after Holm's correction). With 12 layers, tuning does not help them:
within 300 steps, neither trains at any warm-up and rate that was tried. Their best warm-ups, and
that of res_post, are at the edge of the range and not bracketed, because all values are equally
bad. So the effect of the placement depends on depth: from 4 to 12 layers, the difference of post
from pre rises by 0.71 [0.54, 0.88] nats.
"""

import ml_collections

from transformer import Sweep, product, tuned, vary

ARGUMENTS = ("small", "paper")


def get_config(scale="small"):
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
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=64, batch_size=8)
    config.optimizer = dict(
        name="adamw", learning_rate=1e-2, schedule="cosine", warmup_steps=50, weight_decay=0.1
    )
    config.train = dict(steps=300, log_every=20, eval_every=100, eval_batches=40, tensorboard=False)
    if scale == "paper":
        config.model.update(
            vocab_size=32000, num_decoder_layers=12, d_model=768, d_ff=3072, num_heads=12,
            max_length=1024, dtype="bfloat16", remat="full", attention_backend="auto",
        )  # fmt: skip
        config.data = dict(
            train="data/fineweb/train.txt",
            valid="data/fineweb/valid.txt",
            test="data/fineweb/test.txt",
            format="text",
            objective="causal_lm",
            length=1024,
            batch_size=512,
            tokenizer=dict(kind="bpe"),
        )
        config.optimizer.update(learning_rate=1e-3, warmup_steps=2000)
        config.train.update(
            steps=20_000, log_every=100, eval_every=2000, checkpoint_every=2000, eval_batches=40
        )
        config.mesh = dict(fsdp=-1, data=1)
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    depths, rates, warmups = {
        "small": ((4, 12), (1e-3, 3e-2), (15, 240)),
        "paper": ((12, 48), (2e-4, 6e-3), (500, 8000)),
    }[scale]
    return Sweep(
        product(
            vary("model.norm_placement", "pre", "post", "peri", "res_post", "deepnorm"),
            vary("model.num_decoder_layers", **{f"{n}_layers": n for n in depths}),
        ),
        question="Which norm placement is best if each is tuned, and does tuning change the rank?",
        declared={
            "parameters": "deeper stacks are larger; placements differ in their number of norms",
            "flops": "deeper stacks compute more",
        },
        tune=(
            tuned("optimizer.warmup_steps", *warmups, points=3, more=1),
            tuned("optimizer.learning_rate", *rates, points=4, more=1),
        ),
        seeds=3,
    )
