"""Fused attention equals `reference` for position schemes with tables of vectors by distance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from test_attention_backends import bound_scheme
from test_flash import (
    BY_CONTENT,
    ORDERED,
    PAST,
    assert_matches_reference,
    make_inputs,
    random_qkv,
    small_tiles,  # noqa: F401
)

from transformer.model.attention_backends import Inputs
from transformer.model.attention_backends.flash import call, content
from transformer.model.positions import SCHEMES


@pytest.mark.parametrize(
    ("mask", "position"),
    [(mask, name) for mask in ("both ways", "causal", "everything") for name in BY_CONTENT]
    + [(mask, "shaw") for mask in ("window", "prefix", "cap", "sink", "dropout")],
)
def test_tables_of_distances_match_reference(mask, position):
    assert_matches_reference(*random_qkv(), make_inputs(mask, position))


@pytest.mark.parametrize("position", BY_CONTENT)
def test_tables_of_distances_in_large_tiles(position, monkeypatch):
    """Tiles of 2 x 2 blocks of 128, and a length that is no multiple of a tile."""
    monkeypatch.setattr(call, "COST", {"": {256: 1.0}})
    q, k, v = (x[:, :300] for x in random_qkv(kv_heads=1))
    tokens = jax.tree.map(lambda x: x[:, :300], ORDERED)
    scheme = bound_scheme(position, "decoder", tokens, 24, d_head=16)
    assert_matches_reference(q, k, v, Inputs(PAST, tokens, tokens, scheme, 0.3))


def test_rolls():
    """Rolling by the row and back, as the kernels' interpreter does it."""
    call_kernel = lambda f, x: pl.pallas_call(
        lambda x_ref, out_ref: out_ref.__setitem__(..., f(x_ref[...])), x, interpret=True
    )(x)
    x = jax.random.normal(jax.random.key(0), (128, 128))
    expected = np.stack([np.roll(row, r) for r, row in enumerate(np.asarray(x))])
    on_tpu = lambda x: pltpu.roll(x, 0, 1, stride=1, stride_axis=0)
    np.testing.assert_array_equal(call_kernel(on_tpu, x), expected)
    np.testing.assert_array_equal(content._roll(x), expected)
    np.testing.assert_array_equal(content._roll_back(jnp.asarray(expected)), x)


def test_a_changed_scheme_needs_terms_of_its_own():
    """A kernel must not compute a scheme without a subclass's change of it."""

    class Changed(SCHEMES["shaw"]):
        def value(self, out_BxTxNxH, weights_BxNxTxS, pair):
            return out_BxTxNxH

    class Described(Changed):
        def terms(self, distance_D, scale):
            return super().terms(distance_D, scale).replace(values_NxDxV=None)

    assert SCHEMES["shaw"]().has_terms and SCHEMES["alibi"]().has_terms
    assert not Changed().has_terms and Described().has_terms
    assert not SCHEMES["cope"]().has_terms
