"""Parametrizations: how hyperparameters carry over to other sizes. Each is one small class."""

from transformer.model.parametrizations.base import PARAMETRIZATIONS, Parametrization, Rule

__all__ = ["PARAMETRIZATIONS", "Parametrization", "Rule"]
