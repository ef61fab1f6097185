"""Scaling of rotary positions: adapts a trained model to longer contexts. A scaling changes the
frequencies (angles per position) f_i = theta^(-2i/d), i < d/2. `factor` is the ratio of the new
context length to the original one, and `original_length` is the length that the model was trained
on. The wavelength of pair i is 2 pi / f_i.
Shape suffixes: B batch, P = d/2 rotated pairs of dimensions per head."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from transformer.registry import Registry

SCALINGS = Registry("model.position.scaling", __package__)


@SCALINGS.register("none")
class Scaling:
    """No scaling: f_i is unchanged. The base class of scalings."""

    min_dimensions: ClassVar[int] = 2
    by_length: ClassVar[bool] = False  # angles depend on the length, also with a factor of 1

    def check(self, theta: float, d: int) -> str | None:
        """Returns why options are invalid for `d` rotated dimensions, as "OPTION: ...", or None."""
        if d < (least := self.min_dimensions):
            return f"name: {self.name!r} needs at least {least} rotated dimensions, not {d}"
        if getattr(self, "factor", 1.0) < 1.0:
            return f"factor: {self.factor} must be at least 1"
        has_effect = getattr(self, "factor", 2.0) != 1.0 or getattr(self, "attention_factor", 0.0)
        if not (has_effect or self.by_length):
            way_out = "set a number over 1, or leave model.position.scaling at 'none'"
            return f"factor: 1.0 has no effect; {way_out}"
        if getattr(self, "original_length", 1) < 1:
            return "original_length: must be set to the length that the model was trained on"
        return None

    def frequencies(self, theta: float, d: int, length_B: jax.Array) -> jax.Array:
        """Returns float32[P], or float32[B, P] if they depend on the current lengths."""
        return theta ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)

    @property
    def magnitude(self) -> float:
        """The factor by which rotated queries and keys are multiplied."""
        return getattr(self, "attention_factor", 1.0)


@SCALINGS.register("linear")
class LinearScaling(Scaling):
    """f_i / factor, or "position interpolation" (Chen et al. 2023)."""

    factor: float = 1.0

    def frequencies(self, theta, d, length_B):
        return super().frequencies(theta, d, length_B) / self.factor


@SCALINGS.register("proportional")
class Proportional(Scaling):
    """f_i for the fastest floor(share d/2) pairs, and 0 for the others, which ignore positions.

    This is p-RoPE (Barbero et al. 2024, "Round and Round We Go!", arXiv:2410.06205; Gemma 4). In
    contrast to `fraction`, the frequencies are those of all d dimensions."""

    min_dimensions: ClassVar[int] = 4  # one pair that is rotated and one that is not

    share: float = 0.75

    def check(self, theta, d):
        if problem := super().check(theta, d):
            return problem
        if not 2 / d <= self.share < 1:
            return f"share: {self.share} must be from {2 / d:g} (one of {d // 2} pairs) to below 1"
        return None

    def frequencies(self, theta, d, length_B):
        rotated = jnp.arange(d // 2) < math.floor(self.share * d / 2)
        return jnp.where(rotated, super().frequencies(theta, d, length_B), 0.0)


@SCALINGS.register("ntk")
class NTKScaling(Scaling):
    """Replaces theta by theta * factor^(d / (d - 2)) ("NTK-aware" scaling).

    The frequency of the fastest pair is unchanged; that of the slowest is divided by `factor`."""

    min_dimensions: ClassVar[int] = 4  # the exponent is d / (d - 2)

    factor: float = 1.0

    def frequencies(self, theta, d, length_B):
        return super().frequencies(theta * self.factor ** (d / (d - 2)), d, length_B)


@SCALINGS.register("dynamic")
class DynamicScaling(NTKScaling):
    """NTK with a factor that grows with the sequence length.

    The factor is factor * length / original_length - (factor - 1), and 1 up to `original_length`.
    With a cache, keys keep the rotation that they had when their sequence was shorter, as in
    Transformers. Beyond `original_length`, decoding token by token thus differs from one pass."""

    by_length: ClassVar[bool] = True
    original_length: int = 0

    def frequencies(self, theta, d, length_B):
        length_B = jnp.maximum(length_B, self.original_length).astype(jnp.float32)
        stretch_B = self.factor * length_B / self.original_length - (self.factor - 1.0)
        theta_Bx1 = (theta * stretch_B ** (d / (d - 2)))[:, None]
        return theta_Bx1 ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)


@SCALINGS.register("longrope")
class LongRoPEScaling(Scaling):
    """f_i / short_i in up to `original_length` tokens, else f_i / long_i (Ding et al. 2024; Phi-3).

    As with "dynamic", cached keys keep the rotation they had when their sequence was shorter."""

    by_length: ClassVar[bool] = True
    short_factors: tuple[float, ...] = ()  # one per pair of rotated dimensions
    long_factors: tuple[float, ...] = ()
    original_length: int = 0
    attention_factor: float = 1.0  # multiplies rotated queries and keys

    def check(self, theta, d):
        for name in ("short_factors", "long_factors"):
            if len(factors := getattr(self, name)) != d // 2 or not all(x > 0 for x in factors):
                return f"{name}: {factors} must have {d // 2} numbers over 0, one per rotated pair"
        return super().check(theta, d)

    def frequencies(self, theta, d, length_B):
        short_P, long_P = jnp.asarray(self.short_factors), jnp.asarray(self.long_factors)
        is_long_Bx1 = (length_B > self.original_length)[:, None]
        return super().frequencies(theta, d, length_B) / jnp.where(is_long_Bx1, long_P, short_P)


@SCALINGS.register("yarn")
class YaRNScaling(Scaling):
    """Scales only slow pairs (Peng et al. 2023, "YaRN").

    Pairs that rotate more than `beta_fast` times in `original_length` positions keep f_i. Pairs
    that rotate less than `beta_slow` times get f_i / factor. A linear ramp connects the two.
    Rotated queries and keys are multiplied by `attention_factor`."""

    factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # 0: 0.1 ln(factor) + 1
    truncate: bool = True  # start and end the ramp at integer pair indices

    def check(self, theta, d):
        if theta <= 1.0:
            return f"name: 'yarn' needs model.position.theta over 1, not {theta}"
        if not 0 < self.beta_slow < self.beta_fast:
            problem = f"{self.beta_fast} must be more than beta_slow = {self.beta_slow}"
            return f"beta_fast: {problem}, and both more than 0"
        return super().check(theta, d)

    def frequencies(self, theta, d, length_B):
        f_P = super().frequencies(theta, d, length_B)
        wavelength_at = lambda rotations: self.original_length / (rotations * 2 * math.pi)
        pair_at = lambda rotations: d * math.log(wavelength_at(rotations)) / (2 * math.log(theta))
        low, high = pair_at(self.beta_fast), pair_at(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        pair_P = jnp.arange(d // 2, dtype=jnp.float32)
        ramp_P = jnp.clip((pair_P - low) / ((high - low) or 1e-3), 0.0, 1.0)
        return f_P / self.factor * ramp_P + f_P * (1.0 - ramp_P)

    @property
    def magnitude(self):
        return self.attention_factor or 0.1 * math.log(self.factor) + 1.0


@SCALINGS.register("llama3")
class Llama3Scaling(Scaling):
    """Scales only long wavelengths (Llama 3.1).

    Wavelengths over original_length / low_frequency_factor get f_i / factor. Wavelengths under
    original_length / high_frequency_factor keep f_i. Those between are linear in 1 / wavelength."""

    factor: float = 8.0
    original_length: int = 8192
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0

    def check(self, theta, d):
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if not 0 < low < high:
            problem = f"{high} must be more than low_frequency_factor = {low}"
            return f"high_frequency_factor: {problem}, and both more than 0"
        return super().check(theta, d)

    def frequencies(self, theta, d, length_B):
        f_P = super().frequencies(theta, d, length_B)
        rotations_P = self.original_length * f_P / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        unscaled_P = jnp.clip((rotations_P - low) / (high - low), 0.0, 1.0)
        return f_P / self.factor * (1.0 - unscaled_P) + f_P * unscaled_P
