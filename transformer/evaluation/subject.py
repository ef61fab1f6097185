"""The model and data that evaluators measure, and helpers that show the internals of a model.
Shape suffixes: B batch, T length, E d_embedding, V vocabulary."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from transformer.data.config import Task
from transformer.data.pipeline import Data
from transformer.model.layout import by_layer
from transformer.model.network import build_model
from transformer.model.placements.base import Parts
from transformer.parallel.sharding import Share
from transformer.training.loss import auto_chunks, chunked
from transformer.training.step import run_model

Metrics = Iterator[tuple[str, float | str]]
"""Names and values of metrics. A string is a text for people, such as a sample of the output."""

token_losses = optax.softmax_cross_entropy_with_integer_labels
"""(logits_BxTxV, targets_BxT) -> -log p(target), in nats."""

SELF_ATTENTION_ONLY = ("distance", "previous")
"""Attention statistics that compare positions, which has no meaning in cross-attention."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A model at one step: its parameters, and its optimizer's state during training."""

    params: Any
    opt_state: Any = None
    translations: tuple[list[str], list[str], list[list[str]]] | None = None
    """Sources, hypotheses, and the references of each source. None before translation."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and a part of its text, on a mesh. Compiled programs are cached for later calls."""

    config: Task
    data: Data | None  # None: the caller provides the batches
    part: str
    mesh: Mesh
    max_batches: int = 0  # batches; 0: all
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
        """The first batch of the text."""
        return self.share.place(self.data.batches(self.part, self.share.sequences)[0])

    def with_config(self, config: Task) -> "Subject":
        """Returns a Subject with the same text and another config. Results are cached."""
        if config not in self.programs:
            data = dataclasses.replace(self.data, config=config)
            self.programs[config] = dataclasses.replace(self, config=config, data=data, programs={})
        return self.programs[config]

    def program(self, name, function: Callable) -> Callable:
        """Returns `function`, compiled with replicated results. The first of a `name` is cached."""
        if name not in self.programs:
            self.programs[name] = jax.jit(function, out_shardings=NamedSharding(self.mesh, P()))
        return self.programs[name]

    def watch(self, params, batch: Mapping[str, jax.Array], *what: str):
        """Returns ((input of the token head, head), internals, batch). Internals are the
        collections `what` (`WATCHED`). The batch has the order in which the model read it."""
        args = (self.model, params, batch, self.config, self.mesh)
        result, batch, sown = run_model(*args, watch=what)
        return (result.hidden_BxTxE, result.head), sown, batch

    def predict(self, h_BxTxE: jax.Array, head: Callable, targets_BxT: jax.Array):
        """Returns (-log p(target), most likely token), [B, T]. Holds few logits at a time."""
        count, length = targets_BxT.shape
        chunks = auto_chunks(count, length, self.config.model.vocab_size, self.mesh)

        def of_chunk(chunk):
            logits, targets = head(chunk[0]), chunk[1]
            return token_losses(logits, targets), jnp.argmax(logits, axis=-1)

        out = jax.lax.map(of_chunk, (chunked(h_BxTxE, chunks), chunked(targets_BxT, chunks)))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(count, length), out)


def as_documents(subject: Subject, batch: Mapping, inputs: np.ndarray) -> dict[str, jax.Array]:
    """Returns a sharded batch with other inputs, in which each sequence is one document."""
    positions = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape)
    changed = {"inputs": inputs.astype(np.int32), "segments": np.ones_like(positions)}
    here, batch = subject.share.sequences(len(inputs)), {**batch, **changed, "positions": positions}
    return subject.share.place({name: x[here] for name, x in batch.items() if name != "prefix"})


def streams(subject: Subject, params, recorded: dict) -> Iterator[tuple[jax.Array, Callable]]:
    """Yields (input of the head, head) after each layer of the last stack, as if it ended there,
    from the residual streams after the layers (`recorded`: "streams" of model/modules.py)."""
    config, side = subject.config.model, subject.config.model.sides[-1]
    module, of_stack, done = config.norm_module(parent=None), params[side], 0
    norm = lambda name: lambda x: module.apply({"params": of_stack.get(name, {})}, x)
    parts, end = Parts(norm, lambda name, *_: of_stack[name]), config.last_placement(side).end
    after = [x for stack, _, _, x in by_layer(config, recorded) if stack == side]
    for x, of_layer in zip(after, config.layers(side), strict=True):
        done += of_layer.residuals_of_layer(side)
        yield subject.model.apply(params, end(parts, x, done), method="read")
