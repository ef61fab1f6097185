r"""How much compute does each norm placement or position scheme need, and does scale change it?

A ladder trains decoders of four sizes (N from 25 to 250 thousand parameters outside the embeddings)
with three seeds. The arms are pre-, post- and peri-norm, or rotary positions, ALiBi and sinusoidal
position embeddings. One run per size and seed decays its learning rate after 5, 10 and 20 tokens
per parameter (WSD-S) and is evaluated there. Laws L(N, D) are fitted to the three smaller sizes,
and predict the loss of the largest. The result is the compute multiplier of each arm against the
first, with its interval.

    python -m transformer sweep --config=experiments/findings/ladders.py:placements \
        --workdir=runs/ladder_placements
    python -m transformer compare runs/ladder_placements

The same for positions: --config=experiments/findings/ladders.py:positions

At a larger scale (six sizes from 10 to 300 million parameters; H100 or TPU v5e-8):
--config=experiments/findings/ladders.py:paper_placements and
--config=experiments/findings/ladders.py:paper_positions

On a slice (six sizes from 85 million to 2.9 billion parameters, up to 1.1e21 FLOPs per run; TPU
v5p-64): --config=experiments/findings/ladders.py:slice_placements and
--config=experiments/findings/ladders.py:slice_positions

    python -m transformer plan --config=experiments/findings/ladders.py:slice_placements \
        --topology=v5p-64 --arms --price=4.2

              step, seconds        MFU at most             chip-hours of a run
              pre, post, peri      pre, post, peri         pre, post, peri
        XS    0.102, 0.108, 0.108  54.1 %, 51.4 %, 51.0 %   1.5,  1.5,  1.6
        S     0.179, 0.185, 0.187  64.2 %, 62.1 %, 61.6 %   6.1,  6.3,  6.4
        M     0.301, 0.322, 0.322  78.9 %, 73.6 %, 73.6 %    23,   25,   25
        L     0.625, 0.673, 0.673  79.3 %, 73.7 %, 73.7 %   107,  115,  115
        XL    1.13,  1.22,  1.22   79.6 %, 73.7 %, 73.7 %   361,  390,  390
        XXL   1.72,  1.86,  1.86   79.9 %, 73.9 %, 73.9 %   859,  929,  929

    All 54 runs take at least 12,870 chip-hours, which cost 54,052 at 4.2 per chip-hour. This was
    planned, not run (libtpu 0.0.42.1, jax 0.10.2).

Text      WikiText-2 by characters: about 10.9 million unique tokens. The largest model reads 4.9
          million of them, so no token is read twice. The larger variants need up to 6 and 59
          billion tokens: give them a larger text with --config.data.train.
Rule      learning rate 3e-3 (N / 1e5)^(-1/3), the same for all arms. It is not tuned for each arm,
          so the multipliers hold only for this rule.
Hardware  two CPU cores, 36 runs for each question: two to three hours (the machine did other work)

Measured for placements (test loss in nats per character, mean +/- half of the 95 % interval):

            XS               S                M                L
    pre     2.268 +/- 0.049  1.994 +/- 0.031  1.774 +/- 0.037  1.574 +/- 0.006
    post    2.193 +/- 0.023  1.958 +/- 0.006  1.771 +/- 0.034  1.584 +/- 0.017
    peri    2.295 +/- 0.036  1.999 +/- 0.043  1.792 +/- 0.019  1.576 +/- 0.032

The multipliers are unidentified: the fits of all three arms end at a bound (E or alpha), because
over these sizes the loss is nearly a power law without a floor. Scale changes the answer. Post-norm
is better by 0.07 at XS, and no placement is better at L. Of nine pairs of runs, 3 at XS, 2 at S and
6 at M rank two arms as the means at L do.

Measured for positions:

                XS               S                M                L
    rotary      2.268 +/- 0.049  1.994 +/- 0.031  1.774 +/- 0.037  1.574 +/- 0.006
    alibi       2.300 +/- 0.040  1.988 +/- 0.016  1.804 +/- 0.020  1.608 +/- 0.011
    sinusoidal  2.514 +/- 0.033  2.279 +/- 0.073  2.004 +/- 0.035  1.698 +/- 0.017

Averaged over the sizes, ALiBi is worse than rotary by 0.022 [0.000, 0.044], and sinusoidal by
0.2212 [0.2197, 0.2227]. Here, too, the fits of all three arms end at a bound. The budget matters:
after 5 tokens per parameter, ALiBi has a lower validation loss than rotary at XS, S and M (S: 2.32
and 2.44), and a higher one after 20 (M: 1.80 and 1.77). Without a law: for a loss of 2.00,
sinusoidal needs 1.9e12 FLOPs (M) and rotary 5.4e11 (S). At L, sinusoidal reaches 1.69 with 8.7e12
FLOPs, and rotary 1.70 with half of them. Of nine pairs of runs, 8 at XS, 7 at S and 9 at M rank two
arms as the means at L do.
"""

import ml_collections

from transformer import arms, ladder, vary

AXES = ("placements", "positions")
ARGUMENTS = tuple(f"{scale}{axis}" for scale in ("", "paper_", "slice_") for axis in AXES)


def get_config(ladder="placements"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=128,
        d_model=32,
        d_head=8,
        num_heads=4,
        num_decoder_layers=2,
        max_length=128,
        position="rotary",
        norm_placement="pre",
        norm="rmsnorm",
        use_bias=False,
        attention_backend="reference",
    )
    config.data = dict(
        corpus="wikitext2",
        objective="causal_lm",
        length=128,
        batch_size=16,
        tokenizer=dict(kind="char"),
    )
    config.optimizer = dict(
        name="adamw", schedule="wsd", b2=0.98, weight_decay=0.1, clip_norm=1.0, decay_fraction=0.1
    )
    config.train = dict(log_every=20, eval_batches=64, tensorboard=False)
    if ladder not in AXES:
        config.model.update(
            vocab_size=32768,
            d_model=256,
            d_head=64,
            max_length=1024,
            attention_backend="auto",
            dtype="bfloat16",
        )
        config.data.update(length=1024, batch_size=256)
        config.data.tokenizer = dict(kind="bpe")
        config.platform = "accelerator"
    if ladder.startswith("slice"):
        config.model.update(d_model=768, max_length=2048, remat="full")
        config.data.update(length=2048, batch_size=512)
        config.mesh = dict(fsdp=-1, data=1)
    return config


def sweep(name="placements"):
    scale, _, axis = name.rpartition("_")
    shapes = dict(XS=(32, 2), S=(40, 3), M=(48, 4), L=(64, 5))  # d_model, layers
    at_unit = 3e-3 * 1e5 ** (1 / 3)
    if scale == "paper":
        shapes = dict(
            XS=(320, 8), S=(448, 10), M=(576, 14), L=(768, 16), XL=(1024, 16), XXL=(1152, 19)
        )
    elif scale == "slice":
        shapes = dict(
            XS=(768, 12), S=(1024, 16), M=(1536, 16), L=(2048, 20), XL=(2560, 24), XXL=(3072, 26)
        )
    if scale:
        at_unit = 0.5 * 0.0047 * 108e6 ** (1 / 3)  # OLMo's ladder
    head = get_config(name).model.d_head
    sizes = {
        name: {
            "model.d_model": width,
            "model.num_heads": width // head,
            "model.num_decoder_layers": depth,
        }
        for name, (width, depth) in shapes.items()
    }
    varied, declared = {
        "placements": (
            vary("model.norm_placement", "pre", "post", "peri"),
            {"parameters": "post-norm has no final norm; peri-norm has two norms a sublayer"},
        ),
        "positions": (vary("model.position", "rotary", "alibi", "sinusoidal"), {}),
    }[axis]
    return ladder(
        get_config(name),
        varied,
        arms(**sizes),
        budgets=(5, 10, 20),
        rules={"optimizer.learning_rate": lambda N: float(f"{at_unit * N ** (-1 / 3):.3g}")},
        question=f"How much compute does each of these {axis} need for equal loss?",
        declared=declared,
        seeds=3,
    )
