"""What is 1 / sqrt(d_k) good for? Vaswani et al. (2017), section 3.2.1.

The paper suspects that for large d_k dot products grow large and push the softmax to where its gradient is small. Here queries and keys grow
from 8 to 256 numbers, with the scale and without it: entropy of the weights, largest logit and the gradient of W_Q before the first
step, and the loss after a few. The paper's argument takes queries and keys of variance 1 at any d_k; so does LeCun's initialisation.

    python -m transformer sweep --config=experiments/findings/attention_scaling.py --workdir=runs/attention_scaling
    python -m transformer compare runs/attention_scaling

At a larger scale (d_model 1024, 12 layers; TPU v5e-8): --config=experiments/findings/attention_scaling.py:large

Hardware  two CPU cores, 36 runs, 16 minutes with --jobs=2 while other work ran beside it

Seen (two cores of an AMD EPYC 9005; three seeds; test/loss with its 95 % interval; entropy, largest logit (means over heads and layers) and gradient
of W_Q before the first step):

    d_k   scaled: test/loss  entropy  largest logit  gradient    unscaled: test/loss  entropy  largest logit  gradient
      8      5.099 +- 0.009     2.96            4.6      0.16       5.171 +- 0.020       1.87           13.7      0.34
     16      5.091 +- 0.025     2.95            4.5      0.15       5.222 +- 0.035       1.31           18.7      0.44
     32      5.057 +- 0.025     2.95            4.2      0.15       5.251 +- 0.015       0.90           25.1      0.56
     64      5.054 +- 0.010     2.94            4.0      0.15       5.317 +- 0.052       0.63           34.1      0.71
    128      5.023 +- 0.052     2.95            3.9      0.15       5.361 +- 0.055       0.45           47.2      1.04
    256      5.024 +- 0.038     2.94            4.1      0.16       5.400 +- 0.108       0.34           67.0      1.29

As the paper suspects logits grow without the scale, about as sqrt(d_k), and the softmax is ever more peaked; what that costs after these 200 steps grows
from 0.07 to 0.38 nats, and with the scale larger heads do no harm. Against its suspicion the gradient of W_Q does not become small: the missing scale
would make it sqrt(d_k) times as large, of which three quarters arrive at d_k 8 and half at 256, so it is two to eight times what it is with the scale.

Under Xavier's initialisation (--config.model.initializer=xavier_uniform, the same sweep), which makes W_Q and W_K smaller the larger d_k is, nothing grows
with d_k: without the scale the largest logit is 15 to 25 and the entropy 0.9 to 1.4 at every d_k, and the loss is worse by 0.13 to 0.20 nats.
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
    config.optimizer = dict(
        name="adamw", learning_rate=2e-3, schedule="linear", warmup_steps=20, clip_norm=1.0
    )
    config.train = dict(
        steps=200,
        log_every=20,
        eval_every=100,
        eval_batches=10,
        tensorboard=False,
        evaluators=("attention", "depth_profile"),
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
        product(
            vary("model.attention_scale", scaled=None, unscaled=1.0),
            vary("model.d_head", 8, 16, 32, 64, 128, 256),
        ),
        question="What is 1 / sqrt(d_k) good for?",
        baseline="scaled-d_head=64",
        declared={"parameters": "W_Q and W_K grow with d_k", "flops": "so does their product"},
        seeds=3,
    )
