"""Rows in groups: TPUs' kernels, interpreted, against a product for each group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.model.grouped import grouped_product, megablox_product

HOW = {
    "ragged_dot": grouped_product,
    "kernels": lambda *given: megablox_product(*given, interpret=True),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("rows", "inner", "outer", "sizes"),
    [
        (40, 24, 36, (7, 0, 20)),  # the last 13 rows are nobody's
        (600, 130, 96, (3, 500, 10)),  # more than a tile
        (64, 16, 8, (0, 0, 0)),
        (1000, 16, 8, (400, 600, 0)),
    ],
)
def test_each_row_meets_its_groups_matrix_alone(how, rows, inner, outer, sizes):
    """Values and gradients; what rows and gradients of nobody hold reaches nothing."""
    rng, total = np.random.default_rng(0), sum(sizes)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    x, w, d = draw(rows, inner), draw(3, inner, outer), draw(rows, outer)
    x[total:] = np.nan if how == "kernels" else 1e3  # ragged_dot on CPUs multiplies them by zero
    y, back = jax.vjp(lambda x, w: HOW[how](x, w, jnp.array(sizes)), jnp.asarray(x), jnp.asarray(w))
    found = (y, *back(jnp.asarray(d)))
    group = np.repeat(range(3), sizes)
    wanted_y, wanted_dx, wanted_dw = np.zeros_like(d), np.zeros_like(x), np.zeros_like(w)
    for n, g in enumerate(group):
        wanted_y[n], wanted_dx[n] = x[n] @ w[g], w[g] @ d[n]
        wanted_dw[g] += np.outer(x[n], d[n])
    for one, wanted in zip(found, (wanted_y, wanted_dx, wanted_dw), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-4)
