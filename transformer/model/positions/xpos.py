"""xPos: rotary positions with decay.
Shape suffixes: B batch, T length, N query heads, K key/value heads, H head size, P pairs of
dimensions per head, C blocks of positions, A table rows, one for every 512 positions."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from transformer.limits import Positive
from transformer.model.positions.base import Position, StackFacts, fact, option, register
from transformer.model.positions.rotary import Rotary

_ROW = 512
"""The number of positions per table row. With t = 512 a + b, z^t = z^(512 a) z^b, and both factors
come from tables that are computed in float64."""

_BITS = 100
"""Factors are between 2^-100 and 2^100, so that elements down to 2^-26 do not underflow."""

_MOST_BLOCKS = 16


def _look_up(table_AxP: np.ndarray, index_BxT: jax.Array) -> jax.Array:
    """Returns table rows, float32[B, T, 1, P]; NaN for positions beyond `max_length`."""
    return jnp.take(jnp.asarray(table_AxP, jnp.float32), index_BxT, axis=0, mode="fill")[:, :, None]


@register("xpos")
class XPos(Position):
    """Rotary positions with decay, R_t q_t zeta^t . R_s k_s zeta^-s (Sun et al. 2023, "xPos").

    The factor of pair i is zeta_i = ((2i/d + gamma) / (1 + gamma))^(1 / scale_base). Fast pairs
    decay with the distance t - s; slow pairs keep distant information.

    zeta^-s alone overflows float32 at s = 36,000. Only zeta^(t - s) matters, so positions are
    divided into blocks of equal length. The factor of a key is a power of s - c, where c is the
    center of its block. A query has one factor per block, a power of t - c. Queries and keys are
    concatenated over blocks, and a key is zero in all blocks but its own. With the default options,
    one block suffices for up to 56,320 positions, at no extra cost; twice as many make queries and
    keys twice as wide, and so on. Blocks depend on `max_length` alone, so cached keys stay valid.

    Parameters: none.
    Mask: must be causal, because the decay has a direction.
    Cache: keys are stored after rotation and scaling.
    Beyond the training length: degrades later than rotary."""

    ends: ClassVar[bool] = True

    theta: Positive = option(10_000.0)
    gamma: Positive = option(0.4)
    scale_base: Positive = option(512.0)
    d_head: int = fact(0)
    max_length: int = fact(0)
    rotary: Rotary | None = None
    q_zeta_CxBxTx1xP: jax.Array | None = None
    k_zeta_CxBxTx1xP: jax.Array | None = None

    def check(self, facts: StackFacts) -> str | None:
        if not facts.causal:
            needs = "decays toward the past and needs a causal mask"
            return f"model.position: 'xpos' {needs}; choose 'rotary'"
        if self._block_length < 2 * _ROW:  # factors within one row must fit float32
            decays = f"with gamma = {self.gamma} decays by more than 2^{_BITS}"
            problem = f"{decays} within {_ROW} positions, which float32 cannot represent"
            return f"model.position.scale_base: {self.scale_base} {problem}; raise one of them"
        if self._blocks(facts.max_length) > _MOST_BLOCKS:
            options = f"scale_base = {self.scale_base} and gamma = {self.gamma}"
            limit = f"at most {_MOST_BLOCKS * self._block_length} with {options}"
            problem = f"{facts.max_length} is too large for model.position 'xpos'"
            return f"model.max_length: {problem}; {limit}"
        return Rotary(theta=self.theta).check(facts)

    @property
    def _block_length(self) -> int:
        """The positions over which the fastest pair decays from 2^100 to 2^-100, in whole rows."""
        bits = math.log2((1.0 + self.gamma) / self.gamma) / self.scale_base
        return int(min(2 * _BITS / bits, 2**31) / _ROW) * _ROW

    def _blocks(self, length: int) -> int:
        return -(-length // self._block_length)

    def key_size(self, facts):
        return facts.d_head * self._blocks(facts.max_length)

    def at(self, positions_BxT):
        length, blocks = self._block_length, self._blocks(self.max_length)
        start_A = _ROW * np.arange(-(-self.max_length // _ROW))  # the first position of each row
        center_C = length * np.arange(blocks) + min(self.max_length, length) // 2
        pairs_P = 2.0 * np.arange(self.d_head // 2) / self.d_head
        decay_P = np.log((pairs_P + self.gamma) / (1.0 + self.gamma)) / self.scale_base
        angle_P = self.theta**-pairs_P

        row_BxT, offset_BxT = positions_BxT // _ROW, positions_BxT % _ROW
        # Queries have exp(decay (t - c)) for each block, and 0 for blocks of later keys.
        blocks_after_CxAx1 = (start_A // length - np.arange(blocks)[:, None])[..., None]
        exponent_CxAxP = (start_A - center_C[:, None])[..., None] * decay_P
        q_CxAxP = np.where(blocks_after_CxAx1 >= 0, np.exp(np.minimum(exponent_CxAxP, 80)), 0.0)
        k_CxAxP = np.where(blocks_after_CxAx1 == 0, np.exp(np.clip(-exponent_CxAxP, -80, 80)), 0.0)
        offset_exponents = np.arange(_ROW)[:, None] * decay_P
        # Angle addition formulas, because a phase of 65,536 in float32 would be off by 0.004
        waves = lambda x, index: (_look_up(np.sin(x), index), _look_up(np.cos(x), index))
        sin_a, cos_a = waves(start_A[:, None] * angle_P, row_BxT)
        sin_b, cos_b = waves(np.arange(_ROW)[:, None] * angle_P, offset_BxT)
        sin, cos = sin_a * cos_b + cos_a * sin_b, cos_a * cos_b - sin_a * sin_b
        rotary = Rotary(d_head=self.d_head, sin_BxTx1xP=sin, cos_BxTx1xP=cos)
        rows_CxBxTx1xP = lambda x_CxAxP: jnp.stack([_look_up(x, row_BxT) for x in x_CxAxP])
        q_zeta = rows_CxBxTx1xP(q_CxAxP) * _look_up(np.exp(offset_exponents), offset_BxT)
        k_zeta = rows_CxBxTx1xP(k_CxAxP) * _look_up(np.exp(-offset_exponents), offset_BxT)
        return self.replace(rotary=rotary, q_zeta_CxBxTx1xP=q_zeta, k_zeta_CxBxTx1xP=k_zeta)

    def rotate(self, q_BxTxNxH, k_BxTxKxH):
        twice = lambda zeta: jnp.concatenate([zeta] * 2, axis=-1)
        scaled = lambda x, factor: (x.astype(jnp.float32) * factor).astype(x.dtype)
        q, k = self.rotary.rotate(q_BxTxNxH, k_BxTxKxH)
        q = [scaled(q, twice(zeta)) for zeta in self.q_zeta_CxBxTx1xP]
        k = [scaled(k, twice(zeta)) for zeta in self.k_zeta_CxBxTx1xP]
        if len(q) == 1:
            return q[0], k[0]
        return jnp.concatenate(q, axis=-1), jnp.concatenate(k, axis=-1)
