"""What is 1 / sqrt(d_k) good for? Vaswani et al. (2017), section 3.2.1.

The paper suspects that for large d_k dot products grow large and push the softmax to where its gradient is small. Here queries and keys grow
from 8 to 256 numbers, with the scale and without it: entropy of the weights, largest logit and the gradient of W_Q and W_K before the first
step, and the loss after a few.

    python -m transformer sweep --config=experiments/findings/attention_scaling.py --workdir=runs/attention_scaling
    python -m transformer compare runs/attention_scaling

At a larger scale (d_model 1024, 12 layers; TPU v5e-8): --config=experiments/findings/attention_scaling.py:large

Hardware  two CPU cores, about 15 minutes with --jobs=2

Seen (two cores of an AMD EPYC 9005, 30 minutes while other work ran beside it; three seeds; test/loss with its 95 % interval; entropy, largest logit
(means over heads and layers) and gradient of W_Q before the first step):

    d_k   scaled: test/loss  entropy  largest logit  gradient    unscaled: test/loss  entropy  largest logit  gradient
      8      5.122 +- 0.035     2.58            7.6      0.19       5.254 +- 0.045       1.24           22.2      0.39
     16      5.108 +- 0.007     2.73            6.0      0.18       5.288 +- 0.023       0.99           24.9      0.46
     32      5.066 +- 0.025     2.94            4.3      0.16       5.268 +- 0.040       0.89           24.5      0.57
     64      5.044 +- 0.033     3.12            2.7      0.13       5.242 +- 0.056       0.95           22.7      0.67
    128      5.025 +- 0.022     3.21            1.5      0.10       5.191 +- 0.025       1.10           18.7      0.77
    256      5.023 +- 0.028     3.24            0.9      0.08       5.158 +- 0.027       1.38           15.4      0.90

Without the scale the loss after these 200 steps is worse by 0.13 to 0.20 nats at every d_k, and the softmax is peaked (0.9 to 1.4 nats of entropy, where
uniform weights would have 3.2). Other than the paper suspects the gradient is not small for that: it is two to twelve times as large as with the scale;
and logits do not grow with d_k. The paper's argument takes queries and keys of variance 1, but Xavier's initialisation, used here and by the authors,
makes W_Q and W_K smaller the larger d_k is. (--config.model.initializer=lecun_normal keeps the variance; not run yet.)
"""

import ml_collections

from transformer import Sweep, product, vary

ARGUMENTS = ("small", "large")


def get_config(scale="small"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=2048,
        num_decoder_layers=2,
        d_model=128,
        d_head=64,
        d_value=32,
        d_ff=256,
        num_heads=4,
        max_length=64,
        position="none",
        norm_placement="pre",
        initializer="lecun_normal",
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=64, batch_size=32)
    config.optimizer = dict(name="adamw", learning_rate=2e-3, schedule="linear", warmup_steps=20, clip_norm=1.0)
    config.train = dict(
        steps=200, log_every=20, eval_every=100, eval_batches=10, tensorboard=False, evaluators=("attention", "depth_profile")
    )
    if scale == "large":
        config.model.update(
            vocab_size=32000, num_decoder_layers=12, d_model=1024, d_value=64, d_ff=4096, num_heads=16, max_length=512, dtype="bfloat16",
        )  # fmt: skip
        config.data.update(length=512, batch_size=256)
        config.train.update(steps=2000, eval_every=500)
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    return Sweep(
        product(vary("model.attention_scale", scaled=None, unscaled=1.0), vary("model.d_head", 8, 16, 32, 64, 128, 256)),
        question="What is 1 / sqrt(d_k) good for?",
        baseline="scaled-d_head=64",
        declared={"parameters": "W_Q and W_K grow with d_k", "flops": "so does their product"},
        seeds=3,
    )
