"""Longer contexts for rotary positions: other angles a step, so that a trained model reads further than it was trained to.

Shape suffixes: B batch, P pairs of a head that are turned.

A scaling turns the angles a step f_i = theta^(-2i/d), i < P = d/2, into others; `factor` is how much further the model is to
read, `original_length` how far it was trained to. The wavelength of pair i is 2 pi / f_i.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from transformer.registry import Registry

SCALINGS = Registry("model.position.scaling", __package__)


@SCALINGS.register("none")
@dataclasses.dataclass(frozen=True)
class Scaling:
    """No scaling: f_i as it is."""

    def check(self) -> str | None:
        """Why these numbers make no sense, in one line; None if they do."""
        if getattr(self, "factor", 1.0) < 1.0:
            return f"factor: {self.factor} must be at least 1"
        if self.does_nothing:
            return "factor: 1.0 has no effect; a number over 1, or leave model.position.scaling at 'none'"
        if getattr(self, "original_length", 1) < 1:
            return "original_length: must be set, the length that the model was trained to read"
        return None

    @property
    def does_nothing(self) -> bool:
        """Whether options were chosen with which no angle changes."""
        return getattr(self, "factor", 2.0) == 1.0 and not getattr(self, "attention_factor", 0.0)

    def frequencies(self, theta: float, d: int, length_B: jax.Array) -> jax.Array:
        """float32[P], or float32[B, P] where they depend on `length_B`, how many tokens each row has so far."""
        return theta ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)

    @property
    def magnitude(self) -> float:
        """What turned queries and keys are multiplied by."""
        return 1.0


@SCALINGS.register("linear")
@dataclasses.dataclass(frozen=True)
class Linear(Scaling):
    """f_i / factor: "position interpolation" (Chen et al. 2023)."""

    factor: float = 1.0

    def frequencies(self, theta, d, length_B):
        return super().frequencies(theta, d, length_B) / self.factor


@SCALINGS.register("ntk")
@dataclasses.dataclass(frozen=True)
class NTK(Scaling):
    """theta * factor^(d / (d - 2)) for theta: the fastest pair keeps its angle, the slowest is divided by `factor` ("NTK-aware")."""

    factor: float = 1.0

    def frequencies(self, theta, d, length_B):
        return super().frequencies(theta * self.factor ** (d / (d - 2)), d, length_B)


@SCALINGS.register("dynamic")
@dataclasses.dataclass(frozen=True)
class Dynamic(Scaling):
    """NTK by as much as each row needs: factor * length / original_length - (factor - 1), and none up to `original_length`.

    With a cache, keys stay as they were turned when their row was shorter, as in Transformers: beyond `original_length`
    decoding step by step is not the same as reading at once.
    """

    factor: float = 1.0
    original_length: int = 0

    does_nothing = False  # with a factor of 1, angles still follow the length

    def frequencies(self, theta, d, length_B):
        length_B = jnp.maximum(length_B, self.original_length).astype(jnp.float32)
        stretch_B = self.factor * length_B / self.original_length - (self.factor - 1.0)
        theta_Bx1 = (theta * stretch_B ** (d / (d - 2)))[:, None]
        return theta_Bx1 ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)


@SCALINGS.register("yarn")
@dataclasses.dataclass(frozen=True)
class YaRN(Scaling):
    """Pairs that turn more than `beta_fast` times in `original_length` keep f_i, those that turn less than `beta_slow` times get
    f_i / factor, a ramp between; queries and keys times 0.1 ln(factor) + 1 (Peng et al. 2023)."""

    factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # 0: 0.1 ln(factor) + 1
    truncate: bool = True  # the ramp begins and ends at whole pairs

    def check(self):
        if not 0 < self.beta_slow < self.beta_fast:
            return f"beta_fast: {self.beta_fast} must be more than beta_slow = {self.beta_slow}, and both more than 0"
        return super().check()

    def frequencies(self, theta, d, length_B):
        f_P = super().frequencies(theta, d, length_B)
        pair = lambda turns: (
            d * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )
        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        ramp_P = jnp.clip(
            (jnp.arange(d // 2, dtype=jnp.float32) - low) / ((high - low) or 1e-3), 0.0, 1.0
        )
        return f_P / self.factor * ramp_P + f_P * (1.0 - ramp_P)

    @property
    def magnitude(self):
        return self.attention_factor or 0.1 * math.log(self.factor) + 1.0


@SCALINGS.register("llama3")
@dataclasses.dataclass(frozen=True)
class Llama3(Scaling):
    """Wavelengths over original_length / low_frequency_factor get f_i / factor, those under original_length / high_frequency_factor
    keep f_i, and between them it is interpolated in 1 / wavelength (Llama 3.1)."""

    factor: float = 8.0
    original_length: int = 8192
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0

    def check(self):
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if not 0 < low < high:
            return f"high_frequency_factor: {high} must be more than low_frequency_factor = {low}, and both more than 0"
        return super().check()

    def frequencies(self, theta, d, length_B):
        f_P = super().frequencies(theta, d, length_B)
        turns_P = self.original_length * f_P / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept_P = jnp.clip((turns_P - low) / (high - low), 0.0, 1.0)
        return f_P / self.factor * (1.0 - kept_P) + f_P * kept_P
