"""Is an encoder-decoder better than a decoder of the same size at translation?

Wang et al. (2022), "What Language Model Architecture and Pretraining Objective Work Best for
Zero-Shot Generalization?", and Raffel et al. (2020, T5, section 3.2.4) compare an encoder-decoder
with a decoder that reads source and target as one sequence. The decoder reads the source causally
or, as a prefix language model, bidirectionally. T5 finds that the encoder-decoder is best at tasks
with an input and an output, and that a prefix language model is better than a causal one.

    python -m transformer sweep --config=experiments/findings/wang_2022.py --workdir=runs/wang_2022
    python -m transformer compare runs/wang_2022

All arms have the same number of parameters (by d_ff) and of layers in total, and about the same
number of pairs in a batch.
At a larger scale (the base model of Vaswani et al. 2017; TPU v5e-8):
--config=experiments/findings/wang_2022.py:large

Hardware  two CPU cores, 9 runs, 46 minutes on a busy machine

Measured (two cores of an AMD EPYC; test split, mean and 95 % interval over three seeds; difference
from the encoder-decoder, paired by seed; BLEU against all references with greedy decoding):

    arm              test/loss        difference            BLEU
    encoder_decoder  2.066 +- 0.012                         21.9 +- 1.4
    causal_decoder   2.214 +- 0.022   0.147 [0.113, 0.181]  19.7 +- 0.3
    prefix_decoder   2.269 +- 0.011   0.203 [0.199, 0.206]  18.4 +- 0.8

As in T5, the encoder-decoder is better than both decoders, although the decoders use about twice
the FLOPs per pair (all arms train for 0.9 epochs). Reading the source bidirectionally does not help
here: the prefix language model is worse than the causal one, by 0.055 +- 0.034. In T5, after
far more training, it is better.
"""

import ml_collections

from transformer import Sweep, arms

ARGUMENTS = ("small", "large")


def get_config(scale="small"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="encoder_decoder",
        vocab_size=2048,
        num_encoder_layers=2,
        num_decoder_layers=2,
        d_model=96,
        d_ff=384,
        num_heads=4,
        max_length=128,
        position="sinusoidal",
        norm_placement="pre",
        activation="relu",
        embedding_scale=True,
        attention_backend="reference",
    )
    config.data = dict(corpus="tatoeba_en_es", objective="seq2seq", length=64, batch_size=16)
    config.optimizer = dict(
        name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=200, clip_norm=1.0
    )
    config.train = dict(
        steps=1500, log_every=50, eval_every=500, eval_batches=20, tensorboard=False
    )
    if scale == "large":
        config.model.update(
            vocab_size=32000,
            num_encoder_layers=6,
            num_decoder_layers=6,
            d_model=512,
            d_ff=2048,
            num_heads=8,
            max_length=512,
            dtype="bfloat16",
            attention_backend="auto",
        )
        config.data.update(length=256, batch_size=128)
        config.optimizer.update(learning_rate=1e-3, warmup_steps=2000)
        config.train.update(steps=30_000, log_every=100, eval_every=5000, checkpoint_every=5000)
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    base = get_config(scale)
    decoder = {  # as many layers, and source and target in one sequence
        "model.family": "decoder",
        "model.num_encoder_layers": 0,
        "model.num_decoder_layers": base.model.num_encoder_layers + base.model.num_decoder_layers,
        "data.length": 2 * base.data.length,
    }
    return Sweep(
        arms(
            encoder_decoder={},
            causal_decoder=decoder,
            prefix_decoder=decoder | {"model.prefix_lm": True},
        ),
        question="Is an encoder-decoder better at translation than a decoder of the same size?",
        match="parameters",
        declared={"flops": "a decoder computes both languages with all layers"},
        seeds=3,
    )
