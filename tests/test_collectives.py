"""The compiled step talks about what its layout needs, and about nothing else."""

import re

import numpy as np
import pytest

from transformer.config import Experiment
from transformer.config_io import from_mapping
from transformer.data.batching import assemble
from transformer.data.objectives import Segment
from transformer.model.layout import flatten, layer_shapes
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state
from transformer.training.step import make_train_step

ROWS, LENGTH, VOCAB, D, FF = 24, 40, 56, 32, 48
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def compiled(family: str, mesh: dict, **model):
    """(collectives of a training step: kind -> shapes, each as it is on a device; shapes of the parameters of a layer)."""
    config = from_mapping(Experiment, {
        "model": {"family": family, "vocab_size": VOCAB, "d_model": D, "d_ff": FF, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2,
                  "max_length": LENGTH, "position": "rotary", **model},
        "data": {"corpus": "pydoc", "objective": "seq2seq" if family == "encoder_decoder" else "causal_lm", "length": LENGTH, "batch_size": ROWS},
        "mesh": {"data": 1, **mesh},
    })  # fmt: skip
    ids = np.arange(LENGTH, dtype=np.int32) % 50 + 4
    segment = Segment(ids, ids, ids if family == "encoder_decoder" else None)
    with use(make_mesh(config.mesh)) as devices:
        module, optimizer = build_model(config.model), build_optimizer(config.optimizer, 10)
        abstract, placed = abstract_state(config, module, optimizer, devices)
        step = make_train_step(config, module, optimizer, devices, placed)
        text = step.lower(abstract, assemble([[segment]] * ROWS, LENGTH)).compile().as_text()
    found = {kind: [] for kind in KINDS}
    for result, kind in re.findall(rf"^\s*%?\S+ = (.*?) ({'|'.join(KINDS)})(?:-start)?\(", text, re.M):
        found[kind] += [
            tuple(map(int, dims.split(","))) if dims else () for dims in re.findall(r"\w+\[([\d,]*)\]", result)
        ]
    return found, set(layer_shapes(config.model, flatten(abstract.params)).values())


def big(shapes):
    """What is no statistic: more numbers than a vector of the model's width."""
    return [shape for shape in shapes if np.prod(shape, dtype=int) > max(D, FF, VOCAB, ROWS * LENGTH)]


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_data_parallel_adds_up_gradients_alone(family):
    found, parameters = compiled(family, {"data": 4})
    assert {shape for shape in found["all-reduce"] if len(shape) > 1} <= {*parameters, (D, VOCAB)}
    assert not any(big(found[kind]) for kind in KINDS if kind != "all-reduce")


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_fsdp_gathers_parameters_and_never_activations(family):
    found, parameters = compiled(family, {"fsdp": 4})
    assert set(map(len, found["all-gather"])) > {1} and set(found["all-gather"]) <= parameters
    matrices = {shape for shape in found["all-reduce"] + found["reduce-scatter"] if len(shape) > 1}
    assert matrices and matrices <= {
        *parameters,
        (D, VOCAB),
    }  # gradients, and that of the tied matrix as it is computed
    assert not big(found["all-to-all"]) and not big(found["collective-permute"])


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_tensor_parallel_adds_up_the_residual_stream_and_never_gathers_logits(family):
    found, _ = compiled(family, {"tensor": 4})
    assert {shape for shape in big(found["all-reduce"])} == {(ROWS, LENGTH, D)}
    for kind in KINDS:
        assert not [s for s in found[kind] if VOCAB in s or VOCAB // 4 in s], (
            "logits, or the matrix that they come from"
        )
    assert not any(big(found[kind]) for kind in ("all-gather", "all-to-all", "collective-permute"))


def test_context_parallel_passes_keys_and_values_on():
    found, parameters = compiled("decoder", {"context": 4})
    blocks = set(big(found["collective-permute"]))
    assert blocks and all(shape[-2:] == (4, 8) for shape in blocks)  # heads, and their size
    assert {shape for shape in found["all-reduce"] if len(shape) > 1} <= {*parameters, (D, VOCAB)}
    assert not big(found["all-gather"]) and not big(found["all-to-all"])
