"""Causal convolutions over the last tokens of a document: of Gated DeltaNet, and Canon layers.
Shape suffixes: B batch, T new tokens, L all tokens with those before, F channels (several axes)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.masks import Tokens
from transformer.model.modules import Config, declare

WIDTH = 4  # tokens that a Canon layer reads, including the current one


def convolved(module: nn.Module, name: str, width: int, names, x_BxLxF, segments_BxL, length: int):
    """Declares a kernel w, and returns y_t = sum_i w_i x_(t - i), i < `width`, for each channel and
    the last `length` tokens, [B, T, F]. Tokens of other documents than that of token t count as
    zero. The initial w is uniform within 1 / sqrt(width) of 0. `names`: those of the channels."""
    total, bounds = segments_BxL.shape[1], (-(width**-0.5), width**-0.5)
    init = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, *bounds)
    kernel = declare(module, name, init, (None, *names), (width, *x_BxLxF.shape[2:]))
    y_BxTxF = 0.0
    for i in range(width):
        shifted = slice(total - length - i, total - i)
        same_document_BxT = segments_BxL[:, shifted] == segments_BxL[:, -length:]
        mask = same_document_BxT.reshape(*same_document_BxT.shape, *[1] * (x_BxLxF.ndim - 2))
        y_BxTxF += jnp.where(mask, x_BxLxF[:, shifted], 0) * kernel[i].astype(x_BxLxF.dtype)
    return y_BxTxF


class Canon:
    """The Canon layers of one layer, x_t + sum_(i < 4) w_i x_(t - i) (Allen-Zhu 2025, "Physics of
    Language Models: Part 4.1", arXiv:2512.17351), at the places that `model.canon` names:

    A: the input of attention, after its norm. B: queries, keys and values, after their norms and
    before positions. C: the input of the feed-forward, after its norm. D: the feed-forward's hidden
    features and gate, before the activation. There is no bias and no activation."""

    def __init__(self, config: Config, tokens: Tokens, before: Mapping[str, jax.Array] | None):
        """`before`: the last three inputs of each place and their segments, or None; as `state`."""
        self._places, self._tokens, self._before = config.canon, tokens, before or {}
        self.state: dict[str, jax.Array] = {}

    def __call__(self, module: nn.Module, place: str, names: tuple[str, ...], x_BxTxF: jax.Array):
        if place[0] not in self._places:
            return x_BxTxF
        segments_BxT = jnp.broadcast_to(self._tokens.segments_BxT, x_BxTxF.shape[:2])
        inputs = {place: x_BxTxF, "segments": segments_BxT}
        for key, x in inputs.items():
            none = jnp.zeros((len(x), WIDTH - 1, *x.shape[2:]), x.dtype)
            inputs[key] = jnp.concatenate([self._before.get(key, none), x], axis=1)
        self.state |= {key: x[:, 1 - WIDTH :] for key, x in inputs.items()}
        name, length = f"canon_{place}", x_BxTxF.shape[1]
        return x_BxTxF + convolved(module, name, WIDTH, names, *inputs.values(), length)
