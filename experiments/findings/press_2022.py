r"""Which position schemes extrapolate beyond the training length? Press et al. (2022).

The papers are "Train Short, Test Long" and Kazemnejad et al. (2023), "The Impact of Positional
Encoding on Length Generalization in Transformers". They train models at length T and evaluate them
at lengths up to 16 T. Learned tables end at T, sinusoidal embeddings fail at once, rotary
degrades, T5's bias holds for a while, and ALiBi stays flat. A decoder also works without a position
scheme, because its causal mask lets it count tokens, and it extrapolates better than rotary.

    python -m transformer sweep --config=experiments/findings/press_2022.py \
        --workdir=runs/press_2022
    python -m transformer compare runs/press_2022

At the paper's scale (WikiText-103, 16 layers of d_model 1024, sequences of 512; TPU v5e-16):
--config=experiments/findings/press_2022.py:paper

Hardware  two CPU cores, about an hour with --jobs=2

Measured (two cores of an AMD EPYC 9005, 1:57 hours on a busy machine; nats per token, mean and 95 %
interval over three seeds; sequences that do not overlap, from the first 65,536 tokens of the test
split):

    length               64              128              256              512            1,024
    rotary      3.826 +- 0.037   3.866 +- 0.024   4.000 +- 0.024   4.181 +- 0.059   4.366 +- 0.069
    alibi       3.912 +- 0.017   3.900 +- 0.018   3.895 +- 0.017   3.893 +- 0.016   3.891 +- 0.015
    t5          3.958 +- 0.016   4.006 +- 0.018   4.109 +- 0.019   4.208 +- 0.024   4.278 +- 0.029
    sinusoidal  3.987 +- 0.029   4.304 +- 0.019   4.507 +- 0.024   4.621 +- 0.014   4.667 +- 0.051
    none        4.121 +- 0.014   4.154 +- 0.012   4.203 +- 0.007   4.251 +- 0.001   4.287 +- 0.012
    learned     cannot be evaluated beyond 64: its table ends

    test/loss at length 64: rotary 3.892, alibi 3.980, t5 4.021, sinusoidal 4.053, learned 4.160,
    none 4.181

    loss of only the last 64 tokens of each sequence; the tokens before them are context
    length                  128              256              512            1,024
    rotary       3.907 +- 0.011   4.187 +- 0.066   4.43  +- 0.12    4.617 +- 0.054
    alibi        3.888 +- 0.018   3.890 +- 0.017   3.891 +- 0.016   3.891 +- 0.016
    t5           4.053 +- 0.019   4.244 +- 0.024   4.333 +- 0.032   4.369 +- 0.034
    sinusoidal   4.620 +- 0.016   4.719 +- 0.030   4.746 +- 0.060   4.727 +- 0.056
    none         4.186 +- 0.008   4.265 +- 0.003   4.311 +- 0.016   4.337 +- 0.029

The results confirm the papers. ALiBi stays flat, and even improves by 0.02, since fewer tokens are
at the beginning of a sequence. The loss of the others increases at twice and at sixteen times the
training length: T5's bias by 0.05 and 0.32, rotary by 0.04 and 0.54, sinusoidal by 0.32 already at
twice the length. Apart from ALiBi, the model without positions has the smallest increase at sixteen
times the length (0.17). It extrapolates better than rotary, though from a higher loss. At the
training length, rotary is best, 0.088 [0.078, 0.098] ahead of ALiBi.

Unlike in Press et al., ALiBi's loss does not fall further with more context: a model of 1.1 M
parameters does not use context beyond 64 tokens.
"""

import ml_collections

from transformer import Sweep, arms, chain, vary

ARGUMENTS = ("small", "paper")

WITHIN_ITS_TABLE = {"name": "extrapolation", "times": 1}
"""The evaluator for a learned table, which ends at the training length."""


def get_config(scale="small"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=2048,
        num_decoder_layers=4,
        d_model=128,
        d_ff=512,
        num_heads=4,
        max_length=64,
        position="alibi",
        norm_placement="pre",
        embedding_scale=True,
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=64, batch_size=32)
    config.optimizer = dict(
        name="adamw",
        learning_rate=2e-3,
        schedule="cosine",
        warmup_steps=100,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train = dict(
        steps=1000,
        log_every=50,
        eval_every=250,
        eval_batches=10,
        tensorboard=False,
        evaluators=(dict(name="extrapolation", times=16),),
    )
    if scale == "paper":
        config.model.update(
            vocab_size=32000,
            num_decoder_layers=16,
            d_model=1024,
            d_ff=4096,
            num_heads=8,
            max_length=512,
            dropout=0.1,
            dtype="bfloat16",
            attention_backend="auto",
        )
        wikitext103 = {
            part: f"data/wikitext103/{part}.jsonl" for part in ("train", "valid", "test")
        }
        config.data = dict(
            **wikitext103, format="jsonl", objective="causal_lm", length=512, batch_size=128
        )
        config.optimizer.update(learning_rate=5e-4, warmup_steps=4000)
        config.train.update(steps=50_000, eval_every=5000, checkpoint_every=5000)
        config.mesh = dict(fsdp=-1, data=1)
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    return Sweep(
        chain(
            vary("model.position", "alibi", "t5", "rotary", "none", "sinusoidal"),
            arms(learned={"model.position": "learned", "train.evaluators": (WITHIN_ITS_TABLE,)}),
        ),
        question="Which position schemes extrapolate beyond the training length?",
        seeds=3,
    )
