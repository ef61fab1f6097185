"""The train state: step, parameters, optimizer state and, optionally, averaged parameters."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn, struct
from jax.sharding import Mesh

from transformer.data.config import Task
from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.layout import flatten, join, part, where
from transformer.parallel.sharding import path_name, shardings, unbox


@struct.dataclass
class TrainState:
    """The state that training updates. It needs no PRNG key: seed and step determine keys."""

    step: jax.Array
    params: Any
    opt_state: Any
    ema: Any = None

    @property
    def eval_params(self):
        """The parameters to evaluate: the moving average if there is one."""
        return self.params if self.ema is None else self.ema


def state_maker(config: Task, model: nn.Module, optimizer: optax.GradientTransformation):
    """Returns a function key -> TrainState, with logical axis names on every parameter."""

    def make(key):
        tokens = [jnp.ones((1, 1), jnp.int32)] * len(config.model.sides)
        params = model.init_with_axes(key, *tokens)
        ema = jax.tree.map(jnp.copy, params) if config.train.ema_decay else None
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), ema)

    return make


def abstract_state(
    config: Task, model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[TrainState, TrainState]:
    """Returns the state's shapes (with shardings) and its shardings, without allocating memory."""
    key = jax.eval_shape(lambda: jax.random.key(config.seed))
    boxed = jax.eval_shape(state_maker(config, model, optimizer), key)
    state_shardings = shardings(boxed, mesh)
    shape = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(shape, unbox(boxed), state_shardings), state_shardings


def layout(model: ModelConfig) -> dict:
    """Returns the fields that determine only how this model stores the parameters of its layers."""
    return {field: getattr(model, field) for field in ("scan_layers", "pipeline_rounds")}


def relayout(
    state: TrainState, old: ModelConfig, new: ModelConfig, abstract: TrainState
) -> TrainState:
    """Converts a state from the layout of `old` to that of `new`, with the shardings of `abstract`.
    Raises UserError for an optimizer statistic that cannot be converted."""
    place = where(old, flatten(state.params))

    def converted(leaves):
        def convert(path, target):
            # A prefix, and the path of a layer's parameter
            split = re.fullmatch(r"(.*?)((?:(?:encoder|decoder)/layers.*)?)", path_name(path))
            prefix, param = split.groups()
            if not param:
                return leaves[prefix]
            get = lambda name: part(leaves[prefix + place[name][0]], place[name][1])
            x = join(new, param, get, jnp.stack)
            if x.shape != target.shape:
                problem = f"{prefix}{param} cannot be converted; keep the old values"
                raise UserError(f"model.scan_layers, model.pipeline_rounds: {problem}")
            return x

        return jax.tree_util.tree_map_with_path(convert, abstract)

    leaves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}
    return jax.jit(converted, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))(leaves)


def init_state(
    config: Task, model: nn.Module, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """Initializes the state of step 0, sharded as `shardings` (from `abstract_state`)."""
    make = state_maker(config, model, optimizer)
    init = jax.jit(lambda key: unbox(make(key)), out_shardings=shardings)
    return init(jax.random.key(config.seed))
