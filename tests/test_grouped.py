"""Grouped matrix products: `ragged_dot` and interpreted TPU kernels against a loop over rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.model.feed_forwards.experts import grouped_product, megablox_product

HOW = {
    "ragged_dot": grouped_product,
    "kernels": lambda *args: megablox_product(*args, interpret=True),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("rows", "inner", "outer", "sizes"),
    [
        (40, 24, 36, (7, 0, 20)),  # the last 13 rows belong to no group
        (600, 130, 96, (3, 500, 10)),  # more rows than a tile
        (64, 16, 8, (0, 0, 0)),
        (1000, 16, 8, (400, 600, 0)),
    ],
)
def test_grouped_product_matches_loop_over_rows(how, rows, inner, outer, sizes):
    """Checks values and gradients. Rows without a group, and their gradients, affect nothing."""
    rng, total = np.random.default_rng(0), sum(sizes)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    x, w, dy = draw(rows, inner), draw(3, inner, outer), draw(rows, outer)
    x[total:] = np.nan if how == "kernels" else 1e3  # ragged_dot on CPUs multiplies them by zero
    y, back = jax.vjp(lambda x, w: HOW[how](x, w, jnp.array(sizes)), jnp.asarray(x), jnp.asarray(w))
    actual = (y, *back(jnp.asarray(dy)))
    group = np.repeat(range(3), sizes)
    expected_y, expected_dx, expected_dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    for n, g in enumerate(group):
        expected_y[n], expected_dx[n] = x[n] @ w[g], w[g] @ dy[n]
        expected_dw[g] += np.outer(x[n], dy[n])
    for array, expected in zip(actual, (expected_y, expected_dx, expected_dw), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-4)
