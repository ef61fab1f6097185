"""Positions added to the attention logits as a smooth function of distance: KERPLE, Sandwich, FIRE.

In equations, d = |t - s| is the distance between query and key.
Shape suffixes: B batch, T query length, S key length, N heads."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn, struct

from transformer.checks import positive
from transformer.model.positions.base import Position, declare, fact, option, per_head, register


@register("kerple")
@struct.dataclass
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
@struct.dataclass
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
@struct.dataclass
class Fire(Position):
    """logits + f_n(psi(t - s) / psi(max(t, L))), psi(x) = log(1 + c x) (Li et al. 2024, "Functional
    Interpolation for Relative Positions").

    f is a small network with two ReLU layers of `width` units and one output per head. Its input is
    a normalized distance, in which c and the threshold L are learned. For keys after the query
    (without a causal mask), the distance keeps its sign.

    Parameters: width * (3 + width + N) + N + 2 per stack, shared by its layers ("FIRE-S").
    Beyond the training length: extrapolates; the network's inputs stay in [-1, 1].
    Cost: a network of width^2 multiplications per pair of tokens."""

    width: int = option(32)
    threshold: float = option(256.0)
    c: jax.Array | None = None
    length: jax.Array | None = None
    layers: tuple = ()

    def check(self, facts):
        positive("model.position", self, "width", "threshold")

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
        return self.replace(c=c, length=length, layers=layers)

    def bias(self, q_positions_BxT, k_positions_BxS):
        c = jnp.maximum(self.c.astype(jnp.float32), 1e-6)
        psi = lambda x: jnp.log1p(c * x)
        distance = (q_positions_BxT[:, :, None] - k_positions_BxS[:, None, :]).astype(jnp.float32)
        threshold = jnp.maximum(self.length.astype(jnp.float32), 1.0)
        longest = jnp.maximum(q_positions_BxT.astype(jnp.float32), threshold)
        h = (jnp.sign(distance) * psi(jnp.abs(distance)) / psi(longest)[:, :, None])[..., None]
        for i, (kernel, bias) in enumerate(self.layers):
            h = h @ kernel.astype(jnp.float32) + bias.astype(jnp.float32)
            h = jax.nn.relu(h) if i < len(self.layers) - 1 else h
        return jnp.moveaxis(h, -1, 1)
