"""How good is an English-Spanish translator after a few minutes of training?

    python -m transformer train    --config=experiments/quickstart.py --workdir=runs/quickstart
    python -m transformer evaluate --workdir=runs/quickstart
    python -m transformer generate --workdir=runs/quickstart --interactive

Hardware  two CPU cores, 7 minutes
"""

import ml_collections


def get_config():
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="encoder_decoder",
        vocab_size=4096,
        num_encoder_layers=2,
        num_decoder_layers=2,
        d_model=128,
        d_ff=512,
        num_heads=4,
        max_length=128,
        position="sinusoidal",
        norm_placement="pre",
        activation="relu",
        embedding_scale=True,
        dropout=0.1,
        scan_layers=False,  # with two layers, unrolled is a little faster on a CPU
    )
    config.data = dict(
        corpus="tatoeba_en_es",
        objective="seq2seq",
        length=64,
        batch_size=16,
    )
    config.optimizer = dict(
        name="adamw",
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=400,
        clip_norm=1.0,
    )
    config.train = dict(
        steps=5000,
        label_smoothing=0.1,
        ema_decay=0.998,
        log_every=50,
        eval_every=1000,
        checkpoint_every=2500,
    )
    config.decoding = dict(beam_size=4, length_penalty=0.6)
    return config
