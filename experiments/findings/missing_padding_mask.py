r"""What happens without the padding mask?

The sequences of a batch are padded to one length, and a mask hides the padding from the encoder and
from cross-attention. Without the mask, a prediction depends on the amount of padding, and so on the
other sequences of the batch. A causal decoder needs no such mask: its padding comes last.

The arm `masked` has the mask. The arm `padding_as_tokens` reads the padding like any other token,
in training and in evaluation. Both are evaluated with and without the mask, with sources padded to
24 tokens, as in training, and to 48 and 96. At 48 and 96, the few longer sources are included.

    python -m transformer sweep --config=experiments/findings/missing_padding_mask.py \
        --workdir=runs/missing_padding_mask
    python -m transformer compare runs/missing_padding_mask

At a larger scale (the base model of Vaswani et al. 2017, sources of 64 tokens; TPU v5e-8):
--config=experiments/findings/missing_padding_mask.py:large

Hardware  two CPU cores, 7 minutes on a busy machine

Measured (two cores of an AMD EPYC; test split, mean and 95 % interval over three seeds, nats per
token, with sources padded to 24, 48 and 96 tokens):

    trained          evaluated       padded to 24    padded to 48    padded to 96
    with the mask    with it         4.069 +- 0.024  4.079 +- 0.024  4.079 +- 0.024
    with the mask    without it      4.565 +- 0.163  4.719 +- 0.185  4.815 +- 0.167
    without it       without it      4.110 +- 0.029  4.224 +- 0.185  4.416 +- 0.361
    without it       with the mask   4.388 +- 0.314  4.394 +- 0.310  4.394 +- 0.310

With the mask, the loss does not depend on the padding. (The difference of 0.010 between 24 and 48
tokens comes from the longer sources; between 48 and 96, it is less than 0.000001.) A model that is
trained with the mask and evaluated without it loses 0.50 nats, and more with more padding. A model
that is trained without the mask adapts to the padding that it sees. At 24 tokens, its mean loss is
0.04 higher than that of the model with the mask. At 96 tokens, it is 0.34 higher, but its three
seeds differ so much that the interval includes 0. If the padding is then masked at 24 tokens, the
mean loss is 0.28 higher than without the mask.
"""

import dataclasses

import ml_collections
import numpy as np

from transformer import EVALUATORS, OBJECTIVES, Sweep, vary
from transformer.data.objectives.seq2seq import Seq2Seq
from transformer.evaluation import losses
from transformer.evaluation.evaluators.base import Evaluator, Kind

ARGUMENTS = ("small", "large")


@OBJECTIVES.register("padding_as_tokens")
@dataclasses.dataclass(frozen=True)
class PaddingAsTokens(Seq2Seq):
    """`seq2seq` whose encoder reads the padding like other tokens."""

    def sequences(self, store, part, task):
        return _Padded(super().sequences(store, part, task), task.data.length, store.tokenizer.pad)


class _Padded:
    """Sequences whose sources are filled with the token `pad`, so that no mask hides it."""

    def __init__(self, sequences, length: int, pad: int):
        self._sequences, self._length, self._pad = sequences, length, pad
        self.lengths, self.report = np.full(len(sequences.lengths), length), sequences.report

    def segments(self, index, draw):
        fill = lambda source: np.pad(
            source, (0, self._length - len(source)), constant_values=self._pad
        )
        segments = self._sequences.segments(index, draw)
        return [dataclasses.replace(s, source=fill(s.source)) for s in segments]


@EVALUATORS.register("padding")
@dataclasses.dataclass(frozen=True)
class Padding(Evaluator):
    """Loss with and without the padding mask, by the length to which sources are padded.

    Yields padding/masked/LENGTH and padding/as_tokens/LENGTH, in nats per token, for 1, 2 and 4
    times `data.length`.
    """

    in_training = False
    kinds = {"padding": Kind("nats per token", False, True)}

    def measure(self, subject, snapshot):
        objectives = {"masked": "seq2seq", "as_tokens": "padding_as_tokens"}
        config = subject.config
        for times in (1, 2, 4):
            length, target = config.data.length * times, config.data.decoder_length
            for name, objective in objectives.items():
                data = dataclasses.replace(
                    config.data, objective=objective, length=length, target_length=target
                )
                changed = subject.with_config(dataclasses.replace(config, data=data))
                yield f"padding/{name}/{length:03d}", losses.mean(changed, snapshot)[0]


def get_config(scale="small"):
    config = ml_collections.ConfigDict()
    config.model = dict(
        family="encoder_decoder",
        vocab_size=2048,
        num_encoder_layers=2,
        num_decoder_layers=2,
        d_model=64,
        d_ff=256,
        num_heads=4,
        max_length=96,
        position="sinusoidal",
        norm_placement="pre",
        attention_backend="reference",
    )
    config.data = dict(
        corpus="tatoeba_en_es",
        objective="seq2seq",
        length=24,
        target_length=24,
        batch_size=32,
        packing=False,
    )
    config.optimizer = dict(
        name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=100, clip_norm=1.0
    )
    config.train = dict(
        steps=1000,
        log_every=50,
        eval_every=500,
        eval_batches=20,
        tensorboard=False,
        evaluators=("padding",),
    )
    if scale == "large":
        config.model.update(
            vocab_size=32000,
            num_encoder_layers=6,
            num_decoder_layers=6,
            d_model=512,
            d_ff=2048,
            num_heads=8,
            max_length=256,
            dtype="bfloat16",
            attention_backend="auto",
        )
        config.data.update(length=64, target_length=64, batch_size=512)
        config.optimizer.update(learning_rate=1e-3, warmup_steps=1000)
        config.train.update(steps=20_000, log_every=100, eval_every=2000)
        config.platform = "accelerator"
    return config


def sweep(scale="small"):
    return Sweep(
        vary("data.objective", masked="seq2seq", padding_as_tokens="padding_as_tokens"),
        question="What does an encoder-decoder lose without the padding mask?",
        metric="test/padding/masked/024",
        seeds=3,
    )
