"""xPos: rotary positions with decay.

Shape suffixes: B batch, T length, N query heads, K key/value heads, H head size, P pairs of a head,
C blocks of positions, A rows of a table, one for every 512 positions.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer.model.positions.base import Position, StackFacts, fact, option, register
from transformer.model.positions.rotary import Rotary

_ROW = 512
"""Positions t = 512 a + b. A power z^t is the product of z^(512 a) and z^b, each from a table
computed in float64."""

_BITS = 100
"""Factors stay within 2^-100 and 2^100: float32 reaches 2^-126, so that entries of 2^-26 of a query
or key are kept."""

_MOST_BLOCKS = 16


def _look_up(table_AxP: np.ndarray, at_BxT: jax.Array) -> jax.Array:
    """float32[B, T, 1, P]; NaN for a position that is beyond `max_length`."""
    return jnp.take(jnp.asarray(table_AxP, jnp.float32), at_BxT, axis=0, mode="fill")[:, :, None]


@register("xpos")
@struct.dataclass
class XPos(Position):
    """Rotary with decay: q_t R_t zeta^t . k_s R_s zeta^-s, so that a pair counts less the further
    away (Sun et al. 2023, "xPos").

    zeta_i = ((2i/d + gamma) / (1 + gamma))^(1 / scale_base): fast pairs decay, slow ones keep what
    is far.

    zeta^-s alone overflows float32 at s = 36,000. Only zeta^(t - s) counts, so positions are cut
    into blocks of equal length, and the factors of a key are powers of s - c, where c is the centre
    of its block. A query has one factor, a power of t - c, for the keys of each block; a key holds
    zeros in the place of the other blocks. One block, and no extra cost, suffices up to 56,320
    positions (with the default options); up to twice as many, queries and keys are twice as wide,
    and so on. Blocks depend on `max_length` alone, so that cached keys stay valid.

    Parameters: none. Needs a causal mask (the decay has a direction). Cross-attention: nothing.
    Cache: keys are stored turned. Beyond the training length: degrades later than rotary.
    """

    ends: ClassVar[bool] = True

    theta: float = option(10_000.0)
    gamma: float = option(0.4)
    scale_base: float = option(512.0)
    d_head: int = fact(0)
    max_length: int = fact(0)
    rotary: Rotary | None = None
    q_zeta_CxBxTx1xP: jax.Array | None = None
    k_zeta_CxBxTx1xP: jax.Array | None = None

    def check(self, facts: StackFacts) -> str | None:
        if not facts.causal:
            return (
                "model.position 'xpos' decays towards the past; an encoder has no past, "
                "choose 'rotary'"
            )
        for name in ("gamma", "scale_base"):
            if getattr(self, name) <= 0:
                return f"model.position.{name}: {getattr(self, name)} must be more than 0"
        if self._block_length < 2 * _ROW:  # the factors of one row must fit into float32, too
            return (
                f"model.position.scale_base: {self.scale_base} with gamma = {self.gamma} decays "
                f"by more than 2^{_BITS} within {_ROW} "
                "positions, which float32 cannot represent; raise one of them"
            )
        if self._blocks(facts.max_length) > _MOST_BLOCKS:
            return (
                f"model.max_length: {facts.max_length} is too long for model.position 'xpos'; at "
                "most "
                f"{_MOST_BLOCKS * self._block_length} with scale_base = {self.scale_base} and "
                f"gamma = {self.gamma}"
            )
        return Rotary(theta=self.theta).check(facts)

    @property
    def _block_length(self) -> int:
        """How many positions the fastest pair takes to decay from 2^100 to 2^-100, in whole
        rows."""
        bits = math.log2((1.0 + self.gamma) / self.gamma) / self.scale_base
        return int(min(2 * _BITS / bits, 2**31) / _ROW) * _ROW

    def _blocks(self, length: int) -> int:
        return -(-length // self._block_length)

    def key_size(self, facts):
        return facts.d_head * self._blocks(facts.max_length)

    def bind(self, param, facts):
        return self.replace(d_head=facts.d_head, max_length=facts.max_length)

    def at(self, positions_BxT):
        length, blocks = self._block_length, self._blocks(self.max_length)
        rows = -(-self.max_length // _ROW)
        start_A = _ROW * np.arange(rows)  # the first position of a row
        centre_C = length * np.arange(blocks) + min(self.max_length, length) // 2
        pairs_P = 2.0 * np.arange(self.d_head // 2) / self.d_head
        decay_P = np.log((pairs_P + self.gamma) / (1.0 + self.gamma)) / self.scale_base
        angle_P = self.theta**-pairs_P

        row_BxT, rest_BxT = positions_BxT // _ROW, positions_BxT % _ROW
        # exp(decay (t - c)) for the keys of each block; a block that comes later is never read
        from_C = start_A // length - np.arange(blocks)[:, None]
        exponent_CxAxP = (start_A - centre_C[:, None])[..., None] * decay_P
        q_CxAxP = np.where(from_C[..., None] >= 0, np.exp(np.minimum(exponent_CxAxP, 80.0)), 0.0)
        k_CxAxP = np.where(from_C[..., None] == 0, np.exp(np.clip(-exponent_CxAxP, -80, 80)), 0.0)
        within_P = np.arange(_ROW)[:, None] * decay_P
        sin, cos = self._turns(positions_BxT, start_A, angle_P)
        return self.replace(
            rotary=Rotary(d_head=self.d_head, sin_BxTx1xP=sin, cos_BxTx1xP=cos),
            q_zeta_CxBxTx1xP=jnp.stack([_look_up(x, row_BxT) for x in q_CxAxP])
            * _look_up(np.exp(within_P), rest_BxT),
            k_zeta_CxBxTx1xP=jnp.stack([_look_up(x, row_BxT) for x in k_CxAxP])
            * _look_up(np.exp(-within_P), rest_BxT),
        )

    def _turns(self, positions_BxT, start_A, angle_P):
        """sin and cos of t times the angles, by the addition theorem: a phase of 65,536 in float32
        is off by 0.004."""
        row_BxT, rest_BxT = positions_BxT // _ROW, positions_BxT % _ROW
        phases = (
            (start_A[:, None] * angle_P, row_BxT),
            (np.arange(_ROW)[:, None] * angle_P, rest_BxT),
        )
        (sin_a, cos_a), (sin_b, cos_b) = (
            (_look_up(np.sin(x), at), _look_up(np.cos(x), at)) for x, at in phases
        )
        return sin_a * cos_b + cos_a * sin_b, cos_a * cos_b - sin_a * sin_b

    def rotate(self, q_BxTxNxH, k_BxTxKxH):
        twice = lambda zeta: jnp.concatenate([zeta] * 2, axis=-1)
        scaled = lambda x, by: (x.astype(jnp.float32) * by).astype(x.dtype)
        q, k = self.rotary.rotate(q_BxTxNxH, k_BxTxKxH)
        q = [scaled(q, twice(zeta)) for zeta in self.q_zeta_CxBxTx1xP]
        k = [scaled(k, twice(zeta)) for zeta in self.k_zeta_CxBxTx1xP]
        if len(q) == 1:
            return q[0], k[0]
        return jnp.concatenate(q, axis=-1), jnp.concatenate(k, axis=-1)
