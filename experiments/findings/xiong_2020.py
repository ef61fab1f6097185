r"""Does post-norm need a warm-up where pre-norm needs none? Xiong et al. (2020).

The paper is "On Layer Normalization in the Transformer Architecture". Before the first step, the
gradient of the feed-forward matrices grows towards the last layer under post-norm, and is about the
same in every layer under pre-norm (the paper's figure 3). Therefore post-norm without a warm-up
fails at learning rates at which pre-norm trains (IWSLT14: 8.45 BLEU against about 34). With a
warm-up, the two perform alike.

    python -m transformer sweep --config=experiments/findings/xiong_2020.py \
        --workdir=runs/xiong_2020
    python -m transformer compare runs/xiong_2020

At the paper's scale (WMT14 English-German, 6 + 6 layers, d_model 512; TPU v5e-8):
--config=experiments/findings/xiong_2020.py:paper

Hardware  two CPU cores, about 20 minutes with --jobs=2

Measured (two cores of an AMD EPYC 9005, 23 minutes on a busy machine; test split, mean and 95 %
interval over five seeds; every p of paired t-tests with Holm's correction is under 0.001):

    arm         test/loss         difference from pre-warm
    pre-warm    4.637 +- 0.008
    pre-cold    4.667 +- 0.007    +0.030 [+0.023, +0.037]
    post-warm   4.808 +- 0.026    +0.171 [+0.149, +0.194]
    post-cold   5.628 +- 0.050    +0.991 [+0.939, +1.043]

    gradient of the feed-forward matrices before the first step, by layer (mean of five seeds)
    pre         0.84  0.69  0.64  0.60  0.55  0.49
    post        1.06  1.07  1.25  1.25  1.18  1.16

Without a warm-up, post-norm hardly trains at this rate (a unigram model has a loss of 5.9), while
pre-norm is hardly affected. Unlike in the paper, the two do not perform alike with the warm-up:
after these 800 steps, the loss of post-norm is still higher by 0.17.

The gradients differ in the direction that the paper describes, but by less. Under post-norm, the
gradient does not grow in every layer; it is a sixth larger at its maximum than in the first layer,
and a tenth larger in the last. Under pre-norm, it is not constant but falls to six tenths of its
value in the first layer. In the last layer, the gradient is 2.4 times as large under post-norm as
under pre-norm, and in the first layer 1.3 times.
"""

import ml_collections

from transformer import Sweep, product, vary

ARGUMENTS = ("small", "paper")
WARM_UP = {"small": 200, "paper": 4000}


def get_config(scale="small"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="decoder",
        vocab_size=2048,
        num_decoder_layers=6,
        d_model=64,
        d_ff=256,
        num_heads=4,
        max_length=64,
        position="sinusoidal",
        embedding_scale=True,
        norm_placement="pre",
        attention_backend="reference",
    )
    config.data = dict(corpus="wikitext2", objective="causal_lm", length=64, batch_size=16)
    config.optimizer = dict(
        name="adamw", learning_rate=2e-3, schedule="linear", warmup_steps=WARM_UP[scale]
    )
    config.train = dict(
        steps=800,
        log_every=20,
        eval_every=100,
        eval_batches=10,
        tensorboard=False,
        evaluators=("depth_profile",),
    )
    if scale == "paper":
        config.model.update(
            family="encoder_decoder", vocab_size=37000, num_encoder_layers=6, num_decoder_layers=6,
            d_model=512, d_ff=2048, num_heads=8, max_length=256, dropout=0.1, dtype="bfloat16",
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
        config.optimizer.update(learning_rate=1e-3, b2=0.98)
        config.train.update(
            steps=100_000,
            label_smoothing=0.1,
            log_every=100,
            eval_every=5000,
            checkpoint_every=5000,
        )
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    return Sweep(
        product(
            vary("model.norm_placement", "pre", "post"),
            vary("optimizer.warmup_steps", warm=WARM_UP[scale], cold=0),
        ),
        question="Does post-norm need a warm-up where pre-norm needs none?",
        seeds=5,
    )
