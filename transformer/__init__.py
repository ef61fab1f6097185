"""Transformers in JAX and Flax: one model for every architecture, one command for every machine.

from transformer import ModelConfig, build_model
model  = build_model(ModelConfig(family="decoder", vocab_size=8192))
params = model.init(key, tokens)
logits = model.apply(params, tokens)
"""

from transformer.config import Experiment, ModelConfig
from transformer.config_io import load_experiment
from transformer.convert import load_hf, save_hf
from transformer.errors import UserError
from transformer.model.architectures import architecture
from transformer.model.network import build_model
from transformer.sweeps import Sweep, arms, chain, product, scan, vary, zipped
from transformer.version import __version__

__all__ = [
    "Experiment",
    "ModelConfig",
    "Sweep",
    "UserError",
    "__version__",
    "architecture",
    "arms",
    "build_model",
    "chain",
    "load_experiment",
    "load_hf",
    "product",
    "save_hf",
    "scan",
    "vary",
    "zipped",
]
