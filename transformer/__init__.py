"""Transformers in JAX and Flax: one model for every architecture, one command for every machine.

from transformer import ModelConfig, build_model
model = build_model(ModelConfig(family="decoder", vocab_size=8192))
params = model.init(key, tokens)
logits = model.apply(params, tokens)

import transformer
run = transformer.train("experiments/quickstart.py", "runs/quickstart")
print(transformer.evaluate(run))
print(transformer.generate(run, ["Where is the library?"]))"""

from etils import epy

from transformer.parallel.host import keep_freed_memory, run_one_operation_per_device
from transformer.version import __version__

keep_freed_memory()
run_one_operation_per_device()
# Names are imported when first used: `--help` needs neither JAX nor Flax, which take a second.
with epy.lazy_api_imports(globals()):
    from transformer.api import LoadedRun, embed, evaluate, generate, load_run, score, train
    from transformer.config import Experiment, ModelConfig
    from transformer.config_io import load_experiment
    from transformer.convert import load_hf, save_hf
    from transformer.data.objectives import OBJECTIVES
    from transformer.decoding.beam import beam_search
    from transformer.decoding.sampling import sample
    from transformer.errors import UserError
    from transformer.evaluation.evaluators import EVALUATORS
    from transformer.lab.ladder import ladder
    from transformer.model.architectures import architecture
    from transformer.model.feed_forwards.base import FEED_FORWARDS
    from transformer.model.mixers.base import MIXERS
    from transformer.model.network import build_model
    from transformer.model.placements.base import PLACEMENTS, Placement
    from transformer.model.positions import SCHEMES, Position
    from transformer.sweeps import Sweep, arms, chain, product, scan, tuned, vary, zipped
    from transformer.training.optimizer import build_optimizer
    from transformer.training.optimizers import OPTIMIZERS
    from transformer.training.state import TrainState, abstract_state, init_state
    from transformer.training.step import make_train_step

__all__ = [
    "EVALUATORS", "FEED_FORWARDS", "MIXERS", "OBJECTIVES", "OPTIMIZERS", "PLACEMENTS",
    "SCHEMES", "Experiment", "LoadedRun", "ModelConfig", "Placement", "Position", "Sweep",
    "TrainState", "UserError", "__version__", "abstract_state", "architecture", "arms",
    "beam_search", "build_model", "build_optimizer", "chain", "embed", "evaluate", "generate",
    "init_state", "ladder", "load_experiment", "load_hf", "load_run", "make_train_step",
    "product", "sample", "save_hf", "scan", "score", "train", "tuned", "vary", "zipped",
]  # fmt: skip
