r"""What does the scale 1 / sqrt(d_k) achieve? Vaswani et al. (2017), section 3.2.1.

The paper suspects that dot products grow with d_k and push the softmax into regions with small
gradients. This study varies d_k from 8 to 256, with and without the scale. It measures the entropy
of the attention weights, the largest logit and the gradient of W_Q before the first step, and the
loss after 200 steps. The paper's argument assumes queries and keys of variance 1 at any d_k.
LeCun initialization satisfies this.

    python -m transformer sweep --config=experiments/findings/attention_scaling.py \
        --workdir=runs/attention_scaling
    python -m transformer compare runs/attention_scaling

At a larger scale (d_model 1024, 12 layers; TPU v5e-8):
--config=experiments/findings/attention_scaling.py:large

Hardware  two CPU cores, 36 runs, 16 minutes with --jobs=2 on a busy machine

Measured (two cores of an AMD EPYC 9005; three seeds; test/loss with its 95 % interval. The other
columns are measured before the first step: entropy and largest logit, both as means over heads and
layers, and the norm of the gradient of W_Q):

    scaled
    d_k        test/loss  entropy  largest logit  gradient
      8   5.099 +- 0.009     2.96            4.6      0.16
     16   5.091 +- 0.025     2.95            4.5      0.15
     32   5.057 +- 0.025     2.95            4.2      0.15
     64   5.054 +- 0.010     2.94            4.0      0.15
    128   5.023 +- 0.052     2.95            3.9      0.15
    256   5.024 +- 0.038     2.94            4.1      0.16

    unscaled
    d_k        test/loss  entropy  largest logit  gradient
      8   5.171 +- 0.020     1.87           13.7      0.34
     16   5.222 +- 0.035     1.31           18.7      0.44
     32   5.251 +- 0.015     0.90           25.1      0.56
     64   5.317 +- 0.052     0.63           34.1      0.71
    128   5.361 +- 0.055     0.45           47.2      1.04
    256   5.400 +- 0.108     0.34           67.0      1.29

As the paper suspects, logits without the scale grow, roughly as sqrt(d_k), and the softmax becomes
more peaked. After these 200 steps, this costs from 0.07 (d_k 8) to 0.38 nats (d_k 256). With the
scale, larger heads do not increase the loss.

Contrary to the paper, the gradient of W_Q does not become small. By itself, omitting the scale
would multiply the gradient by sqrt(d_k). Three quarters of that factor remain at d_k 8 and half at
256, so the gradient is two to eight times as large as with the scale.

Xavier initialization (--config.model.initializer=xavier_uniform, the same sweep) makes W_Q and
W_K smaller as d_k grows. Then nothing grows with d_k: without the scale, the largest logit is 15 to
25 and the entropy 0.9 to 1.4 at every d_k, and the loss is higher by 0.13 to 0.20 nats.
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
            vocab_size=32000,
            num_decoder_layers=12,
            d_model=1024,
            d_value=64,
            d_ff=4096,
            num_heads=16,
            max_length=512,
            dtype="bfloat16",
        )
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
        question="What does the scale 1 / sqrt(d_k) achieve?",
        baseline="scaled-d_head=64",
        declared={
            "parameters": "W_Q and W_K grow with d_k",
            "flops": "projections and the product of queries and keys grow with d_k",
        },
        seeds=3,
    )
