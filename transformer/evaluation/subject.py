"""What evaluators measure."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from transformer.data.pipeline import Data
from transformer.model.network import build_model
from transformer.parallel.sharding import Share
from transformer.training import outputs
from transformer.training.config import TrainTask
from transformer.training.loss import auto_chunks

Found = Iterator[tuple[str, float]]
"""Names and numbers."""


@dataclasses.dataclass(frozen=True)
class At:
    """A model as it is at some step: its parameters and, while it trains, its optimizer's state. What it has written, once it has."""

    params: Any
    opt_state: Any = None
    translations: tuple[list[str], list[str], list[list[str]]] | None = (
        None  # sources, hypotheses, references of each
    )


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and a part of its text, on a mesh. What is compiled to measure it is kept for the next time."""

    config: TrainTask
    data: Data | None  # None: what is measured is given
    part: str
    mesh: Mesh
    most: int = 0  # batches; 0: all
    optimizer: optax.GradientTransformation | None = None
    programs: dict = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def share(self) -> Share:
        return Share(self.mesh)

    @functools.cached_property
    def model(self) -> nn.Module:
        return build_model(self.config.model)

    @functools.cached_property
    def batch(self) -> dict[str, jax.Array]:
        """The first of its text."""
        return self.share.place(self.data.batches(self.part, self.share.rows)[0])

    def changed(self, config: TrainTask) -> "Subject":
        """The same text read by another config."""
        if config not in self.programs:
            self.programs[config] = dataclasses.replace(
                self, config=config, data=dataclasses.replace(self.data, config=config), programs={}
            )
        return self.programs[config]

    def program(self, name, function: Callable) -> Callable:
        """`function` compiled, as the first that was given under this name; its results are whole on every device."""
        if name not in self.programs:
            self.programs[name] = jax.jit(function, out_shardings=NamedSharding(self.mesh, P()))
        return self.programs[name]

    def watch(self, params, batch: Mapping[str, jax.Array], *what: str):
        """(what the token head reads, the head), what the model tells of its inside
        (model/watch.py), and the batch in the order in which the model read it."""
        given = (self.model, params, batch, self.config, self.mesh)
        found, batch, told = outputs.apply(*given, watch=what)
        return (found.hidden_BxTxE, found.head), told, batch

    def in_chunks(self, function: Callable, *arrays_BxT: jax.Array):
        """function(*arrays) of [B, T, ...], which gives [B, T], some tokens at a time: so logits of all are never held at once."""
        rows, length = arrays_BxT[0].shape[:2]
        chunks = auto_chunks(rows, length, self.config.model.vocab_size, self.mesh)
        cut = lambda x: jnp.moveaxis(x.reshape(rows, chunks, -1, *x.shape[2:]), 1, 0)
        out = jax.lax.map(lambda given: function(*given), tuple(map(cut, arrays_BxT)))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, length), out)


def token_losses(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
    """-log p(target), in nats."""
    at_target = jnp.take_along_axis(logits_BxTxV, targets_BxT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BxTxV, axis=-1) - at_target
