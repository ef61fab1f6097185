"""Is Muon better than AdamW if both are tuned, and does the answer depend on the size?

Muon (Jordan et al. 2024) orthogonalizes the updates of matrices. Wen et al. (2025), "Fantastic
Pretraining Optimizers and Where to Find Them", tune both and find that Muon reaches AdamW's loss
1.4 times as fast at 0.1 B parameters, and 1.1 times as fast at 1.2 B.

    python -m transformer sweep --config=experiments/findings/muon.py --workdir=runs/muon
    python -m transformer compare runs/muon

The learning rate of each optimizer is tuned at each size; weight decay is 0.1 for both. At a larger
scale (TPU v5e-16): --config=experiments/findings/muon.py:paper

Hardware  two CPU cores, 84 runs, about 90 minutes

Measured (two cores of an AMD EPYC; 400 steps of 1,024 tokens; test/loss with its 95 % interval over
three seeds; best learning rate with its interval; cost: the increase of the loss at a factor of 2
from it; gain of Muon, paired by seed; step at which Muon reaches AdamW's final loss):

    size  optimizer  test/loss        best rate                cost   gain of Muon           step
    0.3M  adamw      4.565 +- 0.036   0.010  [0.0095, 0.011]   0.057
          muon       4.287 +- 0.004   0.015  [0.015, 0.018]    0.056  0.279 [0.243, 0.314]    255
    0.9M  adamw      4.591 +- 0.041   0.0065 [0.006, 0.0065]   0.082
          muon       4.227 +- 0.009   0.013  [0.013, 0.015]    0.048  0.364 [0.331, 0.397]    216
    2M    adamw      4.612 +- 0.020   0.005  [0.004, 0.0053]   0.064
          muon       4.200 +- 0.024   0.011  [0.011, 0.011]    0.048  0.412 [0.406, 0.419]    198

Muon is better at each size, and needs 0.64, 0.54 and 0.49 times the steps for AdamW's final loss.
The gain is larger at 2M than at 0.3M, by 0.134 [0.094, 0.174] nats. Wen et al. find that it shrinks
with size. The studies differ: here, models read 0.4 million tokens, 1.2 to 0.2 per parameter, and
AdamW's loss does not fall with size. On a log-log scale, the best rate against d_model has slope
-1.00 [-1.53, -0.47] with AdamW, and -0.44 [-1.24, +0.36] with Muon. All optima are bracketed. The
comparison at the rate of the file (18 of the 84 runs) was not run.
"""

import ml_collections

from transformer import Sweep, arms, product, tuned, vary

ARGUMENTS = ("small", "paper")
SIZES = {  # d_model, layers, heads
    "small": {"0.3M": (64, 4, 4), "0.9M": (96, 6, 6), "2M": (128, 9, 8)},
    "paper": {"130M": (768, 12, 12), "300M": (1024, 24, 16), "520M": (1280, 24, 20)},
}


def get_config(scale="small"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=2048,
        num_decoder_layers=4,
        d_model=64,
        num_heads=4,
        max_length=64,
        position="rotary",
        norm_placement="pre",
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=64, batch_size=16)
    config.optimizer = dict(
        name="adamw", learning_rate=6e-3, schedule="wsd", warmup_steps=50, weight_decay=0.1
    )
    config.train = dict(steps=400, log_every=20, eval_every=100, eval_batches=40, tensorboard=False)
    if scale == "paper":
        config.model.update(
            vocab_size=32000, max_length=2048, dtype="bfloat16", remat="full",
            attention_backend="auto",
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
        config.optimizer.update(learning_rate=2e-3, warmup_steps=1000)
        config.train.update(
            steps=10_000, log_every=100, eval_every=1000, checkpoint_every=1000, eval_batches=40
        )
        config.mesh = dict(fsdp=-1, data=1)
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    sizes = {
        name: {
            "model.d_model": width,
            "model.num_decoder_layers": layers,
            "model.num_heads": heads,
        }
        for name, (width, layers, heads) in SIZES[scale].items()
    }
    low, high = {"small": (1.5e-3, 2.4e-2), "paper": (5e-4, 8e-3)}[scale]
    return Sweep(
        product(vary("optimizer.name", "adamw", "muon"), arms(**sizes)),
        question="Is Muon better than AdamW if both are tuned, and does it depend on the size?",
        declared={"parameters": "sizes vary", "flops": "sizes vary"},
        tune=tuned("optimizer.learning_rate", low, high, points=5, more=3),
        seeds=3,
    )
