"""The compiled step talks about what its layout needs, and about nothing else."""

import re

import jax
import numpy as np
import pytest
from conftest import make, sized, small, tokens

from transformer.config import Experiment, MeshConfig
from transformer.data.batching import assemble
from transformer.data.objectives.base import Segment
from transformer.mapping import from_mapping
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
        "model": sized(family, vocab_size=VOCAB, d_model=D, d_ff=FF, max_length=LENGTH, position="rotary", **model),
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
    for result, kind in re.findall(
        rf"^\s*%?\S+ = (.*?) ({'|'.join(KINDS)})(?:-start)?\(", text, re.M
    ):
        shapes = [
            tuple(map(int, dims.split(","))) if dims else ()
            for dims in re.findall(r"\w+\[([\d,]*)\]", result)
        ]
        found[kind] += [
            shape[1:] if shape[:1] == (1,) and len(shape) > 1 else shape for shape in shapes
        ]  # a layer of its stack
    return found, set(layer_shapes(config.model, flatten(abstract.params)).values())


def big(shapes):
    """What is no statistic: more numbers than a vector of the model's width."""
    return [
        shape for shape in shapes if np.prod(shape, dtype=int) > max(D, FF, VOCAB, ROWS * LENGTH)
    ]


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


STREAM = (ROWS, LENGTH, D)


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_tensor_parallel_adds_up_the_residual_stream_and_never_gathers_logits(family):
    """Between sublayers each device holds some of the tokens: they are gathered before one, and added up (in parts, where the compiler has
    a scattering sum) behind it."""
    found, _ = compiled(family, {"tensor": 4})
    assert (
        {shape for shape in big(found["all-reduce"])}
        == {STREAM}
        == {shape for shape in big(found["all-gather"])}
    )
    for kind in KINDS:
        assert not [s for s in found[kind] if VOCAB in s or VOCAB // 4 in s], (
            "logits, or the matrix that they come from"
        )
    assert not any(big(found[kind]) for kind in ("all-to-all", "collective-permute"))


def test_norms_between_sublayers_see_a_part_of_the_tokens():
    """Sequence parallelism (Korthikanti et al. 2022): a norm's statistics are of T / 4 tokens on each of four devices."""
    model, params = make(small("decoder", num_kv_heads=4))
    with use(make_mesh(MeshConfig(data=1, tensor=4))):
        text = jax.jit(model.apply).lower(params, tokens(0, 2, 8)).compile().as_text()
    sums = set(re.findall(r"f32\[([\d,]+)\]\S* reduce\(.*(?:in_norm|final_norm)", text))
    assert sums == {"2,2"}, sums


def test_a_pipeline_passes_micro_batches_on():
    found, parameters = compiled("decoder", {"stage": 2})
    half = (ROWS // 2, LENGTH, D)
    assert set(big(found["collective-permute"])) == {half}
    assert set(big(found["all-gather"])) <= {(2, *half)}, (
        "rows, which outside of the layers are spread over stages too"
    )
    outside = {shape for shape in parameters if VOCAB in shape} | {(2, *half), (D, VOCAB)}
    assert set(big(found["all-reduce"])) <= outside, (
        "no gradient of a layer, which is on one stage alone"
    )
    assert not big(found["all-to-all"])


def test_experts_keep_their_matrices_and_see_the_tokens_of_all():
    experts = {"name": "experts", "num_experts": 4}
    found, parameters = compiled("decoder", {"expert": 4}, feed_forward=experts)
    assert set(big(found["all-gather"])) <= {
        STREAM,
        (ROWS, LENGTH, 4),
        (ROWS, LENGTH, 2),
    }  # also probabilities and choices
    assert set(big(found["reduce-scatter"])) == {(ROWS // 4, LENGTH, D)}
    matrices = {shape for shape in parameters if shape[:1] == (4,) and set(shape[1:]) == {D, FF}}
    assert len(matrices) == 2 and not matrices & {shape for kind in KINDS for shape in found[kind]}


def test_experts_with_places_are_sent_their_tokens():
    experts = {"name": "experts", "num_experts": 4, "capacity_factor": 1.0}
    found, _ = compiled("decoder", {"expert": 4}, feed_forward=experts)
    assert big(found["all-to-all"]), "tokens to experts and back"
    assert not [s for s in big(found["all-gather"]) if s == STREAM]


def test_context_parallel_passes_keys_and_values_on():
    found, parameters = compiled("decoder", {"context": 4})
    blocks = set(big(found["collective-permute"]))
    assert blocks and all(shape[-2:] == (4, 8) for shape in blocks)  # heads, and their size
    assert {shape for shape in found["all-reduce"] if len(shape) > 1} <= {*parameters, (D, VOCAB)}
    assert not big(found["all-gather"]) and not big(found["all-to-all"])
