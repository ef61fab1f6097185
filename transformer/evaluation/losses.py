"""The loss, taken apart: by the place in the row, in longer rows, and with something of the model changed.

Shape suffixes: B batch, T length, V vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config_io import apply_overrides
from transformer.errors import UserError
from transformer.evaluation.kinds import Extrapolation, LossByPosition, LossWith
from transformer.evaluation.subject import At, Found, Subject, token_losses
from transformer.model.config import ModelConfig
from transformer.model.network import build_model


def loss_by_position(kind: LossByPosition, subject: Subject, at: At) -> Found:
    """loss_by_position/PLACE: nats per token from that place of the row to the next. Where several documents share a row, of the place
    in the document."""
    length = (
        subject.config.data.decoder_length
        if subject.config.model.two_sides
        else subject.config.data.length
    )
    edges = np.linspace(0, length, kind.parts + 1).astype(int)
    sums = np.zeros((2, length))
    for losses_BxT, positions_BxT, weights_BxT in _losses(subject, at):
        np.add.at(sums[0], positions_BxT, losses_BxT)
        np.add.at(sums[1], positions_BxT, weights_BxT)
    for first, last in itertools.pairwise(edges):
        if weight := sums[1, first:last].sum():
            yield f"loss_by_position/{first:05d}", float(sums[0, first:last].sum() / weight)


def extrapolation(kind: Extrapolation, subject: Subject, at: At) -> Found:
    """extrapolation/LENGTH: nats per token in rows of that length that do not overlap; context/LENGTH: how many tokens are before one in them
    on average, half the length where texts are as long, less where several share a row. extrapolation_sliding/LENGTH: of the last
    training length of tokens of such rows, each row beginning a training length after the one before (those at the text's beginning have
    less before them)."""
    config, length = subject.config, subject.config.data.length
    for times in kind.multiples:
        longer = length * times
        if (model := reading(config.model, longer)) is None:
            break  # the model has a parameter for each position, and none beyond its max_length
        for name, overlap in (
            ("extrapolation", 0),
            *([("extrapolation_sliding", longer - length)] if kind.sliding and times > 1 else []),
        ):
            rows = max(config.data.batch_size // times // subject.mesh.size, 1) * subject.mesh.size
            data = dataclasses.replace(
                config.data, length=longer, batch_size=rows, eval_overlap=overlap, buckets=()
            )
            most = -(-kind.tokens // (rows * (longer - overlap))) if kind.tokens else 0
            train = dataclasses.replace(config.train, accumulate=1, evaluators=())
            there = subject.changed(
                dataclasses.replace(config, data=data, model=model, train=train)
            )
            mean, before = _mean(there, at, most)
            yield f"{name}/{longer:06d}", mean
            if not overlap:
                yield f"context/{longer:06d}", before


def loss_with(kind: LossWith, subject: Subject, at: At) -> Found:
    """loss_with/FIELD=VALUE: nats per token of the same parameters in a model one field of which is changed."""
    field, _, value = kind.change.partition("=")
    changed = apply_overrides(subject.config, {field: value})
    if _shapes(changed.model) != _shapes(subject.config.model):
        raise UserError(
            f"train.evaluators: loss_with: {kind.change} changes the model's parameters, so these cannot be put into it"
        )
    yield f"loss_with/{kind.change}", _mean(subject.changed(changed), at)[0]


def reading(model: ModelConfig, length: int) -> ModelConfig | None:
    """The same model, reading rows of at least so many tokens; None where its parameters say how many it can read."""
    longest = max(length, model.max_length)
    longer = dataclasses.replace(
        model,
        max_length=longest,
        random_positions=model.random_positions and max(longest, model.random_positions),
    )
    return longer if length <= model.max_length or _shapes(longer) == _shapes(model) else None


def _shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Of all parameters."""
    tokens = (jax.ShapeDtypeStruct((1, 1), jnp.int32),) * (1 + model.two_sides)
    return [
        x.shape
        for x in jax.tree.leaves(
            jax.eval_shape(build_model(model).init, jax.random.key(0), *tokens)
        )
    ]


def _mean(subject: Subject, at: At, most: int = 0) -> tuple[float, float]:
    """(nats per token, tokens before one)."""
    total = np.zeros(3)
    for losses, positions, weights in _losses(subject, at, most):
        total += losses.sum(), (positions * weights).sum(), weights.sum()
    return tuple(float(x) for x in total[:2] / max(total[2], 1.0))


def _losses(
    subject: Subject, at: At, most: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(-log p of every target times its weight, positions, weights), each [B, T], batch by batch."""

    def losses(params, batch):
        (h_BxTxD, head), _, batch = subject.watch(params, batch)
        nll_BxT = subject.in_chunks(
            lambda h, targets: token_losses(head(h), targets), h_BxTxD, batch["targets"]
        )
        return nll_BxT * batch["weights"], batch["positions"], batch["weights"]

    batches, run = (
        subject.data.batches(subject.part, subject.share.rows),
        subject.program("losses", losses),
    )
    count = min(n for n in (most or len(batches), subject.most or len(batches), len(batches)))
    for batch in batches.stream(0, count):
        yield tuple(map(np.asarray, jax.device_get(run(at.params, subject.share.place(batch)))))
