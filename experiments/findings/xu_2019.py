r"""Does LayerNorm help by normalizing activations, or through the gradients of its statistics?

Xu et al. (2019), "Understanding and Improving Layer Normalization", separate the two. DetachNorm
(`model.norm="detach_norm"`) computes what LayerNorm computes, but its gradient treats the mean and
the variance as constants; they find that it is much worse than LayerNorm. They also find that
LayerNorm without gain and offset (LayerNorm-simple) is as good as LayerNorm or better.

    python -m transformer sweep --config=experiments/findings/xu_2019.py --workdir=runs/xu_2019
    python -m transformer compare runs/xu_2019

At a larger scale (110 M parameters, GPT-2's size, sequences of 1,024; TPU v5e-8):
--config=experiments/findings/xu_2019.py:large

Hardware  two CPU cores, 18 runs, 20 minutes on a busy machine

Measured (two cores of an AMD EPYC; test/loss with its 95 % interval over three seeds; difference
from LayerNorm under the same placement, paired by seed):

    norm        pre: test/loss       difference    post: test/loss       difference
    LayerNorm   4.902 +- 0.015                       4.722 +- 0.014
    simple      4.913 +- 0.018  0.011 +- 0.006       4.740 +- 0.011  0.018 +- 0.004
    detached    5.560 +- 0.096  0.658 +- 0.102       5.422 +- 0.047  0.700 +- 0.061

The first claim is confirmed: DetachNorm is much worse than LayerNorm, under both placements. The
second is not: without gain and offset, the loss is slightly higher, in every seed. Xu et al. find
that gain and offset overfit, and train for many epochs; here, no token is read twice.
"""

import ml_collections

from transformer import Sweep, arms, product, vary

ARGUMENTS = ("small", "large")


def get_config(scale="small"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=2048,
        num_decoder_layers=4,
        d_model=64,
        d_ff=256,
        num_heads=4,
        max_length=128,
        position="learned",
        norm_placement="pre",
        norm="layernorm",
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=64, batch_size=32)
    config.optimizer = dict(
        name="adamw", learning_rate=2e-3, schedule="cosine", warmup_steps=100, clip_norm=1.0
    )
    config.train = dict(steps=500, log_every=25, eval_every=100, eval_batches=40, tensorboard=False)
    if scale == "large":
        config.model.update(
            vocab_size=32000,
            num_decoder_layers=12,
            d_model=768,
            d_ff=3072,
            num_heads=12,
            max_length=1024,
            dtype="bfloat16",
            attention_backend="auto",
        )
        config.data.update(length=1024, batch_size=256)
        config.optimizer.update(learning_rate=6e-4, warmup_steps=700)
        config.train.update(steps=10_000, eval_every=1000, checkpoint_every=1000)
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    return Sweep(
        product(
            vary("model.norm_placement", "pre", "post"),
            arms(
                layernorm={},
                simple={"model.norm_gain": False, "model.norm_offset": False},
                detached={"model.norm": "detach_norm"},
            ),
        ),
        question="Does LayerNorm help by its values, or by the gradients of its statistics?",
        declared={"parameters": "norms without gain and offset have none"},
        seeds=3,
    )
