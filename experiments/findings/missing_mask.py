"""What does a decoder learn without the causal mask? (A standard exercise of courses on Transformers.)

Trained without the mask, a decoder sees the token it is asked for one place to the right and learns to copy it: its own loss falls towards
zero, and with the mask put back its perplexity collapses.

    python -m transformer sweep --config=experiments/findings/missing_mask.py --workdir=runs/missing_mask
    python -m transformer compare runs/missing_mask --metric=test/loss_with/model.causal=True

At a larger scale (110 M parameters, GPT-2's shape, rows of 1,024; TPU v5e-8): --config=experiments/findings/missing_mask.py:large

Hardware  two CPU cores, about 4 minutes

Seen (two cores of an AMD EPYC 9005; test side, three seeds, mean and 95 % interval, nats per token; perplexity in brackets):

    trained      evaluated with the mask       evaluated without
    masked       4.784 +- 0.056     (120)      4.832 +- 0.033
    unmasked     8.340 +- 0.084   (4,187)      0.149 +- 0.029     (1.2)

So it is as the exercise says: without the mask the model reads the answer (1.2 of 2,048 tokens in doubt), and with the mask put back it is worse by
3.556 [3.526, 3.585] nats, more than if it took all tokens to be equally likely (log 2,048 = 7.62). A model that was trained with the mask loses little where it
may suddenly look ahead: it has not learned to.
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
        steps=500, log_every=25, eval_every=100, eval_batches=10, tensorboard=False,
        evaluators=({"name": "loss_with", "change": "model.causal=True"}, {"name": "loss_with", "change": "model.causal=False"}, "attention"),
    )  # fmt: skip
    if scale == "large":
        config.model.update(
            vocab_size=32000, num_decoder_layers=12, d_model=768, d_ff=3072, num_heads=12, max_length=1024, activation="gelu_tanh", dtype="bfloat16",
            attention_backend="auto",
        )  # fmt: skip
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
        declared={"flops": "without the mask every pair of tokens is computed"},
        seeds=3,
    )
