"""Which position schemes read on in rows longer than those they were trained on? Press et al. (2022), "Train Short, Test Long"; Kazemnejad et
al. (2023), "The Impact of Positional Encoding on Length Generalization in Transformers".

The papers: trained at T and evaluated up to 16 T, learned tables end, sinusoids collapse at once, rotary degrades, T5's bias holds a while,
ALiBi stays flat. No positions at all work in a decoder, whose causal mask lets it count, and read on better than rotary.

    python -m transformer sweep --config=experiments/findings/press_2022.py --workdir=runs/press_2022
    python -m transformer compare runs/press_2022

At the paper's scale (WikiText-103, 16 layers of d_model 1024, rows of 512; TPU v5e-16): --config=experiments/findings/press_2022.py:paper

Hardware  two CPU cores, about 45 minutes by estimate

Seen      not run yet.
"""

import ml_collections

from transformer import Sweep, vary

ARGUMENTS = ("small", "paper")


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
        name="adamw", learning_rate=2e-3, schedule="cosine", warmup_steps=100, weight_decay=0.1, clip_norm=1.0
    )
    config.train = dict(
        steps=1000, log_every=50, eval_every=250, eval_batches=10, tensorboard=False, evaluators=(dict(name="extrapolation", times=16),)
    )
    if scale == "paper":
        config.model.update(
            vocab_size=32000, num_decoder_layers=16, d_model=1024, d_ff=4096, num_heads=8, max_length=512, dropout=0.1, dtype="bfloat16",
            attention_backend="auto",
        )  # fmt: skip
        wikitext103 = {part: f"data/wikitext103/{part}.jsonl" for part in ("train", "valid", "test")}
        config.data = dict(**wikitext103, format="jsonl", objective="causal_lm", length=512, batch_size=128)
        config.optimizer.update(learning_rate=5e-4, warmup_steps=4000)
        config.train.update(steps=50_000, eval_every=5000, checkpoint_every=5000)
        config.mesh = dict(fsdp=-1, data=1)
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    return Sweep(
        vary("model.position", "alibi", "t5", "rotary", "none", "sinusoidal", "learned"),
        question="Which position schemes read on in rows longer than those they were trained on?",
        declared={"parameters": "a learned table has a vector for each place, T5's bias a number for each bucket and head"}
        | ({"attention": "T5's bias has no fused kernel"} if scale == "paper" else {}),
        seeds=3,
    )
