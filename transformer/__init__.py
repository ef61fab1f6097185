"""Transformers in JAX and Flax: one model for every architecture, one command for every machine.

from transformer import ModelConfig, build_model
model  = build_model(ModelConfig(family="decoder", vocab_size=8192))
params = model.init(key, tokens)
logits = model.apply(params, tokens)
"""

from transformer.version import __version__

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than the rest of this module
if TYPE_CHECKING:
    from transformer.config import Experiment, ModelConfig
    from transformer.config_io import load_experiment
    from transformer.convert import load_hf, save_hf
    from transformer.errors import UserError
    from transformer.model.architectures import architecture
    from transformer.model.network import build_model
    from transformer.sweeps import Sweep, arms, chain, product, scan, vary, zipped

_MODULES = {
    "transformer.config": ("Experiment", "ModelConfig"),
    "transformer.config_io": ("load_experiment",),
    "transformer.convert": ("load_hf", "save_hf"),
    "transformer.errors": ("UserError",),
    "transformer.model.architectures": ("architecture",),
    "transformer.model.network": ("build_model",),
    "transformer.sweeps": ("Sweep", "arms", "chain", "product", "scan", "vary", "zipped"),
}
"""Module -> the public names that it defines.

A module is imported when one of its names is first used, because importing JAX and Flax takes a
second and `python -m transformer --help` needs neither.
"""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

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


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
