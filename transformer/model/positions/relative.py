"""Positions added to the attention logits as a function of distance: ALiBi and T5's buckets, and
smooth functions: KERPLE, Sandwich, FIRE. In equations of the last three, d = |t - s|.
Shape suffixes: B batch, T query length, S key length, N heads, R buckets."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.limits import Positive, Size
from transformer.model.positions.base import (
    Lines,
    Position,
    Terms,
    declare,
    fact,
    option,
    per_head,
    register,
)


@register("alibi")
class ALiBi(Position):
    """logits - m_n |t - s|, with slopes m_n = 2^(-8 n / N) for heads n = 1..N (Press et al. 2022).

    With a causal mask, this is the paper's bias. Without one, it is the symmetric form (Hewitt's
    notes, eq. 13). If the number of heads is not a power of two, the first take the slopes of the
    next lower power, the others every other slope of the next higher one, as in the authors' code.

    slopes: "geometric", as above; "learned", which starts from these values; or given values, one
        for all heads or one for each. Hewitt's notes have (1.0,).

    Parameters: none; with learned slopes, num_heads per stack.
    Beyond the training length: extrapolates."""

    slopes: str | tuple[float, ...] = option("geometric")
    num_heads: int = fact()
    slopes_N: jax.Array | None = None  # learned

    def check(self, facts):
        if self.slopes in ("geometric", "learned"):
            return None
        if isinstance(self.slopes, str):
            choices = "choose from: geometric, learned, or numbers"
            return f"model.position.slopes: unknown value {self.slopes!r}; {choices}"
        valid = all(0 <= slope < math.inf for slope in self.slopes)
        if len(self.slopes) not in (1, facts.num_heads) or not valid:
            way_out = f"set one number, or one for each of the {facts.num_heads} heads"
            return f"model.position.slopes: {self.slopes}; {way_out}, finite and not below 0"
        return None

    def bind(self, param, facts):
        scheme = super().bind(param, facts)
        if self.slopes != "learned":
            return scheme
        start = lambda key, shape, dtype: jnp.asarray(alibi_slopes(*shape), dtype)
        slopes_N = declare(param, facts, "slopes", (facts.num_heads,), ("heads",), start)
        return scheme.replace(slopes_N=slopes_N)

    def distance_bias(self, distance):
        slopes_N = self.slopes_N
        if slopes_N is None:
            given = alibi_slopes(self.num_heads) if self.slopes == "geometric" else self.slopes
            slopes_N = jnp.broadcast_to(jnp.asarray(given, jnp.float32), (self.num_heads,))
        return -per_head(slopes_N, distance) * jnp.abs(distance).astype(jnp.float32)


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns the slope of each head, in descending order if their number is a power of two."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (n + 1) / power) for n in range(power)]
    return slopes + [2.0 ** (-4.0 * (n + 1) / power) for n in range(0, 2 * (num_heads - power), 2)]


@register("t5")
class T5Bias(Position):
    """logits + b[n, bucket(s - t)], one learned scalar per head and bucket (Raffel et al. 2020).

    Half of the buckets hold one distance each. The others widen logarithmically up to
    `max_distance`; all longer distances share the last bucket. Without a causal mask, half of all
    buckets are for keys after the query. The layers of a stack share the table.

    Parameters: num_buckets * num_heads per stack.
    Beyond the training length: extrapolates for a while; all longer distances share a bucket."""

    num_buckets: int = option(32)
    max_distance: int = option(128)
    causal: bool = fact(False)
    table_RxN: jax.Array | None = None

    def check(self, facts):
        buckets, longest = self.num_buckets, self.max_distance
        if buckets < 4 or longest <= buckets // 2:
            needs = "at least 4 num_buckets, and max_distance to be more than half of them"
            return f"model.position: 't5' needs {needs}, got {buckets} and {longest}"
        return None

    def bind(self, param, facts):
        shape, names = (self.num_buckets, facts.num_heads), ("buckets", "heads")
        init = nn.initializers.normal((facts.d_model / facts.m_D) ** -0.5)
        table = declare(param, facts, "relative_bias", shape, names, init)
        return super().bind(param, facts).replace(table_RxN=table)

    def distance_bias(self, distance):
        bucket = t5_bucket(-distance, self.num_buckets, self.max_distance, self.causal)
        return jnp.moveaxis(self.table_RxN[bucket].astype(jnp.float32), -1, 0)


def t5_bucket(distance: jax.Array, num_buckets: int, max_distance: int, causal: bool) -> jax.Array:
    """Returns each distance's bucket, int32 (key minus query; T5's `_relative_position_bucket`)."""
    if causal:
        offset, distance = 0, jnp.maximum(-distance, 0)
    else:
        num_buckets //= 2
        offset, distance = jnp.where(distance > 0, num_buckets, 0), jnp.abs(distance)
    exact = num_buckets // 2
    ratio = jnp.maximum(distance, exact).astype(jnp.float32) / exact
    share = jnp.log(ratio) / math.log(max_distance / exact)
    wide = exact + (share * (num_buckets - exact)).astype(jnp.int32)
    return offset + jnp.where(distance < exact, distance, jnp.minimum(wide, num_buckets - 1))


@register("kerple")
class Kerple(Position):
    """logits - r_n log(1 + a_n d), the logarithmic kernel of Chi et al. (2022, "KERPLE").

    r_n, a_n > 0 are learned for each head. A stack's layers share them, unlike in their code.

    Parameters: 2 * num_heads per stack.
    Beyond the training length: extrapolates; the logarithm flattens."""

    r_N: jax.Array | None = None
    a_N: jax.Array | None = None

    def bind(self, param, facts):
        def learned(name, high):
            init = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, maxval=high)
            return declare(param, facts, name, (facts.num_heads,), ("heads",), init)

        return self.replace(r_N=learned("kernel_r", 2.0), a_N=learned("kernel_a", 1.0))

    def distance_bias(self, distance):
        # The minimum of 0.01, as in the authors' code, keeps them positive and gradients finite.
        r, a = (jnp.maximum(per_head(x_N, distance), 1e-2) for x_N in (self.r_N, self.a_N))
        return -r * jnp.log1p(a * jnp.abs(distance).astype(jnp.float32))


@register("sandwich")
class Sandwich(Position):
    """logits + (sum_i cos(d / 10000^(2i/w)) - w/2) / (8 n / N) for heads n = 1..N (Chi et al. 2023,
    "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis").

    The sum is over w/2 indices i from `first_index`, where w is `width`. From 0, it is the inner
    product of two sinusoidal embeddings of size w. attention-gym has 0, NeMo has 1.

    Parameters: none.
    Beyond the training length: extrapolates; near keys have the largest weights, as in ALiBi."""

    width: int = option(128)
    first_index: int = option(0)
    num_heads: int = fact()

    def check(self, facts):
        if self.first_index not in (0, 1):
            return f"model.position.first_index: {self.first_index} must be 0 or 1"
        if self.width < 2 or self.width % 2:
            return f"model.position.width: {self.width} must be even and positive"
        return None

    def distance_bias(self, distance):
        d = jnp.abs(distance).astype(jnp.float32)
        index = jnp.arange(self.width // 2, dtype=jnp.float32) + self.first_index
        frequencies = 10_000.0 ** (-2.0 * index / self.width)
        add = lambda i, total: total + jnp.cos(d * frequencies[i])
        total = jax.lax.fori_loop(0, self.width // 2, add, jnp.zeros_like(d))
        divisor_N = 8.0 * jnp.arange(1, self.num_heads + 1, dtype=jnp.float32) / self.num_heads
        return (total - self.width / 2) / per_head(divisor_N, d)


@register("fire")
class Fire(Position):
    """logits + f_n(psi(t - s) / psi(max(t, L))), psi(x) = log(1 + c x) (Li et al. 2024, "FIRE").

    f is a small network with two ReLU layers of `width` units and one output per head. Its input is
    a normalized distance, in which c and the threshold L are learned. For keys after the query
    (without a causal mask), the distance keeps its sign.

    Parameters: width * (3 + width + N) + N + 2 per stack, shared by its layers ("FIRE-S").
    Beyond the training length: extrapolates; the network's inputs stay in [-1, 1].
    Cost: a network of width^2 multiplications per pair of tokens; in fused attention, three
    operations for each point of a tile's inputs at which a unit changes sign."""

    width: Size = option(32)
    threshold: Positive = option(256.0)
    causal: bool = fact(False)
    c: jax.Array | None = None
    length: jax.Array | None = None
    layers: tuple = ()

    def bind(self, param, facts):
        new = functools.partial(declare, param, facts)

        def layer(i: int, inputs: int, outputs: int, axis=None) -> tuple[jax.Array, jax.Array]:
            init = nn.initializers.lecun_normal()
            kernel = new(f"fire_kernel_{i}", (inputs, outputs), (None, axis), init)
            return kernel, new(f"fire_bias_{i}", (outputs,), (axis,), nn.initializers.zeros)

        scalar = lambda name, x: param(name, nn.initializers.constant(x), (), facts.param_dtype)
        hidden = layer(0, 1, self.width), layer(1, self.width, self.width)
        layers = (*hidden, layer(2, self.width, facts.num_heads, "heads"))
        c, length = scalar("fire_c", 0.1), scalar("fire_threshold", self.threshold)
        return super().bind(param, facts).replace(c=c, length=length, layers=layers)

    def bias(self, q_positions_BxT, k_positions_BxS):
        distance = q_positions_BxT[:, :, None] - k_positions_BxS[:, None, :]
        x_BxTxS = self._psi(distance) / self._largest(q_positions_BxT)[:, :, None]
        return jnp.moveaxis(_network(self.layers, x_BxTxS), -1, 1)

    def rows(self, q_positions_BxT):
        return 1.0 / self._largest(q_positions_BxT)

    def terms(self, distance_D, scale):
        knots_J = jnp.array([0.0 if self.causal else -FAR, FAR])
        fixed = jax.lax.stop_gradient(self.layers)
        for i in (1, 2):
            knots_J = jnp.sort(jnp.concatenate([knots_J, _zeros(fixed[:i], knots_J)]))
            is_first = jnp.diff(knots_J, prepend=-2 * FAR) > 1e-6  # others change f by rounding
            knots_J = jnp.sort(jnp.where(is_first, knots_J, FAR))
        x_Ix1, f_IxN, slope_IxN = _tangents(self.layers, knots_J)
        lines = Lines(knots_J[None], (f_IxN - slope_IxN * x_Ix1).T, slope_IxN.T)
        return Terms(scale, self._psi(distance_D)[None], lines=lines)

    def _largest(self, positions_BxT: jax.Array) -> jax.Array:
        threshold = jnp.maximum(self.length.astype(jnp.float32), 1.0)
        return self._psi(jnp.maximum(positions_BxT.astype(jnp.float32), threshold))

    def _psi(self, x: jax.Array) -> jax.Array:
        c = jnp.maximum(self.c.astype(jnp.float32), 1e-6)
        return jnp.sign(x) * jnp.log1p(c * jnp.abs(x).astype(jnp.float32))


FAR = 1e6  # beyond all inputs


def _network(layers: tuple, x: jax.Array, precision: str | None = None) -> jax.Array:
    """Returns float32[..., outputs] of a network with ReLU units for numbers x."""
    h = x[..., None]
    for i, (kernel, bias) in enumerate(layers):
        h = jax.nn.relu(h) if i > 0 else h
        h = jnp.matmul(h, kernel.astype(jnp.float32), precision=precision)
        h += bias.astype(jnp.float32)
    return h


def _tangents(layers: tuple, knots_J: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a point between each two knots, and the value and the slope of the network there. Far
    from 0, value - slope x would not be exact."""
    low, high = knots_J[:-1], knots_J[1:]
    nearest = jnp.clip(0.0, low, high)
    x_I = nearest + jnp.clip((low + high) / 2 - nearest, -0.5, 0.5)
    f = lambda x: _network(layers, x, "highest")
    return x_I[:, None], *jax.jvp(f, (x_I,), (jnp.ones_like(x_I),))


def _zeros(layers: tuple, knots_J: jax.Array) -> jax.Array:
    """Returns where each output of a network, which is linear between knots, is 0, or `FAR`."""
    x_Ix1, f_IxW, slope_IxW = _tangents(layers, knots_J)
    zeros_IxW = x_Ix1 - f_IxW / slope_IxW
    inside = (zeros_IxW > knots_J[:-1, None]) & (zeros_IxW < knots_J[1:, None])
    return jnp.where(inside, zeros_IxW, FAR).reshape(-1)
