"""The kernels of fused attention for GPUs, interpreted on CPUs: values and gradients equal
`reference`. They also lower to Triton's intermediate representation, whose verifier checks them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from test_attention_backends import assert_trees_close, bound_scheme, value_and_gradients
from test_flash import (
    AT,
    BOTH_WAYS,
    DISTANCE_BIASES,
    MASKS,
    ORDERED,
    PAST,
    SHUFFLED,
    assert_matches_reference,
    make_inputs,
    random_qkv,
)

from transformer.config import MeshConfig
from transformer.model.attention_backends import BACKENDS, Inputs, choose, flash
from transformer.model.attention_backends.flash import call, gpu
from transformer.model.masks import Tokens
from transformer.parallel.mesh import make_mesh, use


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(call, "on_gpu", lambda: True)
    monkeypatch.setattr(call, "COST", {"": {128: 1.0}})


@pytest.mark.usefixtures("on_gpu")
class TestInterpreted:
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("position", [None, "t5"])
    def test_every_mask_and_option(self, mask, position):
        assert_matches_reference(*random_qkv(), make_inputs(mask, position))

    @pytest.mark.parametrize("position", sorted({*DISTANCE_BIASES} - {"t5"}))
    def test_every_distance_bias(self, position):
        assert_matches_reference(*random_qkv(), make_inputs("causal", position))
        assert_matches_reference(*random_qkv(), make_inputs("window both ways", position))

    @pytest.mark.parametrize(("kv_heads", "d_value", "keys"), [(1, 24, 384), (2, 40, 250)])
    def test_grouped_heads_value_sizes_and_other_lengths(self, kv_heads, d_value, keys):
        q, k, v = random_qkv(keys=keys, kv_heads=kv_heads, d_value=d_value)
        where = jax.tree.map(lambda x: x[:, :keys], ORDERED)
        assert_matches_reference(q, k, v, Inputs(BOTH_WAYS, ORDERED, where, None, 0.3))
        scheme = bound_scheme("t5", "decoder", where)
        assert_matches_reference(q[:, :keys], k, v, Inputs(PAST, where, where, scheme, 0.3))

    def test_tokens_in_any_order_and_queries_without_keys(self):
        assert_matches_reference(*random_qkv(), Inputs(PAST, SHUFFLED, SHUFFLED, None, 0.3))
        keys = Tokens(AT[:, :128], jnp.where(jnp.arange(128) < 100, 1, 0)[None].repeat(2, 0))
        assert_matches_reference(*random_qkv(keys=128), Inputs(BOTH_WAYS, ORDERED, keys, None, 0.3))

    def test_repeated_gradients_are_equal_bit_by_bit(self):
        run = functools.partial(value_and_gradients, flash.flash, *random_qkv())
        first, second = (run(make_inputs("causal", "kerple")) for _ in range(2))
        jax.tree.map(np.testing.assert_array_equal, first, second)

    @pytest.mark.parametrize("order", ["sequences and heads", "ring"])
    def test_sharded_over_devices(self, order):
        """Also with dropout, whose mask does not depend on the mesh."""
        q, k, v = (jnp.concatenate([x] * 2) for x in random_qkv())
        tokens = jax.tree.map(lambda x: jnp.concatenate([x] * 2), ORDERED)
        options = {"dropout": 0.2, "dropout_key": jax.random.key(3)}
        scheme = bound_scheme("t5", "decoder", tokens, 24, d_head=16)
        inputs = Inputs(PAST, tokens, tokens, scheme, 0.3, **options)
        expected = value_and_gradients(BACKENDS["reference"].attend, q, k, v, inputs)
        is_ring = order == "ring"
        sizes = {"data": 2, "context": 2, "tensor": 2} if is_ring else {"data": 4, "tensor": 2}
        with use(mesh := make_mesh(MeshConfig(**sizes))):
            place = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
            tokens = jax.tree.map(place, tokens)
            inputs = inputs.replace(q_tokens=tokens, k_tokens=tokens)
            actual = value_and_gradients(flash.flash, *map(place, (q, k, v)), inputs)
        assert_trees_close(actual, expected, atol=1e-4)

    def test_unsupported_inputs_are_named(self):
        q, k, v = random_qkv()
        shaw = make_inputs("causal", "shaw")
        assert "may depend on distance alone" in BACKENDS["flash"].why_not(q, k, v, shaw)
        large = random_qkv(size=320)
        reason = BACKENDS["flash"].why_not(*large, make_inputs("causal", None))
        assert "head sizes up to 256" in reason


@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_kernels_lower_for_gpus(size, dtype):
    """With everything that a kernel can contain."""
    device = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    inputs = make_inputs("everything", None)
    facts = bound_scheme("t5", "encoder", ORDERED, 24, d_head=size)
    q, k, v = random_qkv(size=size, d_value=size, dtype=dtype)

    def loss(q, k, v, scheme):
        attend = choose("auto", q, k, v, inputs.replace(position=scheme))
        return jnp.sum(attend(q, k, v, inputs.replace(position=scheme)).astype(jnp.float32))

    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=device)):
        traced = jax.jit(jax.grad(loss, (0, 1, 2, 3), allow_int=True)).trace(q, k, v, facts)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 4  # forward, and the gradients of q, of k and v, of bias


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_divide_the_lengths_to_which_sequences_are_padded(itemsize):
    for size in (16, 64, 96, 128, 256):
        tiles = [x for bias in (False, True) for x in gpu.shapes(itemsize, size, bias)]
        assert all(128 % n == 0 for tile in tiles for n in tile[:2])
        assert tiles[-1].t == tiles[-1].s
