r"""Which choices in the base model matter? Vaswani et al. (2017), table 3, at a small scale.

The paper varies the number of heads (A), d_k (B), model sizes (C), dropout and label smoothing (D),
and learned positions (E). The base model has a BLEU of 25.8 (English-German, newstest2013). (A) One
head is 0.9 worse, 32 heads are 0.4 worse, and 4 and 16 heads are as good. (B) A smaller d_k is
worse: 25.1 at 16. (C) Larger models are better: 23.7 with 2 layers and 25.3 with 4; 24.5 with
d_model 256 and 26.0 with 1024; 25.4 with d_ff 1024 and 26.2 with 4096. (D) 24.6 without dropout,
25.3 without label smoothing. (E) Learned positions are as good: 25.7.

    python -m transformer sweep --config=experiments/findings/vaswani_2017_table3.py \
        --workdir=runs/table3
    python -m transformer compare runs/table3

At the paper's scale (WMT14, TPU v5e-8): --config=experiments/findings/vaswani_2017_table3.py:paper

Hardware  two CPU cores, 45 runs, 2:13 hours with --jobs=2 on a busy machine

Measured (two cores of an AMD EPYC 9005; Tatoeba English-Spanish, 1,500 steps of 16 packed
sequences, in which each of 138,522 pairs occurs once; greedy decoding; mean and 95 % interval over
three seeds, p with Holm's correction for 14 comparisons):

         arm                  parameters  test/bleu    difference from base  p      test/loss
         base (4 heads of 32)  1,450,496  25.8 +- 1.2                               2.161 +- 0.015
    (A)  1 head of 128         1,450,496  25.4 +- 1.2  -0.35 [-0.84, +0.13]  0.71   2.198 +- 0.035
         2 heads of 64         1,450,496  25.6 +- 1.5  -0.2 [-1.4, +1.0]     1.00   2.173 +- 0.044
         16 heads of 8         1,450,496  25.9 +- 0.4  +0.08 [-0.75, +0.91]  1.00   2.175 +- 0.011
    (B)  d_k 16                1,351,424  25.3 +- 0.6  -0.49 [-1.16, +0.18]  0.71   2.182 +- 0.017
         d_k 8                 1,301,888  24.4 +- 0.4  -1.4 [-2.4, -0.4]     0.26   2.225 +- 0.006
    (C)  1 + 1 layers            987,648  24.4 +- 0.2  -1.4 [-2.8, -0.1]     0.42   2.291 +- 0.026
         4 + 4 layers          2,376,192  26.2 +- 2.0  +0.4 [-2.4, +3.3]     1.00   2.151 +- 0.023
         d_model 64              627,968  17.0 +- 0.3  -8.8 [-10.2, -7.4]    0.020  2.714 +- 0.045
         d_ff 256              1,187,328  25.8 +- 1.3  -0.04 [-0.79, +0.72]  1.00   2.216 +- 0.022
         d_ff 1024             1,976,832  26.2 +- 2.2  +0.4 [-3.0, +3.7]     1.00   2.119 +- 0.013
    (D)  no dropout            1,450,496  29.4 +- 1.4  +3.61 [+2.67, +4.55]  0.047  2.015 +- 0.021
         dropout 0.2           1,450,496  22.4 +- 0.7  -3.4 [-5.1, -1.7]     0.15   2.354 +- 0.023
         no label smoothing    1,450,496  27.0 +- 1.0  +1.18 [+0.64, +1.72]  0.13   2.068 +- 0.024
    (E)  learned positions     1,483,264  25.5 +- 0.8  -0.31 [-1.28, +0.67]  1.00   2.180 +- 0.012

By their means, (A), (B), (C) and (E) are ordered as in the paper: one head is 0.4 worse; d_k 16 and
8 are worse by 0.5 and 1.4; fewer layers and a smaller d_model are worse; more layers and a larger
d_ff are better; learned positions are about as good. But BLEU varies by half a point between seeds.
With three seeds and the correction for 14 comparisons, only half of d_model and no dropout have a
detectable difference from the base.

Unlike in the paper, four times as many heads (16) are not worse, and half of d_ff costs no BLEU
(though 0.06 nats). (D) is reversed: no dropout is 3.6 better, not 1.2 worse, and no label smoothing
is 1.2 better, not 0.5 worse. When each pair occurs once, there is little to regularize.
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
    config.optimizer = dict(
        name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=200, clip_norm=1.0
    )
    config.train = dict(
        steps=1500,
        label_smoothing=0.1,
        log_every=50,
        eval_every=500,
        eval_batches=20,
        tensorboard=False,
        evaluators=("bleu_by_length",),
    )
    if scale == "paper":
        config.model.update(
            vocab_size=37000, num_encoder_layers=6, num_decoder_layers=6, d_model=512, d_ff=2048,
            num_heads=8, max_length=1024, norm_placement="post", attention_dropout=0.1,
            dtype="bfloat16",
        )  # fmt: skip
        wmt = {
            part: f"data/wmt14_en_de/{file}.tsv"
            for part, file in {
                "train": "train",
                "valid": "newstest2013",
                "test": "newstest2014",
            }.items()
        }
        config.data = dict(
            **wmt, objective="seq2seq", length=256, batch_size=96, tokenizer=dict(kind="bpe")
        )
        config.optimizer = dict(
            name="adamw",
            learning_rate=(512 * 4000) ** -0.5,
            schedule="inverse_sqrt",
            warmup_steps=4000,
        )
        config.train.update(steps=100_000, log_every=100, eval_every=5000, checkpoint_every=5000)
        config.decoding = dict(beam_size=4)
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    base = get_config(scale)
    width, heads, layers, d_ff = (
        base.model.d_model,
        base.model.num_heads,
        base.model.num_decoder_layers,
        base.model.d_ff,
    )
    of_heads = lambda count: {
        "model.num_heads": count,
        "model.d_head": width // count,
        "model.d_value": width // count,
    }
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
        question="Which choices in the base model matter?",
        metric="test/bleu",
        declared={
            "parameters": "the arms vary the sizes of the model",
            "flops": "larger models compute more",
        },
        seeds=3,
    )
