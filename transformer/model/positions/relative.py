"""Positions added to the attention logits as a function of distance: ALiBi and T5's buckets.
Shape suffixes: N heads, R buckets."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn, struct

from transformer.model.positions.base import Position, declare, fact, option, per_head, register


@register("alibi")
@struct.dataclass
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
        slopes = per_head(slopes_N.astype(jnp.float32), distance)
        return -slopes * jnp.abs(distance).astype(jnp.float32)


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns the slope of each head, in descending order if their number is a power of two."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (n + 1) / power) for n in range(power)]
    remaining = [2.0 ** (-4.0 * (n + 1) / power) for n in range(0, 2 * (num_heads - power), 2)]
    return slopes + remaining


@register("t5")
@struct.dataclass
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
