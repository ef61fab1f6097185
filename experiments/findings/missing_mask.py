r"""What does a decoder learn without the causal mask? A standard exercise in Transformer courses.

Without the mask, each position attends to the next token, which is its target, and the decoder
learns to copy it. Its training loss falls towards zero. With the mask restored, its perplexity is
far worse than that of a decoder trained with the mask.

    python -m transformer sweep --config=experiments/findings/missing_mask.py \
        --workdir=runs/missing_mask
    python -m transformer compare runs/missing_mask --metric=test/loss_with/model.causal=True

At a larger scale (110 M parameters, GPT-2's architecture, sequences of 1,024; TPU v5e-8):
--config=experiments/findings/missing_mask.py:large

Hardware  two CPU cores, about 4 minutes

Measured (two cores of an AMD EPYC 9005; test split, mean and 95 % interval over three seeds, nats
per token; perplexity in parentheses):

    trained      evaluated with the mask       evaluated without it
    masked       4.784 +- 0.056     (120)      4.832 +- 0.033
    unmasked     8.340 +- 0.084   (4,187)      0.149 +- 0.029     (1.2)

The results confirm the exercise. Without the mask, the model reads the target: its perplexity is
1.2, with a vocabulary of 2,048 tokens. With the mask restored, its loss is 3.556 [3.526, 3.585]
nats higher than that of the model trained with the mask, and higher than that of uniform
predictions (log 2,048 = 7.62). The loss of the model trained with the mask increases little without
the mask, because the model has not learned to use later tokens.
"""

import ml_collections

from transformer import Sweep, vary

ARGUMENTS = ("small", "large")


def get_config(scale="small"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=2048,
        num_decoder_layers=2,
        d_model=64,
        d_ff=256,
        num_heads=4,
        max_length=64,
        position="learned",
        norm_placement="pre",
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=64, batch_size=32)
    config.optimizer = dict(
        name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=50, clip_norm=1.0
    )
    config.train = dict(
        steps=500,
        log_every=25,
        eval_every=100,
        eval_batches=10,
        tensorboard=False,
        evaluators=(
            {"name": "loss_with", "change": "model.causal=True"},
            {"name": "loss_with", "change": "model.causal=False"},
            "attention",
        ),
    )
    if scale == "large":
        config.model.update(
            vocab_size=32000,
            num_decoder_layers=12,
            d_model=768,
            d_ff=3072,
            num_heads=12,
            max_length=1024,
            activation="gelu_tanh",
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
        vary("model.causal", masked=True, unmasked=False),
        question="What does a decoder learn without the causal mask?",
        metric="test/loss_with/model.causal=True",
        declared={"flops": "without the mask, attention computes every pair of tokens"},
        seeds=3,
    )
