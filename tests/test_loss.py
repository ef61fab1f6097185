"""The chunked loss against its definition, and its hand-written gradient against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer.config import MeshConfig
from transformer.model.embedding import Head
from transformer.model.sharding import fitting
from transformer.parallel.mesh import make_mesh, use
from transformer.planning.hlo import HloProgram
from transformer.planning.work import collectives
from transformer.training.loss import auto_chunks, cross_entropy

B, T, D, V = 3, 8, 5, 11


def reference_loss(h, head, targets, weights, smoothing, z_loss):
    """Computes the loss from its definition, with one-hot targets."""
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
def test_value_and_gradient_match_the_definition(smoothing, z_loss, chunks, bias, soft_cap):
    keys = jax.random.split(jax.random.key(0), 5)
    h, head = (
        jax.random.normal(keys[0], (B, T, D)),
        Head(
            jax.random.normal(keys[1], (V, D)),
            jax.random.normal(keys[2], (V,)) if bias else None,
            soft_cap,
        ),
    )
    targets, weights = (
        jax.random.randint(keys[3], (B, T), 0, V),
        jax.random.bernoulli(keys[4], 0.7, (B, T)).astype(jnp.float32),
    )
    assert 0 < float(weights.mean()) < 1
    loss = lambda h, head: (
        3 * cross_entropy(h, head, targets, weights, smoothing, z_loss, chunks).loss
    )
    value, grads = jax.value_and_grad(loss, (0, 1))(h, head)
    expected, expected_grads = jax.value_and_grad(
        lambda h, head: 3 * reference_loss(h, head, targets, weights, smoothing, z_loss), (0, 1)
    )(h, head)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    # Without gradients, another code path computes the loss.
    assert float(loss(h, head)) == pytest.approx(float(expected), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected_grads)


def test_sums_of_correct_weight_and_nll():
    h, head = jnp.eye(3)[None], Head(4 * jnp.eye(3))
    sums = cross_entropy(h, head, jnp.array([[0, 1, 0]]), jnp.array([[1.0, 1.0, 1.0]]), 0.1, 0.0, 1)
    assert float(sums.correct) == 2
    assert float(sums.weight) == 3
    logsumexp = np.log(np.exp(4) + 2)
    assert float(sums.nll) == pytest.approx(2 * (logsumexp - 4) + logsumexp, rel=1e-5)


def test_accuracy_counts_argmax_targets():
    h, head = (
        jax.random.normal(jax.random.key(0), (4, 64, 32)),
        Head(jax.random.normal(jax.random.key(1), (4096, 32))),
    )
    best = jnp.argmax(head(h), -1)
    targets = best.at[:, ::2].add(1) % 4096
    sums = jax.jit(lambda: cross_entropy(h, head, targets, jnp.ones((4, 64)), 0.0, 0.0, 4))()
    assert float(sums.correct) == 4 * 32


def test_chunks_divide_the_length_and_bound_the_logits():
    mesh_of_one, mesh_of_eight = (
        make_mesh(MeshConfig(data=1)),
        make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)),
    )
    assert auto_chunks(64, 32, 16384, mesh_of_one) == 2
    assert auto_chunks(16, 64, 4096, mesh_of_one) == 1
    assert auto_chunks(64, 32, 16384, mesh_of_eight) == 1
    # A device has 16 sequences of 8,192 tokens and half of the vocabulary.
    assert auto_chunks(64, 8192, 128_000, mesh_of_eight) == 32
    assert auto_chunks(1, 8192, 128_000, make_mesh(MeshConfig(data=1, context=4, tensor=2))) == 1
    assert 30 % auto_chunks(512, 30, 65536, mesh_of_one) == 0


@pytest.mark.parametrize(
    "sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}]
)
def test_sharded_chunks_match_one_chunk_and_reduce_gradients_once(sizes):
    keys = jax.random.split(jax.random.key(0), 4)
    h, head = (
        jax.random.normal(keys[0], (4, 16, 8)),
        Head(jax.random.normal(keys[1], (12, 8)), jax.random.normal(keys[2], (12,))),
    )
    targets, weights = (
        jax.random.randint(keys[3], (4, 16), 0, 12),
        jnp.ones((4, 16)).at[1, 3:].set(0),
    )
    mesh = make_mesh(MeshConfig(**sizes))
    shard = lambda x, *names: jax.device_put(
        x,
        NamedSharding(
            mesh, PartitionSpec(*(fitting(n, x.shape[i]) or None for i, n in enumerate(names)))
        ),
    )
    with use(mesh):
        h, targets, weights = (shard(x, "batch", "length") for x in (h, targets, weights))
        head = Head(shard(head.matrix_VxE, "vocab", "embed"), shard(head.bias_V, "vocab"))

        def run(chunks):
            value_and_grad = jax.jit(
                jax.value_and_grad(
                    lambda h, head: (
                        cross_entropy(h, head, targets, weights, 0.1, 0.01, chunks).loss
                    ),
                    (0, 1),
                )
            )
            return value_and_grad(h, head), value_and_grad.lower(h, head).compile().as_text()

        (value, grads), text = run(4)
        (expected, expected_grads), _ = run(1)
        value_only = jax.jit(
            lambda h, head: cross_entropy(h, head, targets, weights, 0.1, 0.01, 4).loss
        )(h, head)
    assert float(value) == pytest.approx(float(expected), rel=1e-5) and float(
        value_only
    ) == pytest.approx(float(value), rel=1e-5)
    assert all(np.abs(g).max() > 0.1 for g in jax.tree.leaves(grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), grads, expected_grads)
    reductions = [
        collective
        for collective in collectives(HloProgram.read(text))
        if collective.groups.shape[1] == 4 and collective.bytes >= 6 * 8 * 4
    ]
    # The gradient of the matrix is reduced once, not once per chunk.
    assert reductions and all(collective.times == 1 for collective in reductions)
