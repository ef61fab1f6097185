"""Eight simulated devices, a shared compilation cache, and small models."""

import contextlib
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # models are made here, none is fetched

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from transformer import ModelConfig, UserError, build_model
from transformer.model.positions import SCHEMES

jax.config.update("jax_compilation_cache_dir", os.environ.get("TRANSFORMER_TEST_CACHE", "/tmp/transformer-test-cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_numpy_rank_promotion", "allow")

SMALL = {
    "vocab_size": 37, "d_model": 16, "d_ff": 32, "num_heads": 4, "num_kv_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "max_length": 24,
}  # fmt: skip

TINY = {
    "vocab_size": 40, "d_model": 16, "d_ff": 32, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "max_length": 16,
}  # fmt: skip
"""The sizes of models that tests train: divisible by every mesh of eight devices."""


def small(family: str, **fields) -> ModelConfig:
    """A model of a few thousand parameters."""
    return ModelConfig(**{"family": family, **SMALL, **fields})


def schemes(*families: str) -> list[tuple[str, str]]:
    """(family, position) for every scheme that serves it: some need a causal mask."""
    served = []
    for family in families:
        for name in SCHEMES:
            with contextlib.suppress(UserError):
                small(family, position=name)
                served.append((family, name))
    return served


def tokens(seed: int, batch: int, length: int, vocab: int = 37) -> jax.Array:
    """Random ids, none of them special."""
    return jnp.asarray(np.random.default_rng(seed).integers(4, vocab, (batch, length)), jnp.int32)


def make(config: ModelConfig, seed: int = 0, noise: float = 0.3):
    """(model, params). Every parameter is moved off its initial value, so that gains, offsets, biases, gates and tables matter."""
    model = build_model(config)
    args = (tokens(0, 1, 4),) * (2 if config.family == "encoder_decoder" else 1)
    params = meta.unbox(jax.jit(model.init)(jax.random.key(seed), *args))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    moved = [x + noise * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
    return model, jax.tree.unflatten(tree, moved)


def random_params(config: ModelConfig, seed: int = 0, noise: float = 0.3):
    """(model, params) of random numbers, without compiling an initialisation: gains near 1, everything else near 0."""
    model, args = build_model(config), (jnp.zeros((1, 1), jnp.int32),) * (1 + (config.family == "encoder_decoder"))
    abstract = meta.unbox(jax.eval_shape(model.init, jax.random.key(0), *args))
    generator = np.random.default_rng(seed)

    def draw(path, x):
        start = 1.0 if path[-1].key == "gain" and not config.norm_zero_centered else 0.0
        return jnp.asarray(start + noise * generator.standard_normal(x.shape), x.dtype)

    return model, jax.tree_util.tree_map_with_path(draw, abstract)


@pytest.fixture(autouse=True)
def own_data_home(tmp_path_factory, monkeypatch):
    """Token stores of tests stay out of the user's cache, and are shared between tests of one session."""
    monkeypatch.setenv("TRANSFORMER_DATA", str(tmp_path_factory.getbasetemp() / "data"))
