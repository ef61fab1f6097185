"""Nonlinearities of the feed-forward sublayer, by name."""

import functools

import jax

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),  # x Phi(x)
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),  # GPT-2's form
    "silu": jax.nn.silu,
}
