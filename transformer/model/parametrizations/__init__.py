"""Parametrizations: how hyperparameters carry over to other sizes. Each is one small class."""
