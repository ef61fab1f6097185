"""How far does a small decoder get on WikiText-2 in an hour on two CPU cores?

    python -m transformer train    --config=experiments/lm_small.py --workdir=runs/lm_small
    python -m transformer evaluate --workdir=runs/lm_small

Hardware  two CPU cores, an hour
Expected  at most 1.5 bits per byte on the test split
Measured  1.488 bits per byte, perplexity 226 per word; 1.531 and 265 with
          --config.data.eval_overlap=0, where sequences do not overlap. 22,000 steps at 6,800 tokens
          per second take 55 minutes. This run shared its two cores (AMD EPYC 9005) with other work
          and took 73. The final training loss is 2.81 nats per token, the final validation loss
          3.33: after seven epochs of 3.2 M tokens, the model begins to overfit.
Baselines on the test split, in bits per byte: xz conditioned on the training text 2.00, byte 6-gram
          (Witten-Bell) 2.12
"""

import ml_collections


def get_config():
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=8192,
        num_decoder_layers=4,
        d_model=256,
        d_ff=1024,
        num_heads=4,
        max_length=256,
        position="rotary",
        norm_placement="pre",
        norm="rmsnorm",
        activation="relu",
        use_bias=False,
        qk_norm=True,
        initializer="normal",
        residual_init_scale=True,
        scan_layers=False,
        dtype="bfloat16",
    )
    config.data = dict(
        corpus="wikitext2",
        objective="causal_lm",
        length=256,
        batch_size=4,
        eval_overlap=128,
    )
    config.optimizer = dict(
        name="adamw",
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=500,
        b1=0.9,
        b2=0.995,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train = dict(
        steps=22000,
        log_every=100,
        eval_every=2000,
        eval_batches=60,
        checkpoint_every=1000,
    )
    config.decoding = dict(temperature=0.8, top_p=0.95, max_extra=100)
    return config
