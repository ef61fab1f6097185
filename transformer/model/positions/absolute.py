"""Positions that are added to the token embeddings: learned and sinusoidal."""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.limits import Count, NonNegative, Positive
from transformer.model.positions.base import Position, declare, option, register


@register("learned")
class Learned(Position):
    """Learned position embeddings: x_t + P[t + offset] (Gehring et al. 2017; GPT-2, BERT, BART).

    P: [max_length + offset, d_model] is learned.

    Parameters: (max_length + offset) * d_model per stack.
    Cache: the embedding of the new token's position is looked up.
    Beyond the training length: undefined; lengths over `max_length` raise an error."""

    bounded: ClassVar[bool] = True
    ends: ClassVar[bool] = True

    offset: Count = option(0)
    init_std: NonNegative = option(0.02)
    table_MxD: jax.Array | None = None

    def bind(self, param, facts):
        shape, names = (facts.max_length + self.offset, facts.d_model), ("positions", "embed")
        init = nn.initializers.normal(self.init_std)
        table = declare(param, facts, "position_embedding", shape, names, init)
        return self.replace(table_MxD=table)

    def embed(self, x_BxTxD, positions_BxT):
        return x_BxTxD + self.table_MxD[positions_BxT + self.offset].astype(x_BxTxD.dtype)


@register("sinusoidal")
class Sinusoidal(Position):
    """Sinusoidal position embeddings: x_t + PE(t) (Vaswani et al. 2017, sec. 3.5).

        PE(t)_{2i} = sin(t / base^(2i/d)),   PE(t)_{2i+1} = cos(t / base^(2i/d))

    `layout="halves"` permutes the values: all sines come before all cosines, as in tensor2tensor
    and Marian. `offset` is added to t; fairseq counts from 2.

    Parameters: none.
    Cache: PE is computed at the new token's position.
    Beyond the training length: defined, but perplexity rises at once (Press et al. 2022)."""

    base: Positive = option(10_000.0)
    layout: Literal["interleaved", "halves"] = option("interleaved")
    offset: Count = option(0)

    def check(self, facts):
        needs = f"{self.name!r} needs an even model.d_model; change one of them"
        return f"model.position: {needs}" if facts.d_model % 2 else None

    def embed(self, x_BxTxD, positions_BxT):
        values = sinusoids(positions_BxT + self.offset, x_BxTxD.shape[-1], self.base, self.layout)
        return x_BxTxD + values.astype(x_BxTxD.dtype)


def sinusoids(positions_BxT, d_model: int, base: float, layout: str = "interleaved") -> jax.Array:
    """Returns float32[B, T, d_model], the sines and cosines of Vaswani et al. (2017, sec. 3.5)."""
    frequency_D2 = base ** (-jnp.arange(0, d_model, 2, dtype=jnp.float32) / d_model)
    phase = positions_BxT[..., None].astype(jnp.float32) * frequency_D2
    sin_and_cos = jnp.sin(phase), jnp.cos(phase)
    if layout == "halves":
        return jnp.concatenate(sin_and_cos, axis=-1)
    return jnp.stack(sin_and_cos, axis=-1).reshape(*phase.shape[:-1], d_model)
