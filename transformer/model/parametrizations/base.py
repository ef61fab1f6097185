"""What every parametrization defines: a base model, and multipliers by the role of a parameter.

A model is compared with its base, the same model at other sizes:

    m_N  fan-in of a matrix / its fan-in in the base; of other parameters, the ratio of d_model
    m_L  layers of a stack / its layers in the base

A config states the hyperparameters of the base. Multipliers adjust them to the model's own size."""

import dataclasses
import operator
from typing import Any, NamedTuple

from flax.core import FrozenDict

from transformer.checks import coerce
from transformer.errors import UserError, nearest
from transformer.limits import NonNegative, Positive
from transformer.registry import Registry

PARAMETRIZATIONS = Registry("model.parametrization", __package__)
Config = Any  # a ModelConfig. Its module imports this one, so it cannot be imported here

NONE = FrozenDict()


class Rule(NamedTuple):
    """The multipliers of one parameter."""

    learning_rate: float = 1.0  # of the update; weight decay is not multiplied
    weight_decay: float = 1.0  # of the decay, which follows the learning rate of the schedule
    epsilon: float = 1.0  # of the optimizer's epsilon
    init: float = 1.0  # of the standard deviation of the initial values


class Place(NamedTuple):
    """The facts about a parameter that determine its rule."""

    role: str  # a field of Parametrization
    part: str  # "branch": of a residual branch; "stream": a norm of the sum; "once": of no layer
    m_N: float  # of a matrix; m_D of other parameters
    m_D: float  # ratio of d_model
    m_L: float
    std_ratio: float  # standard deviation of the initial values in the base / in the model


@PARAMETRIZATIONS.register("standard")
class Parametrization:
    """The standard parametrization: hyperparameters do not depend on the size of the model.

    In every parametrization, a config may set multipliers of `learning_rate`, `weight_decay`,
    `epsilon` and `init` by role: `dict(name="standard", embedding=dict(learning_rate=10.0))`. A
    learning rate of 0 freezes the parameters."""

    embedding: FrozenDict = NONE  # multipliers of tables of embeddings and of absolute positions
    unembedding: FrozenDict = NONE  # multipliers of the untied matrix to the vocabulary
    matrix: FrozenDict = NONE  # multipliers of the matrices of layers
    # Multipliers of other matrices: routers, head-wise gates, poolers, classifiers.
    readout: FrozenDict = NONE
    vector: FrozenDict = NONE  # multipliers of norms, biases, scalar gates and sinks
    position: FrozenDict = NONE  # multipliers of parameters of relative positions

    def __post_init__(self):
        for role in ROLES:
            for key, value in getattr(self, role).items():
                field = f"model.parametrization.{role}.{key}"
                if key not in Rule._fields:
                    raise UserError(f"{field}: no such multiplier; {nearest(key, Rule._fields)}")
                coerce(value, Positive if key == "epsilon" else NonNegative, field)
                if key == "weight_decay" and role in ("vector", "position"):
                    why = "because these parameters have no weight decay"
                    raise UserError(f"{field}: {value} has no effect, {why}; leave it out")

    def base_of(self, config: Config) -> Config:
        """Returns the config of the base model. It is not checked."""
        return config

    def branch_scale(self, m_L: float) -> float:
        """Returns the multiplier of the residual branches of a stack."""
        return 1.0

    def rule(self, place: Place) -> Rule:
        """Returns the multipliers of a parameter, without those that the config sets by role."""
        return Rule()

    def multipliers(self, place: Place) -> Rule:
        """Returns the multipliers of a parameter."""
        return Rule(*map(operator.mul, self.rule(place), Rule(**getattr(self, place.role))))

    @property
    def sets(self) -> frozenset[str]:
        """The multipliers that the config sets for some role."""
        return frozenset(key for role in ROLES for key in getattr(self, role))


ROLES = tuple(field.name for field in dataclasses.fields(Parametrization))
"""The roles of parameters, in the order in which a run prints them."""
