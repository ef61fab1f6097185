"""The parts of the residual formula, which every placement fills in.

    y = out_norm( a * x + s * g * l * res_norm( dropout( f( in_norm(x) ) ) ) )

An absent norm is the identity. A placement sets which norms are present, whether the stack ends in
a norm, how branches are initialized, and a warm-up. A config may change each (model/residual.py).

A topology is a placement with several residual streams. It defines how they begin, how a sublayer
reads and changes them, and how they end (topologies.py, hyper_connections.py).

Shape suffixes: B batch, T length, D d_model."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax

from transformer.errors import UserError
from transformer.limits import NonNegative, Positive
from transformer.registry import Registry

PLACEMENTS = Registry("model.norm_placement", __package__, lambda f: f.name != "warmup_hint")

Streams = Any  # the residual streams: an array [B, T, D], or a pytree of arrays [B, T, ..., D]

Branch = Callable[[jax.Array], list[jax.Array]]
"""branch(x_BxTxD) -> s g l res_norm(dropout(f(in_norm(x)))) of each parallel sublayer f."""


class Parts(NamedTuple):
    """The norms and parameters that a placement may declare, once for each sublayer or stack."""

    norm: Callable[[str], Callable[[jax.Array], jax.Array]]  # name -> norm over the last axis
    declare: Callable[..., jax.Array]  # (name, initializer, logical names, shape) -> parameter


class Site(NamedTuple):
    """The place of a sublayer in its stack. Everything is counted from 0."""

    layer: jax.Array | int  # an array if the layers are scanned
    step: int  # the sublayer in its layer
    steps: int  # number of sublayers of a layer
    layers: int  # number of layers of the stack
    base_layers: int  # the same in the base of the parametrization

    @property
    def index(self) -> jax.Array | int:  # type: ignore[override]
        """The number of sublayers before this one."""
        return self.layer * self.steps + self.step


@dataclasses.dataclass(frozen=True)
class Placement:
    """The parts of the residual formula, and settings that depend on them. Register a subclass with
    `@PLACEMENTS.register("name")`. It changes the defaults of the parts."""

    in_norm: bool = False  # normalize the input of the sublayer
    res_norm: bool = False  # normalize the output of the sublayer
    out_norm: bool = False  # normalize the sum
    # End the stack with a norm, which is needed if the residual stream is not normalized.
    final_norm: bool = False
    residual_scale: float = 1.0  # a; 0 means no residual connection
    branch_scale: Positive = 1.0  # s, which multiplies the branch after its norm and gates
    branch_gain: Positive = 1.0  # scales the initial W_V, W_O and both feed-forward matrices
    gate: bool = False  # g is a learned scalar per sublayer, initially 0; without a gate, g = 1
    # Initial value of l, a learned vector per sublayer (LayerScale; Touvron et al. 2021). 0: l = 1.
    layer_scale: NonNegative = 0.0
    warmup_hint: int = 0  # warm-up steps without which training is known to fail; 0: none

    fixed: ClassVar[tuple[str, ...]] = ()  # parts that have no effect or no other value here

    def __post_init__(self):
        for part in self.fixed:
            if getattr(self, part) != getattr(type(self), part):
                name = getattr(self, "name", type(self).__name__)
                problem = f"{getattr(self, part)} is not possible in {name!r}"
                raise UserError(f"model.norm_placement.{part}: {problem}; leave it out")

    def in_stack(self, side: str, encoder_layers: int, decoder_layers: int) -> "Placement":
        """Returns the placement in one stack, with numbers for all parts that depend on depth."""
        if self.is_special or type(self).check is not Placement.check:
            return self
        return Placement(**dataclasses.asdict(self))

    def check(self, config: Any, side: str) -> str | None:
        """Returns why a layer with this config cannot have the placement, in one line, or None."""
        return None

    def begin(self, x_BxTxD: jax.Array, sublayers: int) -> Streams:
        """Returns the streams before the first of the stack's `sublayers`."""
        return x_BxTxD

    def connect(self, parts: Parts, site: Site, streams: Streams, branch: Branch) -> Streams:
        """Returns the streams after one sublayer, or several parallel ones."""
        skip = [self.residual_scale * streams] if self.residual_scale else []
        y_BxTxD = functools.reduce(operator.add, [*skip, *branch(streams)])
        return parts.norm("out_norm")(y_BxTxD) if self.out_norm else y_BxTxD

    def end(self, parts: Parts, streams: Streams, done: int) -> jax.Array:
        """Returns the output of the stack, [B, T, D], after `done` of its sublayers."""
        return parts.norm("final_norm")(streams) if self.final_norm else streams

    @property
    def topology(self) -> tuple:
        """Placements can be mixed in a stack if their topologies are equal."""
        overridden = type(self).begin is not Placement.begin
        return (type(self), getattr(self, "streams", 0)) if overridden else ()

    @property
    def is_special(self) -> bool:
        """Whether the placement overrides how streams begin, change or end."""
        hooks = ("begin", "connect", "end")
        return any(getattr(type(self), hook) is not getattr(Placement, hook) for hook in hooks)
