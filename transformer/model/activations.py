"""Nonlinearities: those of the feed-forward sublayer, by name, and the cap on logits."""

import functools

import jax
import jax.numpy as jnp

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),  # x Phi(x)
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),  # GPT-2's form
    "silu": jax.nn.silu,
}


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """cap tanh(x / cap): x near 0, never beyond +-cap (Bello et al. 2016; Gemma 2)."""
    return cap * jnp.tanh(x / cap)
