"""Which changes of 2024 to 2026 to the residual stream, positions and attention help?

One row of a table of papers is one arm: the baseline with a single change. The baseline is a
pre-norm decoder with rotary positions. All arms have as many parameters as it (by d_ff), and each
has its own best learning rate.

    python -m transformer sweep --config=experiments/rows_2026.py --workdir=runs/rows_2026
    python -m transformer compare runs/rows_2026

At the scale of a publication (TPU v5e-16): --config=experiments/rows_2026.py:paper

Hardware  two CPU cores, 209 runs

What the papers claim, as a difference in loss or perplexity (PPL) from a pre-norm baseline, except
where noted. They measured larger models on more text, so a small study need not agree:

    peri                 Kim et al. 2025: trains more stably at large scale
    keel                 +1.2 to +3.8 points of accuracy in 64 to 1,024 layers; little on small data
    hybrid_norm          7B: loss 2.469 -> 2.430
    mix_ln               Li et al. 2024: lower perplexity from 71M to 7B
    resi_dual            better than post-norm in translation; in OLMo-1B worse than pre-norm, 2.825
                         against 2.811 (Zhu et al. 2024)
    siamese_norm         1.3B: PPL 10.84 -> 10.43
    attention_residuals  loss 1.766 -> 1.737
    hyper_connections    OLMo-1B: loss 2.811 -> 2.781
    mhc                  loss 1.766 -> 1.747 (in the paper of attention residuals)
    value_residual       82M: loss 2.739 -> 2.712
    layer_scale          made for deep vision models (CaiT)
    dynamic_tanh         as good as a norm
    pope                 124M: PPL 21.55 -> 21.33 against rotary positions
    p_rope               Gemma-2B: PPL 4.4627 -> 4.4414 against rotary positions
    forgetting           better than rotary positions at and beyond the training length
    differential         6.8B matches an 11B Transformer
    gate                 1.7B: PPL 7.499 -> 7.404
    relu_squared         So et al. 2021 (Primer): less compute for the same loss
"""

import ml_collections

from transformer import Sweep, arms, tuned

ARGUMENTS = ("small", "paper")


def get_config(scale="small"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=2048,
        num_decoder_layers=8,
        d_model=64,
        d_ff=256,
        num_heads=4,
        max_length=64,
        position="rotary",
        norm_placement="pre",
        norm="rmsnorm",
        activation="gelu",
        use_bias=False,
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=64, batch_size=8)
    config.optimizer = dict(
        name="adamw", learning_rate=1e-2, schedule="cosine", warmup_steps=50, weight_decay=0.1
    )
    config.train = dict(steps=300, log_every=20, eval_every=100, eval_batches=40, tensorboard=False)
    if scale == "paper":
        config.model.update(
            vocab_size=32000, num_decoder_layers=24, d_model=1024, d_ff=4096, num_heads=16,
            max_length=2048, dtype="bfloat16", remat="full", attention_backend="auto",
        )  # fmt: skip
        config.data = dict(
            train="data/fineweb/train.txt",
            valid="data/fineweb/valid.txt",
            test="data/fineweb/test.txt",
            format="text",
            objective="causal_lm",
            length=2048,
            batch_size=256,
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
    low, high = {"small": (1e-3, 3e-2), "paper": (2e-4, 6e-3)}[scale]
    placement = lambda name: {"model.norm_placement": name}
    normed = {"model.qk_norm": True, "model.v_norm": True}
    p_rope = {"name": "rotary", "scaling": {"name": "proportional", "share": 0.75}}
    names = "peri", "keel", "mix_ln", "resi_dual", "siamese_norm", "attention_residuals"
    return Sweep(
        arms(
            baseline={},
            **{name: placement(name) for name in (*names, "hyper_connections", "mhc")},
            hybrid_norm=placement("hybrid_norm") | normed,
            layer_scale=placement({"name": "pre", "layer_scale": 0.1}),
            dynamic_tanh={"model.norm": "dynamic_tanh"},
            value_residual={"model.value_residual": "fixed"},
            pope={"model.position": "pope"},
            p_rope={"model.position": p_rope},
            forgetting={"model.mixer": "forgetting", "model.position": "none"},
            differential={"model.mixer": "differential"},
            gate={"model.attention_gate": "elementwise"},
            relu_squared={"model.activation": "relu_squared"},
        ),
        question="Which changes of 2024 to 2026 help a tuned pre-norm decoder of equal size?",
        match="parameters",
        declared={"flops": "arms have equally many parameters instead"},
        tune=tuned("optimizer.learning_rate", low, high, points=4, more=1),
        seeds=3,
    )
