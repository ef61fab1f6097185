"""Does the best learning rate carry over to other widths and depths, for each norm placement?

In the standard parametrization, the best learning rate depends on the size of the model. muP (Yang
et al. 2022) carries it over to other widths, and CompleteP (Dey et al. 2025) to other depths. Both
were published for pre-norm. Here each combination of size, parametrization and placement is tuned.
The report states the slope of log2(best learning rate) against log2(size): 0 means that the rate
transfers. The standard parametrization is the control, whose slope should not be 0.

    python -m transformer sweep --config=experiments/findings/transfer.py:width \
        --workdir=runs/transfer_width
    python -m transformer compare runs/transfer_width

The same for depth: --config=experiments/findings/transfer.py:depth

The models have heads of size 16, as in experiments/benchmarks/coordinates.py, which checks that the
changes of activations do not depend on the size. At a larger scale (TPU v5e-16):
--config=experiments/findings/transfer.py:paper_width and
--config=experiments/findings/transfer.py:paper_depth

Hardware  two CPU cores, 320 runs (width) and 360 runs (depth)

Measured for width (two cores of an AMD EPYC; 300 steps of 1,024 tokens; one seed; slope with its
95 % interval over the widths; best learning rate, and test/loss at it, by d_model):

                        slope                 best rate (32, 64, 128, 256)    test/loss
    pre       standard  -0.81 [-1.00, -0.62]  0.016  0.010  0.0050 0.0031  5.00 4.86 4.76 4.70
              muP       -0.08 [-0.55, +0.39]  0.016  0.019  0.013  0.015   5.00 4.88 4.87 4.77
    post      standard  -0.51 [-1.42, +0.40]  0.0040 0.0052 0.0023 0.0016  5.01 4.72 4.71 4.52
              muP       +0.11 [-0.27, +0.50]  0.0040 0.0055 0.0055 0.0052  5.01 4.80 4.85 4.81
    peri      standard  -0.96 [-2.04, +0.12]  0.064* 0.011  0.0051 0.0029  4.83 4.82 4.71 4.65
              muP       -0.08 [-1.99, +1.83]  0.064* 0.019  0.015  0.017   4.83 4.86 4.84 4.82
    deepnorm  standard  -0.60 [-1.23, +0.03]  0.016  0.0074 0.0074 0.0040  4.68 4.40 5.85 4.22
              muP       -0.16 [-1.17, +0.84]  0.016  0.008  0.008  0.011   4.68 4.51 4.51 4.31

    * not bracketed, and not part of the slope

With muP, the best rate at d_model 256 is that at 64 within a factor of 1.4, under all placements.
In the standard parametrization, it is smaller by factors of 1.9 to 3.8. The slope of muP is nearer
to 0 under each placement, by 0.67 [0.37, 0.96] on average over the four. With three or four widths
and one seed, only the slope of pre-norm in the standard parametrization differs from 0 by itself.
At d_model 256, each tuned by itself, muP has the higher loss: by 0.07 (pre), 0.28 (post), 0.17
(peri) and 0.09 (deepnorm). With deepnorm in the standard parametrization at d_model 128, the best
rate of the tuning seed does not train with the seed of the comparison: 5.85 is the loss of a
unigram model.

Measured for depth, with width 64 (two cores of an Intel Xeon, and of an AMD EPYC for post and
deepnorm with CompleteP; otherwise as above; 2 layers are the base, where all parametrizations are
equal, but processors round differently):

                             slope                 best rate (2, 4, 8)     test/loss
    pre       standard       -0.18 [-0.54, +0.18]  0.011  0.0094 0.0086    4.76 4.84 4.95
              CompleteP 1/2  +0.22 [-0.50, +0.94]  0.011  0.012  0.015     4.76 4.78 4.81
              CompleteP 1    -0.13 [-1.31, +1.05]  0.011  0.009  0.0092    4.76 4.77 4.70
    post      standard       -1.72 [-6.30, +2.86]  0.012  0.0056 0.0011    4.47 4.76 5.67
              CompleteP 1/2  -0.50 [-4.85, +3.85]  0.015  0.016  0.0075    4.67 5.85 4.58
              CompleteP 1    -0.22 [-2.87, +2.43]  0.015  0.010  0.011     4.67 4.40 4.46
    peri      standard       -0.48 [-2.37, +1.41]  0.014  0.012  0.0072    4.67 4.81 4.89
              CompleteP 1/2  +0.10 [-0.61, +0.80]  0.014  0.016  0.016     4.67 4.75 4.79
              CompleteP 1    not identified        0.014  0.064* 0.064*    4.67 4.63 4.60
    deepnorm  standard       -1.04 [-2.33, +0.25]  0.017  0.0073 0.004     4.38 4.41 4.53
              CompleteP 1/2  +0.00 [-2.05, +2.05]  0.017  0.014  0.017     4.38 4.33 4.32
              CompleteP 1    -0.25 [-1.45, +0.95]  0.017  0.016  0.012     4.38 4.38 5.86

From 2 to 8 layers, the best rate falls by a factor of 11 (post), 4.2 (deepnorm), 1.9 (peri) and 1.3
(pre) in the standard parametrization. With CompleteP it changes by a factor of 2.0 at most, except
for peri-norm with alpha = 1, whose best rate is above the range. The slope with alpha = 1/2 is
larger than in the standard parametrization under each placement, by 0.81 [0.20, 1.42] on average
over the four. With three depths and one seed, no slope differs from 0 by itself. At 8 layers, the
loss with CompleteP is lower: by 0.14 and 0.25 (pre; alpha = 1/2 and 1), 0.09 and 0.29 (peri) and
0.21 (deepnorm; alpha = 1/2). Losses of 5.67 or more are those of runs that did not train with the
seed of the comparison, at the best rate of the tuning seed: two of the six arms of post-norm and
deepnorm at 8 layers, and one at 4. Which alpha transfers better is not decided here.
"""

import ml_collections

from transformer import Sweep, product, tuned, vary, zipped

ARGUMENTS = ("width", "depth", "paper_width", "paper_depth")
WIDTHS, DEPTHS = {"": (32, 64, 128, 256), "paper": (256, 512, 1024, 2048)}, (2, 4, 8)
HEAD = {"": 16, "paper": 64}


def get_config(axis="width"):
    scale, _, axis = axis.rpartition("_")
    width = {"width": WIDTHS[scale][0], "depth": WIDTHS[scale][1]}[axis]
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=2048,
        num_decoder_layers=4,
        d_model=width,
        num_heads=width // HEAD[scale],
        max_length=64,
        position="rotary",
        norm_placement="pre",
        tie_embeddings=False,
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=64, batch_size=16)
    config.optimizer = dict(
        name="adamw", learning_rate=4e-3, schedule="cosine", warmup_steps=100, epsilon=1e-12
    )
    config.train = dict(steps=300, log_every=20, eval_every=100, eval_batches=40, tensorboard=False)
    if scale:
        config.model.update(
            vocab_size=32000, max_length=1024, dtype="bfloat16", remat="full",
            attention_backend="auto",
        )  # fmt: skip
        config.data = dict(
            train="data/fineweb/train.txt",
            valid="data/fineweb/valid.txt",
            test="data/fineweb/test.txt",
            format="text",
            objective="causal_lm",
            length=1024,
            batch_size=256,
            tokenizer=dict(kind="bpe"),
        )
        config.optimizer.update(warmup_steps=500)
        config.train.update(
            steps=5000, log_every=100, eval_every=1000, checkpoint_every=1000, eval_batches=40
        )
        config.mesh = dict(fsdp=-1, data=1)
        config.platform = "accelerator"
    return config


def sweep(axis="width"):
    scale, _, axis = axis.rpartition("_")
    widths = WIDTHS[scale]
    sizes, rules = {
        "width": (
            zipped(
                vary("model.d_model", *widths),
                vary("model.num_heads", *(width // HEAD[scale] for width in widths)),
            ),
            {
                "mup": dict(
                    name="mup", base=dict(d_model=widths[0], num_heads=widths[0] // HEAD[scale])
                )
            },
        ),
        "depth": (
            vary("model.num_decoder_layers", *DEPTHS),
            {
                f"completep_{name}": dict(
                    name="completep", base=dict(num_decoder_layers=DEPTHS[0]), alpha=alpha
                )
                for name, alpha in {"half": 0.5, "1": 1.0}.items()
            },
        ),
    }[axis]
    placements = ("pre", "post", "peri", "deepnorm")
    same = "at the base, alpha has no effect"
    at_base = f"completep_1-num_decoder_layers={DEPTHS[0]}"
    return Sweep(
        product(
            vary("model.norm_placement", *placements),
            vary("model.parametrization", standard=dict(name="standard"), **rules),
            sizes,
        ),
        question=f"Under which parametrization does the best learning rate not depend on {axis}?",
        declared={"parameters": "sizes vary", "flops": "sizes vary"},
        controls={f"{p}-{at_base}": same for p in placements} if axis == "depth" else {},
        tune=tuned("optimizer.learning_rate", 5e-4, 3.2e-2, points=7, more=1),
        seeds=1,
    )
