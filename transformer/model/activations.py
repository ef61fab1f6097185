"""Activation functions of the feed-forward, by name, and the soft cap on logits."""

import functools

import jax
import jax.numpy as jnp

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),  # x Phi(x)
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),  # the approximation of GPT-2
    "silu": jax.nn.silu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, "Primer"
    "linear": lambda x: x,
}


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """Computes cap tanh(x / cap): near x for small x, at most cap (Bello et al. 2016; Gemma 2)."""
    return cap * jnp.tanh(x / cap)
