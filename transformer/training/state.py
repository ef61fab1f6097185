"""What training changes: the step, the parameters, the optimizer's statistics, perhaps an average of the parameters."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh

from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.layout import flatten, join, part, where
from transformer.parallel.sharding import path_name, shardings, unbox
from transformer.training.config import TrainTask


@struct.dataclass
class TrainState:
    """Steps done, and their result. Randomness is no part of it: keys are folded from the seed and the step."""

    step: jax.Array
    params: Any
    opt_state: Any
    ema: Any = None

    @property
    def eval_params(self):
        """The parameters to evaluate: the moving average where there is one."""
        return self.params if self.ema is None else self.ema


def example_inputs(config: TrainTask) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Token arrays of the shape the model is initialised with."""
    tokens = jax.ShapeDtypeStruct((1, min(8, config.model.max_length)), jnp.int32)
    return (tokens,) * (2 if config.model.two_sides else 1)


def state_maker(config: TrainTask, model: nn.Module, optimizer: optax.GradientTransformation):
    """key -> TrainState with logical names on every parameter."""

    def make(key):
        tokens = [jnp.ones(t.shape, t.dtype) for t in example_inputs(config)]
        params = model.init(key, *tokens)["params"]
        ema = jax.tree.map(jnp.copy, params) if config.train.ema_decay else None
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), ema)

    return make


def abstract_state(
    config: TrainTask, model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[TrainState, TrainState]:
    """(shapes with shardings, shardings): what a checkpoint is restored into, nothing allocated."""
    key = jax.eval_shape(lambda: jax.random.key(config.seed))
    boxed = jax.eval_shape(state_maker(config, model, optimizer), key)
    placed = shardings(boxed, mesh)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), unbox(boxed), placed
    )
    return shapes, placed


LAYOUT = ("scan_layers", "pipeline_rounds")
"""The fields of a model that say where its layers' parameters stand, and nothing of what they are."""


def layout(model: ModelConfig) -> dict:
    """Where this model's layers stand."""
    return {field: getattr(model, field) for field in LAYOUT}


def relayout(
    state: TrainState, old: ModelConfig, new: ModelConfig, abstract: TrainState
) -> TrainState:
    """A state in `old`'s layout as `abstract`, in `new`'s. Raises UserError for a statistic that cannot be moved."""
    place = where(old, flatten(state.params))

    def moved(leaves):
        def one(path, target):
            prefix, param = _STACK.fullmatch(path_name(path)).groups()
            if not param:
                return leaves[prefix]
            get = lambda name: part(leaves[prefix + place[name][0]], place[name][1])
            x = join(new, param, get, jnp.stack)
            if x.shape != target.shape:
                raise UserError(
                    f"model.scan_layers, model.pipeline_rounds: {prefix}{param} cannot be moved; keep the old values"
                )
            return x

        return jax.tree_util.tree_map_with_path(one, abstract)

    leaves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}
    return jax.jit(moved, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))(leaves)


_STACK = re.compile(r"(.*?)((?:(?:encoder|decoder)/layers.*)?)")
"""What is before a layer's parameter in the path of a state's leaf, and that parameter's own path."""


def init_state(
    config: TrainTask,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    placed: TrainState,
) -> TrainState:
    """The state of step 0, born sharded."""
    make = state_maker(config, model, optimizer)
    return jax.jit(lambda key: unbox(make(key)), out_shardings=placed)(jax.random.key(config.seed))
