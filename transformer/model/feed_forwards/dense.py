"""The position-wise feed-forward. Shape suffixes: B batch, T length, D d_model, F d_ff."""

import functools

import jax
from flax import linen as nn

from transformer.model.activations import ACTIVATIONS, gated
from transformer.model.config import ModelConfig
from transformer.model.dropout import Dropout
from transformer.model.feed_forwards.base import FEED_FORWARDS, FeedForward
from transformer.model.linear import Linear
from transformer.model.masks import Tokens
from transformer.model.sharding import constrain


@FEED_FORWARDS.register("dense")
class Dense(FeedForward):
    """The same MLP for every token."""

    def build(self, config, gain, out_gain):
        return functools.partial(MLP, config, gain, out_gain)


class MLP(nn.Module):
    """act(x W_in + b_in) W_out + b_out. With `glu`, (act(x W_gate + b_gate) * (x W_in + b_in))
    W_out + b_out (Shazeer 2020)."""

    config: ModelConfig
    gain: float  # scales the initial W_in, W_gate and W_out
    out_gain: float  # additionally scales the initial W_out

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, tokens: Tokens, deterministic: bool) -> jax.Array:
        cfg, names, act = self.config, ("embed", "ff"), ACTIVATIONS[self.config.activation]
        up = functools.partial(Linear, cfg, (cfg.ff_size,), names, cfg.use_bias, self.gain)
        h_BxTxF = up(name="in")(x_BxTxD)
        gate = lambda: up(name="gate")(x_BxTxD)
        h_BxTxF = gated(act, cfg.glu_limit, gate(), h_BxTxF) if cfg.glu else act(h_BxTxF)
        h_BxTxF = constrain(h_BxTxF, ("batch", "length", "activation_ff"))
        h_BxTxF = Dropout(cfg.activation_dropout)(h_BxTxF, deterministic)
        gain = self.gain * self.out_gain
        return Linear(cfg, (cfg.d_model,), ("ff", "embed"), cfg.use_bias, gain, name="out")(h_BxTxF)
