"""What in the base model matters? Vaswani et al. (2017), table 3, in small: heads (A), d_k (B), size (C), dropout (D), learned positions (E).

The paper (English-German, newstest2013, base 25.8 BLEU): (A) one head 0.9 BLEU worse, 32 heads 0.4 worse, 4 and 16 level; (B) smaller d_k
worse, 25.1 at 16; (C) bigger is better: 2 layers 23.7, 4 layers 25.3, d_model 256 24.5, 1024 26.0, d_ff 1024 25.4, 4096 26.2; (D) no dropout
24.6, no label smoothing 25.3; (E) learned positions level, 25.7.

    python -m transformer sweep --config=experiments/findings/vaswani_2017_table3.py --workdir=runs/table3
    python -m transformer compare runs/table3

At the paper's scale (WMT14, TPU v5e-8): --config=experiments/findings/vaswani_2017_table3.py:paper

Hardware  two CPU cores, about 90 minutes by estimate

Seen      not run yet.
"""

import ml_collections

from transformer import Sweep, arms

ARGUMENTS = ("small", "paper")
LAYERS = "model.num_encoder_layers", "model.num_decoder_layers"


def get_config(scale="small"):
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
        embedding_scale=True,
        dropout=0.1,
        attention_backend="reference",
    )
    config.data = dict(corpus="tatoeba_en_es", objective="seq2seq", length=64, batch_size=16)
    config.optimizer = dict(name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=200, clip_norm=1.0)
    config.train = dict(
        steps=1500, label_smoothing=0.1, log_every=50, eval_every=500, eval_batches=20, tensorboard=False, evaluators=("bleu_by_length",)
    )
    if scale == "paper":
        config.model.update(
            vocab_size=37000, num_encoder_layers=6, num_decoder_layers=6, d_model=512, d_ff=2048, num_heads=8, max_length=1024, norm_placement="post",
            attention_dropout=0.1, dtype="bfloat16",
        )  # fmt: skip
        wmt = {part: f"data/wmt14_en_de/{file}.tsv" for part, file in {"train": "train", "valid": "newstest2013", "test": "newstest2014"}.items()}
        config.data = dict(**wmt, objective="seq2seq", length=256, batch_size=96, tokenizer=dict(kind="bpe"))
        config.optimizer = dict(name="adamw", learning_rate=(512 * 4000) ** -0.5, schedule="inverse_sqrt", warmup_steps=4000)
        config.train.update(steps=100_000, log_every=100, eval_every=5000, checkpoint_every=5000)
        config.decoding = dict(beam_size=4)
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    base = get_config(scale)
    width, heads, layers, d_ff = base.model.d_model, base.model.num_heads, base.model.num_decoder_layers, base.model.d_ff
    of_heads = lambda count: {"model.num_heads": count, "model.d_head": width // count, "model.d_value": width // count}
    of_layers = lambda count: dict.fromkeys(LAYERS, count)
    return Sweep(
        arms(
            base={},
            A_1_head=of_heads(1),
            A_half_the_heads=of_heads(heads // 2),
            A_4_times_the_heads=of_heads(4 * heads),
            B_half_d_k={"model.d_head": width // heads // 2, "model.d_value": width // heads},
            B_quarter_d_k={"model.d_head": width // heads // 4, "model.d_value": width // heads},
            C_half_the_layers=of_layers(layers // 2),
            C_twice_the_layers=of_layers(2 * layers),
            C_half_d_model={"model.d_model": width // 2},
            C_half_d_ff={"model.d_ff": d_ff // 2},
            C_twice_d_ff={"model.d_ff": 2 * d_ff},
            D_no_dropout={"model.dropout": 0.0},
            D_twice_the_dropout={"model.dropout": 0.2},
            D_no_smoothing={"train.label_smoothing": 0.0},
            E_learned={"model.position": "learned"},
        ),
        question="What in the base model matters?",
        metric="test/bleu",
        declared={"parameters": "sizes differ, which is what is asked", "flops": "so do they in what they compute"},
        seeds=3,
    )
