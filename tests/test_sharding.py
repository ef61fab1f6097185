"""The sharding table from logical names to mesh axes, and the arrangement of meshes."""

import contextlib
import dataclasses
import itertools
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import model_fields
from jax.sharding import NamedSharding, PartitionSpec as P

from transformer.config import Experiment, MeshConfig, ModelConfig
from transformer.errors import UserError
from transformer.mapping import from_mapping
from transformer.model.embedding import Embedding
from transformer.model.network import build_model
from transformer.parallel.host import run_one_operation_per_device
from transformer.parallel.mesh import arrange, check_memory, make_mesh, use
from transformer.parallel.sharding import RULES, shardings, unbox
from transformer.planning.hlo import HloProgram
from transformer.planning.work import collectives
from transformer.runs.fits import check_divisibility
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state, relayout


def boxed(names, shape):
    from flax.linen import LogicallyPartitioned

    return {
        "layer": {"kernel": LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)}
    }


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        (
            ("embed", "hedas"),
            (16, 4),
            "layer/kernel: the sharding table has no logical name 'hedas'; did you mean 'heads'",
        ),
        (("heads", "ff"), (16, 4), "layer/kernel: two of its dimensions"),
        (
            ("embed", "heads"),
            (16, 3),
            "layer/kernel: dimension 'heads' of size 3 is not divisible by 2 devices",
        ),
    ],
)
def test_invalid_logical_axes_raise_and_name_the_parameter(names, shape, message):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with pytest.raises(UserError, match=message):
        shardings(boxed(names, shape), mesh)


def test_array_without_logical_axes_raises_and_names_the_parameter():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    array = lambda *shape: {"layer": {"gate": jax.ShapeDtypeStruct(shape, jnp.float32)}}
    with pytest.raises(UserError, match="layer/gate: a parameter without logical axes; wrap its"):
        shardings(array(16), mesh)
    assert not shardings(array(), mesh)["layer"]["gate"].spec  # a number is replicated


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder_decoder"])
@pytest.mark.parametrize(
    "fields",
    [
        {
            "position": "learned",
            "tie_embeddings": False,
            "logit_bias": True,
            "glu": True,
            "embedding_norm": True,
        },
        {"position": "t5", "norm_placement": "rezero", "scan_layers": False},
    ],
)
def test_every_matrix_of_every_family_is_sharded(family, fields):
    model = build_model(ModelConfig(**model_fields(family, **fields)))
    args = (jnp.ones((1, 4), jnp.int32),) * (2 if family == "encoder_decoder" else 1)
    boxed_params = jax.eval_shape(model.init_with_axes, jax.random.key(0), *args)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = shardings(boxed_params, mesh)
    for path, sharding in jax.tree_util.tree_leaves_with_path(placed):
        if path[-1].key in ("kernel", "embedding"):
            assert {"fsdp", "tensor"} <= set(sharding.spec), path
    assert len({name for name, _ in RULES}) == len(RULES)


def test_a_decoding_step_moves_embeddings_instead_of_the_table():
    config = ModelConfig(**model_fields("decoder", vocab_size=4096))
    embedding, moved = Embedding(config), {}
    with use(make_mesh(MeshConfig(fsdp=8))) as mesh:
        for length in (1, 2):
            tokens = jax.ShapeDtypeStruct((8, length), jnp.int32)
            params = jax.eval_shape(embedding.init, jax.random.key(0), tokens)
            places = (shardings(params["params"], mesh), NamedSharding(mesh, P("fsdp")))
            look_up = lambda params, tokens: embedding.apply({"params": params}, tokens)
            lowered = jax.jit(look_up, in_shardings=places).lower(unbox(params["params"]), tokens)
            text = lowered.compile().as_text()
            moved[length] = sum(x.bytes for x in collectives(HloProgram.read(text)))
    table = 4096 * config.d_model * 4
    assert moved[2] > 0.8 * table and moved[1] < 0.1 * table


def test_mesh_larger_than_the_machine_raises():
    for sizes, message in [
        ({"data": 16}, "needs 16 devices, but there are 8"),
        ({"data": -1, "tensor": 3}, "mesh.tensor=3 needs a multiple of 3 devices, but there are 8"),
    ]:
        with pytest.raises(UserError, match=message):
            make_mesh(MeshConfig(**sizes))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ""),
        ("--xla_a=1", "--xla_a=1"),
        (
            "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=true",
            "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=true "
            "--xla_cpu_enable_concurrency_optimized_scheduler=false",
        ),
    ],
)
def test_simulated_devices_run_one_operation_at_a_time(monkeypatch, given, expected):
    monkeypatch.setenv("XLA_FLAGS", given)
    run_one_operation_per_device()
    assert os.environ["XLA_FLAGS"] == expected


def test_model_larger_than_memory_raises_before_allocation():
    """Otherwise XLA would abort the process."""
    config = from_mapping(
        Experiment,
        {
            "model": model_fields("decoder", d_model=2**30),
            "data": {"corpus": "pydoc", "length": 8},
        },
    )
    with use(make_mesh(MeshConfig(data=2, fsdp=4))) as mesh:
        abstract, _ = abstract_state(
            config,
            build_model(config.model),
            build_optimizer(config.optimizer, 1, config.model),
            mesh,
        )
        with pytest.raises(
            UserError,
            match=r"model: parameters take [\d,.]+ TiB per device, which has [\d.]+ GiB; "
            r"lower model.d_model",
        ):
            check_memory(abstract.params, mesh, "parameters")
        check_memory(abstract.step, mesh, "a number")


def tpu_devices(count):
    """Returns TPUs as JAX reports them: `count` slices of 2 x 2 x 2 chips, two hosts per slice."""
    corners = itertools.product(range(count), range(2), range(2), range(2))
    return [
        SimpleNamespace(
            platform="tpu",
            device_kind="TPU v5",
            coords=[x, y, z],
            core_on_chip=0,
            slice_index=s,
            process_index=2 * s + z,
            id=i,
        )
        for i, (s, x, y, z) in enumerate(corners)
    ]


@pytest.mark.parametrize(
    ("across", "sizes"),
    [
        ("data", {"data": 4, "fsdp": 4}),
        ("fsdp", {"data": 2, "fsdp": 8}),
        ("stage", {"data": 1, "stage": 2, "fsdp": 8}),
    ],
)
def test_only_one_axis_crosses_slices(across, sizes):
    """Each half of the axis `across` lies in one slice. Other axes do not cross slices."""
    config = MeshConfig(**sizes, slices=across)
    placed = arrange(config.sizes, config.slices, tpu_devices(2))
    assert placed.shape == tuple(config.sizes.values())
    slice_indices = np.vectorize(lambda device: device.slice_index)(placed)
    axis = list(config.sizes).index(across)
    halves = np.array_split(slice_indices, 2, axis=axis)
    assert [set(half.flat) for half in halves] == [{0}, {1}]


def test_axis_that_does_not_divide_over_slices_raises():
    with pytest.raises(
        UserError, match=r"mesh.data: 1 is not divisible by 2 slices; .* mesh.slices"
    ):
        arrange(MeshConfig(data=1, fsdp=16).sizes, "data", tpu_devices(2))


@pytest.mark.parametrize(
    ("mesh", "model", "message"),
    [
        ({"stage": 2}, {"scan_layers": False}, "mesh.stage: 2, but layers are not scanned"),
        (
            {"stage": 4},
            {"pipeline_rounds": 2, "pipeline_microbatches": 2, "num_decoder_layers": 8},
            "model.pipeline_microbatches: 2 is fewer than mesh.stage",
        ),
        (
            {"stage": 2, "fsdp": 2},
            {"pipeline_microbatches": 3},
            r"8 sequences of 8 tokens do not divide over "
            r"\(mesh.stage and model.pipeline_microbatches\) \* mesh.fsdp = 6 \* 2",
        ),
        ({"expert": 4}, {"max_length": 8}, None),
        (
            {"data": 3},
            {},
            r"data.batch_size: 8 sequences of 8 tokens do not divide over mesh.data = 3",
        ),
        (
            {"stage": 2},
            {"num_decoder_layers": 4, "layer_pattern": ({"window": 2}, {"window": 3}, {"window": 2},
                                                        {"window": 4})},
            "mesh.stage: 2 stages .* which repeats 1 times a period of 4 layers",
        ),
    ],
)  # fmt: skip
def test_check_divisibility_by_the_mesh(mesh, model, message):
    config = from_mapping(
        Experiment,
        {
            "model": model_fields("decoder", **model),
            "data": {"corpus": "pydoc", "length": 8, "batch_size": 8},
            "mesh": {"data": 1, **mesh},
        },
    )
    with contextlib.nullcontext() if message is None else pytest.raises(UserError, match=message):
        check_divisibility(config, make_mesh(config.mesh))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pipeline_rounds": 3}, "model.pipeline_rounds: 3 does not divide the 2 decoder layers"),
        (
            {"family": "encoder_decoder", "pipeline_rounds": 2, "num_encoder_layers": 3},
            "2 does not divide the 3 encoder layers",
        ),
        (
            {"pipeline_rounds": 2, "scan_layers": False},
            "model.pipeline_rounds: 2 has no effect without stacked layers: model.scan_layers",
        ),
        (
            {
                "pipeline_rounds": 2,
                "num_decoder_layers": 4,
                "layer_pattern": ({"window": 2}, {"window": 3}, {"window": 2}, {"window": 4}),
            },
            "the 1 periods of 4 decoder layers",
        ),
    ],
)
def test_invalid_pipeline_rounds_raise(fields, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**model_fields(**{"family": "decoder"} | fields))


def test_optimizer_statistics_that_cannot_be_converted_raise():
    """The statistics of Adafactor have other shapes than their parameters."""
    config = from_mapping(
        Experiment,
        {
            "model": model_fields("decoder"),
            "data": {"corpus": "pydoc", "length": 8, "batch_size": 8},
            "optimizer": {"name": "adafactor"},
            "mesh": {"data": 1},
        },
    )
    with use(make_mesh(config.mesh)) as mesh:
        new = dataclasses.replace(config.model, scan_layers=False)
        state, target = (
            abstract_state(
                dataclasses.replace(config, model=model),
                build_model(model),
                build_optimizer(config.optimizer, 1, config.model),
                mesh,
            )[0]
            for model in (config.model, new)
        )
        with pytest.raises(
            UserError,
            match=r"model.scan_layers, model.pipeline_rounds: opt_state/.* cannot be converted",
        ):
            relayout(state, config.model, new, target)
