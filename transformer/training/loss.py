"""Cross-entropy with label smoothing and z-loss, from the last hidden state, a chunk of logits at a time.

Shape suffixes: B batch, T length, C length of a chunk, D d_model, V vocabulary.

With logits l, log Z = logsumexp(l), target y and smoothing e, the loss of a token is

    (1 - e) (log Z - l_y) + e (log Z - mean(l)) + z (log Z)^2

(label smoothing: Szegedy et al. 2016, Vaswani et al. 2017 sec. 5.4; z-loss: Chowdhery et al. 2022). Its gradient by the
logits, (1 + 2 z log Z) softmax(l) - (1 - e) onehot(y) - e / V, is at hand as soon as the loss is, so the forward pass
turns each chunk of logits into gradients by the hidden state and the matrix and forgets it. That saves B*T*V numbers of
memory and, on a CPU, a tenth of the step.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from transformer.model.embedding import Head
from transformer.model.sharding import fitting
from transformer.parallel.sharding import row_parts


@struct.dataclass
class Sums:
    """Sums over tokens, each weighted; divide by `weight` for a mean."""

    loss: jax.Array  # what is minimised
    nll: jax.Array  # -log p(target), in nats
    correct: jax.Array  # the target is the most likely token
    weight: jax.Array

    @staticmethod
    def zero() -> "Sums":
        return Sums(*(jnp.zeros((), jnp.float32) for _ in range(4)))

    def means(self) -> dict[str, jax.Array]:
        """Per unit of weight."""
        weight = jnp.maximum(self.weight, 1.0)
        return {"loss": self.nll / weight, "accuracy": self.correct / weight}


@struct.dataclass
class RouterSums:
    """What the routers of experts cost, and report (model/feed_forwards/experts.py), times the number of tokens that they sent somewhere."""

    loss: jax.Array  # of all layers, added up
    reports: dict[str, jax.Array]  # each a mean over layers
    weight: jax.Array

    @staticmethod
    def of(sown, weight: jax.Array) -> "RouterSums":
        """From what layers sowed, one by one or stacked."""
        found: dict[str, list] = {}
        for path, x in jax.tree_util.tree_leaves_with_path(sown):
            found.setdefault(path[-1].key, []).append(jnp.ravel(x))
        found = {name: weight * jnp.concatenate(parts) for name, parts in found.items()}
        loss = jnp.sum(found.pop("loss"))
        return RouterSums(loss, {name: jnp.mean(x) for name, x in found.items()}, weight)

    def means(self) -> dict[str, jax.Array]:
        """Per token."""
        return {name: x / jnp.maximum(self.weight, 1.0) for name, x in self.reports.items()}


def label_sums(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, smoothing: float = 0.0
) -> Sums:
    """The loss's sums over classes: logits [..., C] against int32[...]. Differentiable through `Sums.loss`."""
    logp = jax.nn.log_softmax(logits, axis=-1)
    nll = -jnp.take_along_axis(logp, labels[..., None], axis=-1)[..., 0]
    loss = (1 - smoothing) * nll - smoothing * jnp.mean(logp, axis=-1)
    correct = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    total = lambda x: jnp.sum(x * weights)
    return Sums(total(loss), total(nll), total(correct), jnp.sum(weights))


def _chunk(h_BxCxD, head: Head, targets_BxC, weights_BxC, smoothing: float, z_loss: float):
    """The sums of one chunk, and what its gradient needs: logits, log Z and where the targets are."""
    logits_BxCxV = head(h_BxCxD)
    vocab = logits_BxCxV.shape[-1]
    log_z_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1)
    hit_BxCxV = jax.lax.broadcasted_iota(jnp.int32, logits_BxCxV.shape, 2) == targets_BxC[..., None]
    target_BxC = jnp.sum(jnp.where(hit_BxCxV, logits_BxCxV, 0.0), axis=-1)
    nll_BxC = log_z_BxC - target_BxC
    loss_BxC = nll_BxC
    if smoothing:
        loss_BxC = (1 - smoothing) * nll_BxC + smoothing * (
            log_z_BxC - jnp.sum(logits_BxCxV, axis=-1) / vocab
        )
    if z_loss:
        loss_BxC = loss_BxC + z_loss * jnp.square(log_z_BxC)
    correct_BxC = jnp.max(logits_BxCxV, axis=-1) <= target_BxC
    total = lambda x_BxC: jnp.sum(x_BxC * weights_BxC)
    sums = Sums(
        total(loss_BxC),
        total(nll_BxC),
        total(correct_BxC.astype(jnp.float32)),
        jnp.sum(weights_BxC),
    )
    return sums, (logits_BxCxV, log_z_BxC, hit_BxCxV)


def _chunk_gradient(kept, weights_BxC, smoothing: float, z_loss: float):
    """d loss / d logits of one chunk."""
    logits_BxCxV, log_z_BxC, hit_BxCxV = kept
    p_BxCxV = jnp.exp(logits_BxCxV - log_z_BxC[..., None])
    if z_loss:
        p_BxCxV = p_BxCxV * (1 + 2 * z_loss * log_z_BxC[..., None])
    d_BxCxV = p_BxCxV - jnp.where(hit_BxCxV, 1 - smoothing, 0.0)
    if smoothing:
        d_BxCxV = d_BxCxV - smoothing / logits_BxCxV.shape[-1]
    return d_BxCxV * weights_BxC[..., None]


def _chunks(x, count: int):
    """[B, T, ...] -> [count, B, T / count, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def cross_entropy(
    h_BxTxD,
    head: Head,
    targets_BxT,
    weights_BxT,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunks: int = 1,
) -> Sums:
    """The loss's sums over a batch; differentiable in `h` and `head`, through `Sums.loss` alone. `chunks` divides T (what a device holds
    of it)."""

    def here(h, head, targets, weights):
        add = lambda sums, chunk: (
            jax.tree.map(jnp.add, sums, _chunk(chunk[0], head, *chunk[1:], smoothing, z_loss)[0]),
            None,
        )
        return (
            jax.lax.scan(
                add, Sums.zero(), tuple(_chunks(x, chunks) for x in (h, targets, weights))
            )[0],
            None,
            None,
        )

    return _on_each_device(here, chunks, h_BxTxD, head, targets_BxT, weights_BxT)[0]


def _forward(h_BxTxD, head: Head, targets_BxT, weights_BxT, smoothing, z_loss, chunks):
    def here(h, head, targets, weights):
        def add(carry, chunk):
            sums, d_head = carry
            h, targets, weights = chunk
            own, kept = _chunk(h, head, targets, weights, smoothing, z_loss)
            d_logits = _chunk_gradient(kept, weights, smoothing, z_loss)
            d_h, own_d_head = head.pull_back(h, kept[0], d_logits)
            return (
                jax.tree.map(jnp.add, sums, own),
                jax.tree.map(jnp.add, d_head, own_d_head),
            ), d_h

        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), head)
        parts = tuple(_chunks(x, chunks) for x in (h, targets, weights))
        (sums, d_head), d_h = jax.lax.scan(add, (Sums.zero(), zero), parts)
        return sums, jnp.moveaxis(d_h, 0, 1).reshape(h.shape), d_head

    sums, d_h_BxTxD, d_head = _on_each_device(here, chunks, h_BxTxD, head, targets_BxT, weights_BxT)
    return sums, (d_h_BxTxD, jax.tree.map(lambda d, x: d.astype(x.dtype), d_head, head))


def _backward(smoothing, z_loss, chunks, kept, cotangent: Sums):
    d_h, d_head = jax.tree.map(lambda d: (cotangent.loss * d).astype(d.dtype), kept)
    return d_h, d_head, None, None


cross_entropy.defvjp(_forward, _backward)


def _on_each_device(work, chunks: int, h_BxTxD, head: Head, targets_BxT, weights_BxT):
    """(sums, gradient by h, gradient by the head) of `work`. Several chunks on several devices are gone through by each device for its own
    tokens: gradients by the head are added up over devices once, behind the last chunk, and not once a chunk."""
    rows, length = fitting("batch", h_BxTxD.shape[0]), fitting("length", h_BxTxD.shape[1])
    axes = (*rows, *length)
    if chunks == 1 or not axes:
        return work(h_BxTxD, head, targets_BxT, weights_BxT)

    def here(*own):
        sums, d_h, d_head = work(*own)
        return jax.lax.psum(sums, axes), d_h, jax.tree.map(lambda x: x[None], d_head)

    spread = P(rows or None, length or None)
    by_device = jax.shard_map(
        here,
        in_specs=(spread, P(), spread, spread),
        out_specs=(P(), spread, P(axes)),
        axis_names=set(axes),
        check_vma=False,
    )
    sums, d_h_BxTxD, d_head = by_device(
        h_BxTxD, head.ready(h_BxTxD.dtype), targets_BxT, weights_BxT
    )
    return sums, d_h_BxTxD, jax.tree.map(lambda x: jnp.sum(x, axis=0), d_head)


def auto_chunks(batch: int, length: int, vocab: int, mesh: Mesh) -> int:
    """How many chunks keep a chunk's logits near 2^23 numbers, but no fewer than 1,024 tokens; on several devices near 2^27 numbers of
    each (half a GB), but no fewer than 2,048 tokens: a chunk there reads and writes the gradient by the matrix, which all devices hold whole.
    """
    batch, length = batch // min(row_parts(mesh), batch), length // mesh.shape["context"]
    vocab = -(-vocab // mesh.shape["tensor"])
    most = max(1024, 2**23 // vocab) if mesh.size == 1 else max(2048, 2**27 // vocab)
    divisors = [n for n in range(1, length + 1) if length % n == 0]
    return max((n for n in divisors if n <= max(1, batch * length / most)), default=1)
