"""The chunked loss against the plain formula, and its hand-written gradient against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.model.embedding import Head
from transformer.training.loss import auto_chunks, cross_entropy

B, T, D, V = 3, 8, 5, 11


def plain(h, head, targets, weights, smoothing, z_loss):
    """From the definition, by one-hot targets."""
    logits = h @ head.matrix_VxE.T + (0 if head.bias_V is None else head.bias_V)
    if head.soft_cap:
        logits = head.soft_cap * jnp.tanh(logits / head.soft_cap)
    logp = jax.nn.log_softmax(logits)
    q = (1 - smoothing) * jax.nn.one_hot(targets, V) + smoothing / V
    token = -(q * logp).sum(-1) + z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return (token * weights).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(("bias", "soft_cap"), [(True, 0.0), (False, 2.0)])
def test_value_and_gradient(smoothing, z_loss, chunks, bias, soft_cap):
    k = jax.random.split(jax.random.key(0), 5)
    h, head = (
        jax.random.normal(k[0], (B, T, D)),
        Head(jax.random.normal(k[1], (V, D)), jax.random.normal(k[2], (V,)) if bias else None, soft_cap),
    )
    targets, weights = (
        jax.random.randint(k[3], (B, T), 0, V),
        jax.random.bernoulli(k[4], 0.7, (B, T)).astype(jnp.float32),
    )
    assert 0 < float(weights.mean()) < 1
    ours = lambda h, head: 3 * cross_entropy(h, head, targets, weights, smoothing, z_loss, chunks).loss
    value, grads = jax.value_and_grad(ours, (0, 1))(h, head)
    expected, expected_grads = jax.value_and_grad(
        lambda h, head: 3 * plain(h, head, targets, weights, smoothing, z_loss), (0, 1)
    )(h, head)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert float(ours(h, head)) == pytest.approx(float(expected), rel=1e-5)  # the path without gradients
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected_grads)


def test_the_other_sums():
    h, head = jnp.eye(3)[None], Head(4 * jnp.eye(3))
    sums = cross_entropy(h, head, jnp.array([[0, 1, 0]]), jnp.array([[1.0, 1.0, 1.0]]), 0.1, 0.0, 1)
    assert float(sums.correct) == 2
    assert float(sums.weight) == 3
    z = np.log(np.exp(4) + 2)
    assert float(sums.nll) == pytest.approx(2 * (z - 4) + z, rel=1e-5)


def test_accuracy_counts_every_target_that_is_the_likeliest():
    h, head = jax.random.normal(jax.random.key(0), (4, 64, 32)), Head(jax.random.normal(jax.random.key(1), (4096, 32)))
    best = jnp.argmax(head(h), -1)
    targets = best.at[:, ::2].add(1) % 4096
    sums = jax.jit(lambda: cross_entropy(h, head, targets, jnp.ones((4, 64)), 0.0, 0.0, 4))()
    assert float(sums.correct) == 4 * 32


def test_chunks_divide_the_length_and_bound_the_logits():
    assert auto_chunks(64, 32, 16384, devices=1) == 2
    assert auto_chunks(16, 64, 4096, devices=1) == 1
    assert auto_chunks(64, 32, 16384, devices=8) == 1
    assert 30 % auto_chunks(512, 30, 65536, devices=1) == 0
