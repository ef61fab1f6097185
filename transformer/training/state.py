"""What training changes: the step, the parameters, the optimizer's statistics, perhaps an average of the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh

from transformer.config import Experiment
from transformer.parallel.sharding import shardings, unbox


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


def example_inputs(config: Experiment) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Token arrays of the shape the model is initialised with."""
    tokens = jax.ShapeDtypeStruct((1, min(8, config.model.max_length)), jnp.int32)
    return (tokens,) * (2 if config.model.two_sides else 1)


def state_maker(config: Experiment, model: nn.Module, optimizer: optax.GradientTransformation):
    """key -> TrainState with logical names on every parameter."""
    tokens = [jnp.ones(t.shape, t.dtype) for t in example_inputs(config)]

    def make(key):
        params = model.init(key, *tokens)["params"]
        ema = jax.tree.map(jnp.copy, params) if config.train.ema_decay else None
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), ema)

    return make


def abstract_state(
    config: Experiment, model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[TrainState, TrainState]:
    """(shapes with shardings, shardings): what a checkpoint is restored into, nothing allocated."""
    boxed = jax.eval_shape(state_maker(config, model, optimizer), jax.random.key(config.seed))
    placed = shardings(boxed, mesh)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), unbox(boxed), placed)
    return shapes, placed


def init_state(
    config: Experiment, model: nn.Module, optimizer: optax.GradientTransformation, placed: TrainState
) -> TrainState:
    """The state of step 0, born sharded."""
    make = state_maker(config, model, optimizer)
    return jax.jit(lambda key: unbox(make(key)), out_shardings=placed)(jax.random.key(config.seed))
