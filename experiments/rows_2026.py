"""Which recent changes to the residual stream, positions and attention help?

Each arm is the baseline with one published change. The baseline is a pre-norm decoder with rotary
positions. All arms have the same number of parameters (by d_ff), and each is trained at its own
best learning rate.

    python -m transformer sweep --config=experiments/rows_2026.py --workdir=runs/rows_2026
    python -m transformer compare runs/rows_2026

At the scale of a publication (TPU v5e-16): --config=experiments/rows_2026.py:paper

Hardware  two CPU cores, 220 runs, about 95 minutes

Measured (two cores of an AMD EPYC 9004; WikiText-2, 525,000 parameters, 300 steps of 512 tokens;
three seeds). Rate: the arm's best learning rate. Difference: its test loss minus the baseline's
(5.126 +- 0.056 nats, rate 0.01), with a 95 % interval. p is corrected for 18 arms by Holm's method
(*: below 0.05). Claims are differences in loss or perplexity (PPL) from a pre-norm baseline, except
where noted:

    arm                  rate    difference              p       claim of the paper
    layer_scale          0.023   -0.341 [-0.425, -0.258] 0.045*  made for deep vision models (CaiT)
    hyper_connections    0.03    -0.31 [-0.47, -0.15]    0.17    OLMo-1B: loss 2.811 -> 2.781
    forgetting           0.016   -0.294 [-0.325, -0.264] 0.010*  better than rotary positions at and
                                                                 beyond the training length
    attention_residuals  0.014   -0.284 [-0.301, -0.268] 0.003*  loss 1.766 -> 1.737
    resi_dual            0.03    -0.184 [-0.277, -0.092] 0.17    better than post-norm in
                                                                 translation; OLMo-1B: 2.811 ->
                                                                 2.825 (Zhu et al. 2024)
    value_residual       0.016   -0.18 [-0.29, -0.08]    0.20    82M: loss 2.739 -> 2.712
    mhc                  0.016   -0.123 [-0.219, -0.026] 0.25    loss 1.766 -> 1.747 (in the paper
                                                                 of attention residuals)
    gate                 0.013   -0.117 [-0.129, -0.105] 0.010*  1.7B: PPL 7.499 -> 7.404
    relu_squared         0.011   -0.068 [-0.109, -0.028] 0.20    So et al. 2021 (Primer): less
                                                                 compute for the same loss
    pope                 0.012   -0.044 [-0.142, +0.053] 1.00    124M: PPL 21.55 -> 21.33 against
                                                                 rotary positions
    peri                 0.012   -0.04 [-0.15, +0.07]    1.00    Kim et al. 2025: more stable at
                                                                 large scale
    keel                 0.017   -0.03 [-0.27, +0.22]    1.00    +1.2 to +3.8 points of accuracy in
                                                                 64 to 1,024 layers; little on small
                                                                 data
    p_rope               0.01    +0.008 [-0.026, +0.042] 1.00    Gemma-2B: PPL 4.4627 -> 4.4414
                                                                 against rotary positions
    mix_ln               0.0055  +0.03 [-0.29, +0.34]    1.00    Li et al. 2024: lower PPL from 71M
                                                                 to 7B
    differential         0.0093  +0.03 [-0.08, +0.13]    1.00    6.8B matches an 11B Transformer
    canon                0.012   +0.05 [-0.05, +0.15]    1.00    more depth of reasoning, e.g. twice
    siamese_norm         0.013   +0.08 [-0.04, +0.19]    0.69    1.3B: PPL 10.84 -> 10.43
    dynamic_tanh         0.0031  +0.59 [+0.23, +0.94]    0.20    as good as a norm
    hybrid_norm          0.0013  +0.64 [+0.49, +0.80]    0.045*  7B: loss 2.469 -> 2.430

Canon layers were measured later, beside a baseline of their own on an Intel Xeon (5.130 +- 0.049),
and their p is corrected for 19 arms.

Layer scale, attention residuals, forgetting and the output gate are better than the baseline, and
HybridNorm is worse. For six more arms, the interval excludes zero, but three seeds do not establish
a difference after the correction. At the file's rate of 0.01, forgetting and the gate are not
detectably better, and mix_ln is 0.37 [0.07, 0.66] nats worse. Tuning gains 0.34 nats for mix_ln,
and less than 0.1 for each other arm. The papers measured larger models on more text. Such short
training favors changes that speed up its start, and says nothing about stability in deep models.
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
            canon={"model.canon": "ABCD"},
        ),
        question="Which recent changes help a tuned pre-norm decoder of equal size?",
        match="parameters",
        declared={"flops": "arms have equally many parameters instead"},
        tune=tuned("optimizer.learning_rate", low, high, points=4, more=1),
        seeds=3,
    )
