"""Cross-entropy with label smoothing and z-loss, from the last hidden state, one chunk at a time.

Shape suffixes: B batch, T length, C length of a chunk, D d_model, V vocabulary.

With logits l, log Z = logsumexp(l), target y and smoothing e, the loss of a token is

    (1 - e) (log Z - l_y) + e (log Z - mean(l)) + z (log Z)^2

(label smoothing: Szegedy et al. 2016, Vaswani et al. 2017 sec. 5.4; z-loss: Chowdhery et al. 2022).
Its gradient with respect to the logits is

    (1 + 2 z log Z) softmax(l) - (1 - e) onehot(y) - e / V

The forward pass computes it with the loss, converts each chunk of logits to gradients of hidden
state and head, and discards it. That saves B*T*V numbers and, on a CPU, a tenth of the step."""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec as P

from transformer.model.embedding import Head
from transformer.model.sharding import fitting
from transformer.parallel.sharding import batch_parts


@struct.dataclass
class Sums:
    """Weighted sums over tokens. Divide by `weight` to get means."""

    loss: jax.Array  # the training objective
    nll: jax.Array  # -log p(target), in nats
    correct: jax.Array  # whether the target is the most likely token
    weight: jax.Array

    @staticmethod
    def zero() -> "Sums":
        """Returns sums that are all 0."""
        return Sums(*(jnp.zeros((), jnp.float32) for _ in range(4)))

    def means(self) -> dict[str, jax.Array]:
        """Returns the means per unit of weight."""
        weight = jnp.maximum(self.weight, 1.0)
        return {"loss": self.nll / weight, "accuracy": self.correct / weight}


@struct.dataclass
class RouterSums:
    """Losses and reports of routers (feed_forwards/experts.py), times the number of tokens."""

    loss: jax.Array  # summed over layers
    reports: dict[str, jax.Array]  # each averaged over layers
    weight: jax.Array

    @staticmethod
    def of(sown, weight: jax.Array) -> "RouterSums":
        """Collects the values that layers sowed, whether unrolled or stacked."""
        values: dict[str, list] = {}
        for path, x in jax.tree_util.tree_leaves_with_path(sown):
            values.setdefault(path[-1].key, []).append(jnp.ravel(x))
        values = {name: weight * jnp.concatenate(parts) for name, parts in values.items()}
        loss = jnp.sum(values.pop("loss"))
        return RouterSums(loss, {name: jnp.mean(x) for name, x in values.items()}, weight)

    def means(self) -> dict[str, jax.Array]:
        """Returns the reports per routed token."""
        return {name: x / jnp.maximum(self.weight, 1.0) for name, x in self.reports.items()}


def label_sums(logits, labels, weights: jax.Array, smoothing: float = 0.0) -> Sums:
    """Computes a classification loss's sums from logits [..., C] and int32[...] labels."""
    logp = jax.nn.log_softmax(logits, axis=-1)
    nll = -jnp.take_along_axis(logp, labels[..., None], axis=-1)[..., 0]
    loss = (1 - smoothing) * nll - smoothing * jnp.mean(logp, axis=-1)
    correct = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    total = lambda x: jnp.sum(x * weights)
    return Sums(total(loss), total(nll), total(correct), jnp.sum(weights))


def span_sums(logits_BxTx2, ends_Bx2, candidates_BxT, smoothing: float = 0.0) -> Sums:
    """Computes the sums of a span's loss: the mean cross-entropy of its ends (int32, positions),
    each by a softmax over any candidates. A span is correct if both ends are most likely."""
    allowed_BxTx1, weights_B = candidates_BxT[..., None], jnp.any(candidates_BxT, axis=1)
    logp_BxTx2 = jax.nn.log_softmax(jnp.where(allowed_BxTx1, logits_BxTx2, -1e9), axis=1)
    nll_Bx2 = -jnp.take_along_axis(logp_BxTx2, ends_Bx2[:, None], axis=1)[:, 0]
    mean_Bx2 = jnp.mean(logp_BxTx2, axis=1, where=allowed_BxTx1 | ~weights_B[:, None, None])
    loss_Bx2 = (1 - smoothing) * nll_Bx2 - smoothing * mean_Bx2
    correct_B = jnp.all(jnp.argmax(logp_BxTx2, axis=1) == ends_Bx2, axis=1).astype(jnp.float32)
    total = lambda x_B: jnp.sum(x_B * weights_B)
    means = (jnp.mean(loss_Bx2, axis=1), jnp.mean(nll_Bx2, axis=1))
    return Sums(*map(total, means), total(correct_B), jnp.sum(weights_B, dtype=jnp.float32))


def _chunk(h_BxCxD, head: Head, targets_BxC, weights_BxC, smoothing: float, z_loss: float):
    """Returns the sums of one chunk, and its logits, log Z and target mask for the gradient."""
    logits_BxCxV = head(h_BxCxD)
    log_z_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1)
    hit_BxCxV = jax.lax.broadcasted_iota(jnp.int32, logits_BxCxV.shape, 2) == targets_BxC[..., None]
    target_BxC = jnp.sum(jnp.where(hit_BxCxV, logits_BxCxV, 0.0), axis=-1)
    nll_BxC = loss_BxC = log_z_BxC - target_BxC
    if smoothing:
        mean_BxC = jnp.sum(logits_BxCxV, axis=-1) / logits_BxCxV.shape[-1]
        loss_BxC = (1 - smoothing) * nll_BxC + smoothing * (log_z_BxC - mean_BxC)
    if z_loss:
        loss_BxC = loss_BxC + z_loss * jnp.square(log_z_BxC)
    correct_BxC = (jnp.max(logits_BxCxV, axis=-1) <= target_BxC).astype(jnp.float32)
    total = lambda x_BxC: jnp.sum(x_BxC * weights_BxC)
    sums = Sums(total(loss_BxC), total(nll_BxC), total(correct_BxC), jnp.sum(weights_BxC))
    return sums, (logits_BxCxV, log_z_BxC, hit_BxCxV)


def _chunk_gradient(residuals, weights_BxC, smoothing: float, z_loss: float):
    """Returns d loss / d logits of one chunk."""
    logits_BxCxV, log_z_BxC, hit_BxCxV = residuals
    p_BxCxV = jnp.exp(logits_BxCxV - log_z_BxC[..., None])
    if z_loss:
        p_BxCxV = p_BxCxV * (1 + 2 * z_loss * log_z_BxC[..., None])
    d_BxCxV = p_BxCxV - jnp.where(hit_BxCxV, 1 - smoothing, 0.0)
    if smoothing:
        d_BxCxV = d_BxCxV - smoothing / logits_BxCxV.shape[-1]
    return d_BxCxV * weights_BxC[..., None]


def chunked(x, count: int):
    """[B, T, ...] -> [count, B, T / count, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def cross_entropy(
    h_BxTxD, head: Head, targets_BxT, weights_BxT, smoothing=0.0, z_loss=0.0, chunks: int = 1
) -> Sums:
    """Computes the loss's sums over a batch, with T split into `chunks` chunks on each device.
    Differentiable with respect to `h_BxTxD` and `head`, through `Sums.loss` only."""

    def local_sums(h, head, targets, weights):
        sums_of = lambda h, *targets: _chunk(h, head, *targets, smoothing, z_loss)[0]
        add = lambda sums, chunk: (jax.tree.map(jnp.add, sums, sums_of(*chunk)), None)
        parts = tuple(chunked(x, chunks) for x in (h, targets, weights))
        return jax.lax.scan(add, Sums.zero(), parts)[0], None, None

    return _on_each_device(local_sums, chunks, h_BxTxD, head, targets_BxT, weights_BxT)[0]


def _forward(h_BxTxD, head: Head, targets_BxT, weights_BxT, smoothing, z_loss, chunks):
    def local_sums(h, head, targets, weights):
        def add(carry, chunk):
            sums, d_head = carry
            h, targets, weights = chunk
            chunk_sums, residuals = _chunk(h, head, targets, weights, smoothing, z_loss)
            d_logits = _chunk_gradient(residuals, weights, smoothing, z_loss)
            d_h, chunk_d_head = head.accumulate_gradients(h, residuals[0], d_logits)
            return jax.tree.map(jnp.add, (sums, d_head), (chunk_sums, chunk_d_head)), d_h

        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), head)
        parts = tuple(chunked(x, chunks) for x in (h, targets, weights))
        (sums, d_head), d_h = jax.lax.scan(add, (Sums.zero(), zero), parts)
        return sums, jnp.moveaxis(d_h, 0, 1).reshape(h.shape), d_head

    operands = (h_BxTxD, head, targets_BxT, weights_BxT)
    sums, d_h_BxTxD, d_head = _on_each_device(local_sums, chunks, *operands)
    return sums, (d_h_BxTxD, jax.tree.map(lambda d, x: d.astype(x.dtype), d_head, head))


def _backward(smoothing, z_loss, chunks, gradients, cotangent: Sums):
    d_h, d_head = jax.tree.map(lambda d: (cotangent.loss * d).astype(d.dtype), gradients)
    return d_h, d_head, None, None


cross_entropy.defvjp(_forward, _backward)


def _on_each_device(work, chunks: int, h_BxTxD, head: Head, targets_BxT, weights_BxT):
    """Runs `work`, which returns (sums, gradient of h, gradient of the head). With several chunks,
    each device processes its own tokens, and the head's gradient is summed over devices once."""
    batch_axes, length = fitting("batch", h_BxTxD.shape[0]), fitting("length", h_BxTxD.shape[1])
    axes = (*batch_axes, *length)
    if chunks == 1 or not axes:
        return work(h_BxTxD, head, targets_BxT, weights_BxT)

    def local_work(*operands):
        sums, d_h, d_head = work(*operands)
        return jax.lax.psum(sums, axes), d_h, jax.tree.map(lambda x: x[None], d_head)

    token_spec = P(batch_axes or None, length or None)
    in_specs, out_specs = (token_spec, P(), token_spec, token_spec), (P(), token_spec, P(axes))
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    sharded_work = jax.shard_map(local_work, axis_names=set(axes), check_vma=False, **specs)
    head = head.ready(h_BxTxD.dtype)
    sums, d_h_BxTxD, d_head = sharded_work(h_BxTxD, head, targets_BxT, weights_BxT)
    return sums, d_h_BxTxD, jax.tree.map(lambda x: jnp.sum(x, axis=0), d_head)


def auto_chunks(batch: int, length: int, vocab: int, mesh: Mesh) -> int:
    """Returns the number of chunks, a divisor of the length per device. A chunk has about 2^23
    logits but at least 1,024 tokens or, on each of several devices, 2^27 logits (half a GB) but at
    least 2,048 tokens, because it reads and writes the head's whole gradient."""
    batch, length = batch // min(batch_parts(mesh.shape), batch), length // mesh.shape["context"]
    vocab = -(-vocab // mesh.shape["tensor"])
    chunk_tokens = max(1024, 2**23 // vocab) if mesh.size == 1 else max(2048, 2**27 // vocab)
    divisors = [n for n in range(1, length + 1) if length % n == 0]
    return max((n for n in divisors if n <= max(1, batch * length / chunk_tokens)), default=1)
