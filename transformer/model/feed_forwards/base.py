"""The interface of feed-forwards, and the dense one. Fields are options.
Shape suffixes: B batch, T length, D d_model, F d_ff."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
from flax import linen as nn

from transformer.model.dropout import Dropout
from transformer.model.mixers.base import Context
from transformer.model.modules import ACTIVATIONS, Config, Linear, gated
from transformer.model.sharding import constrain
from transformer.registry import Registry

FEED_FORWARDS = Registry("model.feed_forward", __package__)


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """The base class of feed-forwards. Register one with `@FEED_FORWARDS.register("name")`."""

    exists: ClassVar[bool] = True  # whether a layer has the sublayer; if not, `build` is not called

    def build(self, config: Config, gain: float, out_gain: float) -> Callable[..., nn.Module]:
        """Returns a function that constructs the module from its `name`. The module is called with
        (x_BxTxD, context: Context, deterministic: bool) and returns out_BxTxD. `gain` scales the
        initial values of its matrices. `out_gain` additionally scales those of the last one."""
        raise NotImplementedError


@FEED_FORWARDS.register("none")
class NoFeedForward(FeedForward):
    """No feed-forward sublayer, as in attention-only models and stacked LSTMs."""

    exists = False


@FEED_FORWARDS.register("dense")
class Dense(FeedForward):
    """The same MLP for every token."""

    def build(self, config, gain, out_gain):
        return functools.partial(MLP, config, gain, out_gain)


class MLP(nn.Module):
    """act(x W_in + b_in) W_out + b_out. With `glu`, (act(x W_gate + b_gate) * (x W_in + b_in))
    W_out + b_out (Shazeer 2020)."""

    config: Config
    gain: float  # scales the initial W_in, W_gate and W_out
    out_gain: float  # additionally scales the initial W_out

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, context: Context, deterministic: bool) -> jax.Array:
        cfg, names, act = self.config, ("embed", "ff"), ACTIVATIONS[self.config.activation]
        up = functools.partial(Linear, cfg, (cfg.ff_size,), names, cfg.use_bias, self.gain)
        hidden = lambda name: context.canon(self, f"D_{name}", ("ff",), up(name=name)(x_BxTxD))
        h_BxTxF = hidden("in")
        h_BxTxF = gated(act, cfg.glu_limit, hidden("gate"), h_BxTxF) if cfg.glu else act(h_BxTxF)
        h_BxTxF = constrain(h_BxTxF, ("batch", "length", "activation_ff"))
        h_BxTxF = Dropout(cfg.activation_dropout)(h_BxTxF, deterministic)
        gain = self.gain * self.out_gain
        return Linear(cfg, (cfg.d_model,), ("ff", "embed"), cfg.use_bias, gain, name="out")(h_BxTxF)
