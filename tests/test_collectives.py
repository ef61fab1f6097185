"""A compiled training step contains exactly the collectives that its layout needs."""

import re

import jax
import numpy as np
import pytest
from conftest import make, model_fields, small, tokens

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


def step_collectives(family: str, mesh: dict, **model):
    """Returns (the collectives of a training step, the shapes of the parameters of a layer).

    The collectives are a dictionary: kind -> shapes on one device.
    """
    config = from_mapping(
        Experiment,
        {
            "model": model_fields(
                family,
                vocab_size=VOCAB,
                d_model=D,
                d_ff=FF,
                max_length=LENGTH,
                position="rotary",
                **model,
            ),
            "data": {
                "corpus": "pydoc",
                "objective": "seq2seq" if family == "encoder_decoder" else "causal_lm",
                "length": LENGTH,
                "batch_size": ROWS,
            },
            "mesh": {"data": 1, **mesh},
        },
    )
    ids = np.arange(LENGTH, dtype=np.int32) % 50 + 4
    segment = Segment(ids, ids, ids if family == "encoder_decoder" else None)
    with use(make_mesh(config.mesh)) as devices:
        module, optimizer = (
            build_model(config.model),
            build_optimizer(config.optimizer, 10, config.model),
        )
        abstract, shardings = abstract_state(config, module, optimizer, devices)
        step = make_train_step(config, module, optimizer, devices, shardings)
        hlo = step.lower(abstract, assemble([[segment]] * ROWS, LENGTH)).compile().as_text()
    collectives = {kind: [] for kind in KINDS}
    for result_type, kind in re.findall(
        rf"^\s*%?\S+ = (.*?) ({'|'.join(KINDS)})(?:-start)?\(", hlo, re.M
    ):
        shapes = [
            tuple(map(int, dims.split(","))) if dims else ()
            for dims in re.findall(r"\w+\[([\d,]*)\]", result_type)
        ]
        # A leading 1 is one layer of its stack.
        collectives[kind] += [
            shape[1:] if shape[:1] == (1,) and len(shape) > 1 else shape for shape in shapes
        ]
    return collectives, set(layer_shapes(config.model, flatten(abstract.params)).values())


def big(shapes):
    """Returns the shapes larger than any statistic: than a vector over features or over tokens."""
    return [
        shape for shape in shapes if np.prod(shape, dtype=int) > max(D, FF, VOCAB, ROWS * LENGTH)
    ]


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_data_parallel_all_reduces_only_gradients(family):
    collectives, parameters = step_collectives(family, {"data": 4})
    assert {shape for shape in collectives["all-reduce"] if len(shape) > 1} <= {
        *parameters,
        (D, VOCAB),
    }
    assert not any(big(collectives[kind]) for kind in KINDS if kind != "all-reduce")


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_fsdp_gathers_parameters_and_never_activations(family):
    collectives, parameters = step_collectives(family, {"fsdp": 4})
    assert (
        set(map(len, collectives["all-gather"])) > {1}
        and set(collectives["all-gather"]) <= parameters
    )
    matrices = {
        shape
        for shape in collectives["all-reduce"] + collectives["reduce-scatter"]
        if len(shape) > 1
    }
    # These are gradients; (D, VOCAB) is the tied matrix in the layout in which it is computed.
    assert matrices and matrices <= {*parameters, (D, VOCAB)}
    assert not big(collectives["all-to-all"]) and not big(collectives["collective-permute"])


STREAM = (ROWS, LENGTH, D)


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_tensor_parallel_reduces_residual_stream_and_not_logits(family):
    """Between sublayers, each device holds a part of the tokens.

    They are all-gathered before a sublayer and all-reduced after it (reduce-scattered where the
    compiler supports that).
    """
    collectives, _ = step_collectives(family, {"tensor": 4})
    assert (
        {shape for shape in big(collectives["all-reduce"])}
        == {STREAM}
        == {shape for shape in big(collectives["all-gather"])}
    )
    for kind in KINDS:
        assert not [s for s in collectives[kind] if VOCAB in s or VOCAB // 4 in s], (
            "no collective on logits or on the unembedding matrix"
        )
    assert not any(big(collectives[kind]) for kind in ("all-to-all", "collective-permute"))


def test_sequence_parallel_norms_see_a_shard_of_the_tokens():
    """Sequence parallelism (Korthikanti et al. 2022).

    On each of four devices, a norm computes the statistics of T / 4 tokens.
    """
    model, params = make(small("decoder", num_kv_heads=4))
    with use(make_mesh(MeshConfig(data=1, tensor=4))):
        hlo = jax.jit(model.apply).lower(params, tokens(0, 2, 8)).compile().as_text()
    reduced_shapes = set(re.findall(r"f32\[([\d,]+)\]\S* reduce\(.*(?:in_norm|final_norm)", hlo))
    assert reduced_shapes == {"2,2"}, reduced_shapes


def test_pipeline_stages_pass_only_microbatches():
    collectives, parameters = step_collectives("decoder", {"stage": 2})
    half = (ROWS // 2, LENGTH, D)
    assert set(big(collectives["collective-permute"])) == {half}
    assert set(big(collectives["all-gather"])) <= {(2, *half)}, (
        "only sequences, which are sharded over stages outside of the layers"
    )
    outside = {shape for shape in parameters if VOCAB in shape} | {(2, *half), (D, VOCAB)}
    assert set(big(collectives["all-reduce"])) <= outside, (
        "no gradient of a layer, because each layer is on one stage"
    )
    assert not big(collectives["all-to-all"])


def test_expert_parallel_gathers_tokens_and_not_expert_weights():
    experts = {"name": "experts", "num_experts": 4}
    collectives, parameters = step_collectives("decoder", {"expert": 4}, feed_forward=experts)
    # Besides tokens, these are the router's probabilities and choices.
    assert set(big(collectives["all-gather"])) <= {STREAM, (ROWS, LENGTH, 4), (ROWS, LENGTH, 2)}
    assert set(big(collectives["reduce-scatter"])) == {(ROWS // 4, LENGTH, D)}
    matrices = {shape for shape in parameters if shape[:1] == (4,) and set(shape[1:]) == {D, FF}}
    assert len(matrices) == 2 and not matrices & {
        shape for kind in KINDS for shape in collectives[kind]
    }


def test_experts_with_capacity_exchange_tokens_by_all_to_all():
    experts = {"name": "experts", "num_experts": 4, "capacity_factor": 1.0}
    collectives, _ = step_collectives("decoder", {"expert": 4}, feed_forward=experts)
    assert big(collectives["all-to-all"]), "tokens are sent to experts and back"
    assert not [s for s in big(collectives["all-gather"]) if s == STREAM]


def test_context_parallel_permutes_keys_and_values():
    collectives, parameters = step_collectives("decoder", {"context": 4})
    blocks = set(big(collectives["collective-permute"]))
    assert blocks and all(shape[-2:] == (4, 8) for shape in blocks)  # heads and head size
    assert {shape for shape in collectives["all-reduce"] if len(shape) > 1} <= {
        *parameters,
        (D, VOCAB),
    }
    assert not big(collectives["all-gather"]) and not big(collectives["all-to-all"])
