"""Dropout (Srivastava et al. 2014)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.checks import is_zero


class Dropout(nn.Module):
    """Zeroes each element with probability `rate` and divides the others by 1 - rate. The mask is
    drawn from 16-bit integers, two per random word, because generating random bits is the larger
    part of dropout's cost. The rate is rounded to a multiple of 2^-16. It may be traced: runs that
    differ only in the rate share one program (lab/together.py)."""

    rate: float | jax.Array

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        if deterministic or is_zero(self.rate):
            return x
        return drop(self.make_rng("dropout"), self.rate, x)


def rate_of(config, override: float | jax.Array | None) -> float | jax.Array:
    """Returns the dropout rate: `override`, or the config's if that is None."""
    return config.dropout if override is None else override


def drop(key: jax.Array, rate: float | jax.Array, x: jax.Array) -> jax.Array:
    """Returns x with elements zeroed with probability `rate` and the others scaled up."""
    return jnp.where(keep_mask(key, rate, x.shape), x / (1.0 - rate), 0).astype(x.dtype)


def keep_mask(key: jax.Array, rate: float | jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws bool[shape]: each element is False with probability `rate`."""
    threshold = round(rate * 2**16)
    if shape[-1] % 2:
        return jax.random.bits(key, shape, jnp.uint16) >= threshold
    words = jax.random.bits(key, (*shape[:-1], shape[-1] // 2), jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(shape) >= threshold


# ---- Masks of pairs of tokens. Each is a function of the two tokens' numbers, so it is the same
# however the pairs are divided into blocks and over devices.


def seeds(key: jax.Array) -> jax.Array:
    """Returns int32[2]: the seeds of the two sides of pairs."""
    return jax.lax.bitcast_convert_type(jax.random.bits(key, (2,), jnp.uint32), jnp.int32)


def token_bits(seed: jax.Array, stream: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns random int32 of the shape of `tokens`, a function of (seed, stream, token). A stream
    is a head of a sequence. The mixing function is "lowbias32" (Wellons 2018)."""
    return _mix(_mix(seed + _mix(stream)) + tokens)


def keep_pairs(rate: float, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns whether each pair of tokens is kept, with probability 1 - rate. `a` and `b` are
    `token_bits` with different seeds, and are broadcast to a common shape."""
    x = a + b
    x = (x ^ jax.lax.shift_right_logical(x, 15)) * 0x2C1B3C6D
    return x >= round(rate * 2**32) - 2**31


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ jax.lax.shift_right_logical(x, 16)) * 0x7FEB352D
    x = (x ^ jax.lax.shift_right_logical(x, 15)) * (0x846CA68B - 2**32)
    return x ^ jax.lax.shift_right_logical(x, 16)
