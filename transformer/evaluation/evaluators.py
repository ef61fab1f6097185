"""What a run can be measured by beside its loss; chosen by `train.evaluators`, and nothing of it is computed where it is not asked for.

Each takes a `Subject` and yields (name, number). Names end with a layer or a place where there are several.

Shape suffixes: B batch, T length, V vocabulary.
"""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from transformer.config import Experiment
from transformer.data.pipeline import Data
from transformer.errors import UserError
from transformer.evaluation import kinds
from transformer.model.layout import flatten, part, where
from transformer.model.network import build_model
from transformer.parallel.context import arrange, order_of
from transformer.parallel.sharding import Share
from transformer.training.loss import auto_chunks
from transformer.training.step import batch_sums, outputs

Found = Iterator[tuple[str, float]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is measured: a model with parameters, on a part of its text. While it trains, its optimizer's state too."""

    config: Experiment
    params: Any
    data: Data
    part: str
    mesh: Mesh
    most: int = 0  # batches; 0: all
    opt_state: Any = None
    optimizer: optax.GradientTransformation | None = None

    @functools.cached_property
    def share(self) -> Share:
        return Share(self.mesh)


def measure(subject: Subject, during: bool) -> dict[str, float]:
    """All that the config asks for; in training, what is asked for then."""
    found: dict[str, float] = {}
    for spec in subject.config.train.evaluators:
        kind = kinds.build(spec)
        if kind.during or not during:
            found |= EVALUATORS[type(kind)](kind, subject)
    return found


def loss_by_position(kind: kinds.LossByPosition, subject: Subject) -> Found:
    """loss_by_position/PLACE: nats per token from that place of the row to the next. Where several documents share a row, of the place
    in the document."""
    length = subject.config.data.decoder_length if subject.config.model.two_sides else subject.config.data.length
    edges = np.linspace(0, length, kind.parts + 1).astype(int)
    sums = np.zeros((2, length))
    for losses_BxT, positions_BxT, weights_BxT in _token_losses(subject, subject.config):
        np.add.at(sums[0], positions_BxT, losses_BxT)
        np.add.at(sums[1], positions_BxT, weights_BxT)
    for first, last in itertools.pairwise(edges):
        if weight := sums[1, first:last].sum():
            yield f"loss_by_position/{first:05d}", float(sums[0, first:last].sum() / weight)


def extrapolation(kind: kinds.Extrapolation, subject: Subject) -> Found:
    """extrapolation/LENGTH: nats per token in rows of that length that do not overlap. extrapolation_sliding/LENGTH: of the last training
    length of tokens of such rows, each row beginning a training length after the one before."""
    config, length = subject.config, subject.config.data.length
    if config.model.family != "decoder" or not subject.data.objective.every_token:
        raise UserError("train.evaluators: extrapolation is of decoders that are asked for every token (causal_lm)")
    for times in kind.multiples:
        longer = length * times
        if longer > config.model.max_length and _shapes(config, longer) != _shapes(config, config.model.max_length):
            break  # a table of positions ends
        for name, overlap in (("extrapolation", 0), *([("extrapolation_sliding", longer - length)] if kind.sliding and times > 1 else [])):
            rows = max(config.data.batch_size // times // subject.mesh.size, 1) * subject.mesh.size
            data = dataclasses.replace(config.data, length=longer, batch_size=rows, eval_overlap=overlap)
            model = dataclasses.replace(config.model, max_length=max(longer, config.model.max_length))
            most = -(-kind.tokens // (rows * (longer - overlap))) if kind.tokens else 0
            total = np.zeros(2)
            for losses, _, weights in _token_losses(subject, dataclasses.replace(config, data=data, model=model), most):
                total += losses.sum(), weights.sum()
            if total[1]:
                yield f"{name}/{longer:06d}", float(total[0] / total[1])


def depth_profile(kind: kinds.DepthProfile, subject: Subject) -> Found:
    """Of one batch, by layer and sublayer, as depth/WHAT/SIDE/LAYER/SUBLAYER:

    stream    root mean square of the residual stream that the sublayer is given
    branch    of what it adds, as a share of that of the stream it is added to
    gradient  norm of the loss's gradient by its parameters
    update    norm of what the next update would change, as a share of its parameters' (while training)
    """
    config, mesh = subject.config, subject.mesh
    model, order = build_model(config.model), order_of(config.model, mesh)
    batch = subject.share.place(subject.data.batches(subject.part, subject.share.rows)[0])

    def profile(params, opt_state, batch):
        def loss(params):
            sums = batch_sums(model, params, batch, config, mesh)
            return sum(one.loss / jnp.maximum(one.weight, 1.0) for one in sums.values())

        grads = jax.grad(loss)(params)
        updates = subject.optimizer.update(grads, opt_state, params)[0] if opt_state is not None else None
        _, sown = outputs(model, params, arrange(batch, order, mesh), order, watch=("intermediates",))
        return flatten(sown["intermediates"]), _squares(config, grads), _squares(config, params), updates and _squares(config, updates)

    everywhere = NamedSharding(mesh, P())
    sizes, grads, params, updates = jax.jit(profile, out_shardings=everywhere)(subject.params, subject.opt_state, batch)
    for name, (path, place) in where(config.model, {p: None for p in sizes}).items():
        if found := re.fullmatch(r"(encoder|decoder)/layers_(\d+)/(?:(\w+)_)?residual/sizes", name):
            side, layer, sublayer = found.groups()
            at = f"{side}/{int(layer):02d}/{sublayer or 'all'}"
            of = {key: float(np.asarray(part(x, place))) for key, x in sizes[path][0].items()}
            yield f"depth/stream/{at}", of["stream"]
            yield f"depth/branch/{at}", of["branch"] / of["kept"] if of["kept"] else 1.0
    for at, square in grads.items():
        yield f"depth/gradient/{at}", float(square) ** 0.5
    for at, square in (updates or {}).items():
        yield f"depth/update/{at}", (float(square) / max(float(params[at]), 1e-30)) ** 0.5


def _squares(config: Experiment, tree) -> dict[str, jax.Array]:
    """SIDE/LAYER/SUBLAYER -> the sum of squares of its parameters, norms left out."""
    flat, found = flatten(tree), collections.defaultdict(float)
    for name, (path, place) in where(config.model, flat).items():
        if at := re.match(r"(encoder|decoder)/layers_(\d+)/(\w+)/", name):
            side, layer, sublayer = at.groups()
            if not sublayer.endswith("residual"):
                found[f"{side}/{int(layer):02d}/{sublayer}"] += jnp.sum(jnp.square(part(flat[path], place).astype(jnp.float32)))
    return dict(found)


EVALUATORS: dict[type, Callable[[Any, Subject], Found]] = {
    kinds.LossByPosition: loss_by_position,
    kinds.Extrapolation: extrapolation,
    kinds.DepthProfile: depth_profile,
}


def _shapes(config: Experiment, longest: int) -> list[tuple[int, ...]]:
    """Of all parameters of a model that reads so many tokens."""
    model = dataclasses.replace(config.model, max_length=longest)
    tokens = (jax.ShapeDtypeStruct((1, 1), jnp.int32),) * (1 + model.two_sides)
    return [x.shape for x in jax.tree.leaves(jax.eval_shape(build_model(model).init, jax.random.key(0), *tokens))]


def _token_losses(subject: Subject, config: Experiment, most: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(-log p of every target times its weight, positions, weights), each [B, T], batch by batch."""
    model, mesh, order = build_model(config.model), subject.mesh, order_of(config.model, subject.mesh)
    data = dataclasses.replace(subject.data, config=config)
    batches = data.batches(subject.part, subject.share.rows)

    def losses(params, batch):
        batch = arrange(batch, order, mesh)
        (h_BxTxD, head), _ = outputs(model, params, batch, order)
        chunks = auto_chunks(*batch["targets"].shape, config.model.vocab_size, mesh)
        cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 1, 0)

        def chunk(given):
            h, targets = given
            logits_BxTxV = head(h)
            return jax.nn.logsumexp(logits_BxTxV, axis=-1) - jnp.take_along_axis(logits_BxTxV, targets[..., None], axis=-1)[..., 0]

        nll_BxT = jnp.moveaxis(jax.lax.map(chunk, (cut(h_BxTxD), cut(batch["targets"]))), 0, 1).reshape(batch["targets"].shape)
        return nll_BxT * batch["weights"], batch["positions"], batch["weights"]

    run = jax.jit(losses, out_shardings=NamedSharding(mesh, P()))
    count = min(n for n in (most or len(batches), subject.most or len(batches), len(batches)))
    for batch in batches.stream(0, count):
        yield tuple(map(np.asarray, jax.device_get(run(subject.params, subject.share.place(batch)))))
