"""Activation functions of the feed-forward, by name, gated units, and the soft cap on logits."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),  # x Phi(x)
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),  # the approximation of GPT-2
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # Hendrycks & Gimpel 2016, section 2
    "silu": jax.nn.silu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, "Primer"
    "linear": lambda x: x,
}


def gated(act: Callable, limit: float, gate: jax.Array, x: jax.Array) -> jax.Array:
    """Computes act(gate) * x (Shazeer 2020). With a limit c, computes act(min(gate, c)) *
    (clip(x, -c, c) + 1), as in GPT-OSS (OpenAI 2025)."""
    if not limit:
        return act(gate) * x
    return act(jnp.minimum(gate, limit)) * (jnp.clip(x, -limit, limit) + 1)


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """Computes cap tanh(x / cap): near x for small x, at most cap (Bello et al. 2016; Gemma 2)."""
    return cap * jnp.tanh(x / cap)
