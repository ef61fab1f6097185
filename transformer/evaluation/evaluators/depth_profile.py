"""What goes on by layer and sublayer: stream, branch, gradient, update."""

import collections
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from transformer.evaluation.evaluators.base import EVALUATORS, At, Found, OneBatch, Subject
from transformer.evaluation.inside import residual_of
from transformer.model.config import ModelConfig
from transformer.model.layout import flatten, in_layer, part, where
from transformer.training.step import batch_sums


@EVALUATORS.register("depth_profile")
@dataclasses.dataclass(frozen=True)
class DepthProfile(OneBatch):
    """By layer and sublayer, on one batch: how large the residual stream and the branch beside it are, the gradient, and what one update
    changes (Xiong et al. 2020; Liu et al. 2020)."""

    during: ClassVar[bool] = True
    others: ClassVar[tuple[str, ...]] = ("depth",)

    def measure(self, subject: Subject, at: At) -> Found:
        """Of one batch, by layer and sublayer, as depth/WHAT/SIDE/LAYER/SUBLAYER, and the last two of each matrix too, as .../SUBLAYER/MATRIX:

        stream    root mean square of the residual stream that the sublayer is given
        branch    of what it adds, as a share of that of the stream it is added to
        gradient  norm of the loss's gradient by its parameters
        update    norm of what the next update would change, as a share of its parameters' (while training)
        """
        config, mesh = subject.config, subject.mesh

        def profile(params, opt_state, batch):
            def loss(params):
                sums = batch_sums(subject.model, params, batch, config, mesh)
                return sum(one.loss / jnp.maximum(one.weight, 1.0) for one in sums.values())

            grads = jax.grad(loss)(params)
            updates = (
                subject.optimizer.update(grads, opt_state, params)[0]
                if opt_state is not None
                else None
            )
            _, told, _ = subject.watch(params, batch, "sizes")
            return (
                flatten(told["sizes"]),
                _squares(config.model, grads),
                _squares(config.model, params),
                updates and _squares(config.model, updates),
            )

        sizes, grads, params, updates = subject.program(self, profile)(
            at.params, at.opt_state, subject.batch
        )
        for name, (path, place) in where(config.model, sizes).items():
            side, layer, rest = in_layer(name)
            here = f"{side}/{layer:02d}/{residual_of(rest)}"
            of = {key: float(np.asarray(part(x, place))) for key, x in sizes[path][0].items()}
            yield f"depth/stream/{here}", of["stream"]
            yield f"depth/branch/{here}", of["branch"] / of["kept"] if of["kept"] else 1.0
        for here, square in grads.items():
            yield f"depth/gradient/{here}", float(square) ** 0.5
        for here, square in (updates or {}).items():
            yield f"depth/update/{here}", (float(square) / max(float(params[here]), 1e-30)) ** 0.5


def _squares(config: ModelConfig, tree) -> dict[str, jax.Array]:
    """SIDE/LAYER/SUBLAYER, and SIDE/LAYER/SUBLAYER/MATRIX -> the sum of squares of its parameters, norms left out."""
    flat, found = flatten(tree), collections.defaultdict(float)
    for name, (path, place) in where(config, flat).items():
        if at := in_layer(name):
            side, layer, (sublayer, matrix, *_) = *at[:2], at[2].split("/")
            if not sublayer.endswith("residual"):
                square = jnp.sum(jnp.square(part(flat[path], place).astype(jnp.float32)))
                found[f"{side}/{layer:02d}/{sublayer}"] += square
                found[f"{side}/{layer:02d}/{sublayer}/{matrix}"] += square
    return dict(found)
