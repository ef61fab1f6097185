"""The table from logical names to mesh axes is checked; the mesh is made or refused."""

import jax
import jax.numpy as jnp
import pytest
from conftest import TINY

from transformer.config import Experiment, MeshConfig, ModelConfig
from transformer.config_io import from_mapping
from transformer.errors import UserError
from transformer.model.network import build_model
from transformer.parallel.mesh import check_memory, make_mesh, use
from transformer.parallel.sharding import RULES, describe, shardings, unbox
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state


def boxed(names, shape):
    from flax.linen import LogicallyPartitioned

    return {"layer": {"kernel": LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)}}


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        (
            ("embed", "hedas"),
            (16, 4),
            "layer/kernel: the sharding table has no logical name 'hedas'; did you mean 'heads'",
        ),
        (("heads", "ff"), (16, 4), "layer/kernel: two of its dimensions"),
        (("embed", "heads"), (16, 3), "layer/kernel: dimension 'heads' of 3 does not divide over 2 devices"),
    ],
)
def test_the_table_is_checked_and_names_the_parameter(names, shape, message):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with pytest.raises(UserError, match=message):
        shardings(boxed(names, shape), mesh)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder_decoder"])
@pytest.mark.parametrize(
    "fields",
    [
        {"position": "learned", "tie_embeddings": False, "logit_bias": True, "glu": True, "embedding_norm": True},
        {"position": "t5", "norm_placement": "rezero", "scan_layers": False},
    ],
)
def test_every_matrix_of_every_family_is_sharded(family, fields):
    model = build_model(ModelConfig(family=family, **TINY, **fields))
    args = (jnp.ones((1, 4), jnp.int32),) * (2 if family == "encoder_decoder" else 1)
    boxed_params = jax.eval_shape(model.init, jax.random.key(0), *args)["params"]
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = shardings(boxed_params, mesh)
    for path, sharding in jax.tree_util.tree_leaves_with_path(placed):
        if path[-1].key in ("kernel", "embedding"):
            assert {"fsdp", "tensor"} <= set(sharding.spec), path
    text = describe(unbox(boxed_params), placed, mesh)
    assert "data 2 x fsdp 2 x context 1 x tensor 2" in text
    assert len({name for name, _ in RULES}) == len(RULES)


def test_a_mesh_larger_than_the_machine_is_refused():
    for sizes, message in [
        ({"data": 16}, "needs 16 devices, but there are 8"),
        ({"data": -1, "tensor": 3}, "take 3 devices, which does not divide the 8"),
    ]:
        with pytest.raises(UserError, match=message):
            make_mesh(MeshConfig(**sizes))


def test_a_model_larger_than_the_memory_is_refused_before_it_is_made():
    """Where XLA would abort the process."""
    config = from_mapping(
        Experiment, {"model": {"family": "decoder", **TINY, "d_model": 2**30}, "data": {"corpus": "pydoc", "length": 8}}
    )
    with use(make_mesh(MeshConfig(data=2, fsdp=4))) as mesh:
        abstract, _ = abstract_state(config, build_model(config.model), build_optimizer(config.optimizer, 1), mesh)
        with pytest.raises(
            UserError, match=r"model: parameters take [\d,.]+ TB a device, which has [\d.]+ GB; lower model.d_model"
        ):
            check_memory(abstract.params, mesh, "parameters")
        check_memory(abstract.step, mesh, "a number")
