"""Does the ranking of norm placements survive tuning?

A comparison at one learning rate favors the arms that it suits. Here each placement, at 4 and at 12
layers, is trained with its own best warm-up and learning rate, and again at common settings.

    python -m transformer sweep --config=experiments/findings/tuned_placements.py \
        --workdir=runs/tuned_placements
    python -m transformer compare runs/tuned_placements

The warm-up is tuned first: with a short warm-up, post-norm trains only at small learning rates
(experiments/stability.py). At the scale of a publication (TPU v5e-16):
--config=experiments/findings/tuned_placements.py:paper

Hardware  two CPU cores, 150 runs
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
