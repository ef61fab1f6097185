r"""Does a recurrent network remember as far as attention reaches?

Textbooks contrast the two: information from a token n positions away takes n steps of recurrence
but one step of attention. The task is to copy a string of n letters (`copy`, data/probes.py), so
every letter is needed n steps after it was read. The models are:

attention            a Transformer
recurrent_attention  LSTMs in both directions; the decoder attends to all encoder states (Bahdanau
                     et al. 2015, who found that translation of long sentences fails without
                     attention)
recurrent            LSTMs without attention; the decoder reads only the encoder's last state (after
                     Sutskever et al. 2014)

experiments/benchmarks/recurrence.py measures their time and their sequential steps.

    python -m transformer sweep --config=experiments/findings/recurrence.py \
        --workdir=runs/recurrence
    python -m transformer compare runs/recurrence

At a larger scale (d_model 512, up to 1,024 letters; TPU v5e-4):
--config=experiments/findings/recurrence.py:large

Hardware  two CPU cores, 45 runs, 55 minutes on a busy machine

Measured on two cores of an AMD EPYC 9005 (three seeds; share of strings copied without a mistake,
and share of tokens predicted correctly from the true previous tokens, with 95 % intervals where
they are not zero):

    n     attention        LSTMs with attention                 LSTMs without attention
          strings  tokens  strings           tokens             strings           tokens
     4    1.000    1.000   1.000             1.000              0.988 +- 0.005    0.998 +- 0.001
     8    1.000    1.000   1.000             1.000              0.150 +- 0.062    0.832 +- 0.028
    16    1.000    1.000   1.000             1.000              0                 0.458 +- 0.011
    32    1.000    1.000   0.983 +- 0.030    0.999 +- 0.001     0                 0.179 +- 0.036
    64    1.000    1.000   0                 0.759 +- 0.114     0                 0.087 +- 0.012

Version 0.1, in which these LSTMs were a separate family with another random initialization, gave
results whose intervals overlap with these.

The results confirm the papers. An LSTM that must remember the source in one state (64 numbers)
retains only a few letters after 1,000 training steps. Attention reaches every letter in one step,
so the distance makes no difference. LSTMs with attention are in between: they match the Transformer
up to 32 letters, but do not learn 64 in the same number of training steps (their loss was still
falling).
"""

import ml_collections

from transformer import Sweep, arms, product

ARGUMENTS = ("small", "large")
LENGTHS = {"small": (4, 8, 16, 32, 64), "large": (64, 256, 1024)}


def text(length):
    """Returns overrides for strings of one length. A sequence holds one string and its end."""
    return {
        "data.train": f"copy:{length}-{length}",
        "data.length": length + 8,
        "data.target_length": length + 8,
    }


def lstms(layers, source="attention"):
    """Returns a layer pattern of LSTMs. Only the first layer has no residual connection.

    In a decoder, `source` specifies how the first layer reads the encoder's output.
    """
    first = dict(
        mixer=dict(name="lstm", source=source),
        norm_placement=dict(name="none", residual_scale=0.0),
    )
    above = dict(mixer=dict(name="lstm", source="none"), norm_placement="none")
    return [first, *[above] * (layers - 1)]


DEPTH = {"small": 2, "large": 4}
ATTENTION = {
    "model.layer_pattern": (),
    "model.position": "sinusoidal",
    "model.feed_forward": "dense",
}
ATTENTION = {
    "small": ATTENTION
    | {"model.d_ff": 128, "model.num_heads": 4, "model.attention_backend": "reference"},
    "large": ATTENTION,
}
"""Scale -> overrides of the attention arm. "large" has the default d_ff, 2,048, and 8 heads."""


def get_config(scale="small"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="encoder_decoder",
        vocab_size=40,
        num_encoder_layers=DEPTH[scale],
        num_decoder_layers=DEPTH[scale],
        d_model=64,
        layer_pattern=lstms(DEPTH[scale]),
        position="none",
        feed_forward="none",
        max_length=2 * LENGTHS[scale][-1],
    )
    config.data = dict(
        format="probe",
        objective="seq2seq",
        batch_size=32,
        packing=False,
        held_out=500,
        tokenizer=dict(kind="char"),
    )
    config.update_from_flattened_dict(text(LENGTHS[scale][0]))
    config.optimizer = dict(
        name="adamw", learning_rate=2e-3, schedule="linear", warmup_steps=100, clip_norm=1.0
    )
    config.train = dict(steps=1000, log_every=50, eval_every=250, tensorboard=False)
    if scale == "large":
        config.model.update(d_model=512, dtype="bfloat16")
        config.data.update(batch_size=256)
        config.optimizer.update(learning_rate=5e-4)
        config.train.update(steps=10_000, eval_every=1000, log_every=100)
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    return Sweep(
        product(
            arms(
                attention=ATTENTION[scale],
                recurrent_attention={},
                recurrent={"model.layer_pattern": lstms(DEPTH[scale], "last")},
            ),
            arms(**{f"at_{length}": text(length) for length in LENGTHS[scale]}),
        ),
        question="Does a recurrent network remember as far as attention reaches?",
        metric="test/exact",
        declared={
            "parameters": "LSTMs and attention have different matrices",
            "flops": "LSTMs and attention compute different products",
            "attention": "LSTMs use none of the attention backends",
        },
        seeds=3,
    )
