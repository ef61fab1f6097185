"""Kinds of feed-forward and their options, by the names that a config chooses from."""

import dataclasses
from typing import ClassVar

from transformer.checks import at_least, at_most, build_choice
from transformer.errors import UserError

MOST_EXPERTS = 4096
"""Tracing and compiling a model takes longer with each of them."""


@dataclasses.dataclass(frozen=True)
class Dense:
    """One feed-forward for every token."""

    name: ClassVar[str] = "dense"


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts (experts.py), each a feed-forward of `d_ff`."""

    name: ClassVar[str] = "experts"

    num_experts: int = 8
    top_k: int = 2  # experts that a token goes to
    capacity_factor: float = 0.0  # places of an expert, as a multiple of its even share; 0: as many as it takes (dropless)
    normalize: bool = True  # the weights of a token's experts add up to 1 (Mixtral); False: they are its probabilities (Switch)
    load_balance: float = (
        0.01  # weight of the loss that keeps experts equally busy (Fedus et al. 2022)
    )
    router_z_loss: float = (
        0.001  # weight of the loss that keeps the router's logits small (Zoph et al. 2022)
    )

    def __post_init__(self):
        at_least("model.feed_forward", self, 1, "num_experts", "top_k")
        at_least("model.feed_forward", self, 0, "capacity_factor", "load_balance", "router_z_loss")
        at_most(
            "model.feed_forward",
            self,
            MOST_EXPERTS,
            num_experts="the largest published model has 2,048 (Switch-C)",
        )
        if self.top_k > self.num_experts:
            raise UserError(
                f"model.feed_forward.top_k: {self.top_k} of {self.num_experts} experts (num_experts)"
            )


@dataclasses.dataclass(frozen=True)
class Nothing:
    """The layer has no feed-forward sublayer, like those of an attention-only model or of stacked LSTMs."""

    name: ClassVar[str] = "none"


KINDS = {kind.name: kind for kind in (Dense, Experts, Nothing)}


def build(spec):
    """The kind that a config chooses: `"dense"`, or `dict(name="experts", num_experts=8)`. Raises UserError."""
    return build_choice("model.feed_forward", KINDS, spec)
