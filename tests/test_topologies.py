"""Placements with several residual streams, or whose norms depend on the layer (test_oracle.py has
their equations)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle_streams
import pytest
from conftest import make, masks, small, start_decoding, tokens

from transformer import UserError
from transformer.decoding.prefill import advance
from transformer.model.layout import flatten
from transformer.model.network import build_model
from transformer.model.placements.base import PLACEMENTS, Placement
from transformer.model.placements.hyper_connections import sinkhorn


@pytest.mark.parametrize("name", oracle_streams.TOPOLOGIES)
def test_decodes_from_its_cache(name):
    """Streams belong to the new tokens alone, so that a cache does not hold them."""
    config = small("decoder", position="rotary", d_head=4, norm_placement=name)
    model, params = make(config)
    x = tokens(2, 2, 7)
    full = jax.jit(model.apply)(params, x, **masks(x))
    logits, memory = start_decoding(model, params, x[:, :3], 10)
    step = jax.jit(lambda tokens, memory: advance(model, params, tokens, memory))
    for t in range(3, 8):
        np.testing.assert_allclose(logits, full[:, t - 1], atol=1e-4)
        if t < 7:
            logits, memory = step(x[:, t], memory)


@pytest.mark.parametrize("hook", ["begin", "end", "check"])
def test_a_placement_may_override_one_hook(monkeypatch, hook):
    called = []
    inherited = getattr(Placement, hook)
    override = lambda self, *args: called.append(hook) or inherited(self, *args)
    own = type("Own", (Placement,), {hook: override, "in_norm": True})
    monkeypatch.setitem(PLACEMENTS._classes, hook, dataclasses.dataclass(frozen=True)(own))
    make(small("decoder", norm_placement=hook))
    assert called


@pytest.mark.parametrize("placement", ["hyper_connections", "siamese_norm", "mhc"])
def test_bfloat16_follows_float32(placement):
    """The weights of streams are computed in float32 and do not change the type of streams."""
    config = small("decoder", position="rotary", d_head=4, norm_placement=placement)
    model, params = make(config)
    rounded = build_model(config.part(dtype="bfloat16"))
    x = tokens(0, 2, 6)
    exact, approximate = (jax.jit(m.apply)(params, x) for m in (model, rounded))
    difference = float(jnp.abs(exact - approximate).max())
    assert 1e-5 < difference < 0.1 * float(jnp.abs(exact).max())


def test_hyper_connections_begin_as_pre_norm():
    sizes = {"position": "rotary", "d_head": 4, "num_decoder_layers": 3, "norm": "rmsnorm"}
    hyper = build_model(small("decoder", norm_placement="hyper_connections", **sizes))
    pre = build_model(small("decoder", norm_placement="pre", **sizes))
    x = tokens(0, 2, 6)
    params = hyper.init(jax.random.key(0), x)
    read = flatten(params)["decoder/layers/feed_forward_residual/read"]
    np.testing.assert_array_equal(read, np.eye(4)[[1, 3, 1]])  # stream 2 l + 1 modulo 4
    # The sum of n equal streams is n times the stream of pre-norm, which the last norm undoes.
    expected, logits = (jax.jit(m.apply)(params, x) for m in (pre, hyper))
    assert float(jnp.abs(expected).max()) > 0.1
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_sinkhorn_is_doubly_stochastic():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 4)), jnp.float32)
    y = sinkhorn(x, 20)
    assert float(jnp.abs(jax.nn.softmax(x, axis=-1).sum(-2) - 1).max()) > 0.1
    for axis in (-1, -2):
        np.testing.assert_allclose(y.sum(axis), 1.0, atol=1e-4)
    tiny_row = sinkhorn(x.at[..., 1, :].add(-300.0), 20)  # exp(-300) is 0 in float32
    np.testing.assert_allclose(tiny_row, y, atol=1e-3)


def test_attention_residuals_begin_as_a_mean():
    """At initialization, the first sublayer reads the embeddings, and the last query the mean."""
    placement = {"name": "attention_residuals", "final_norm": False}
    config = small(
        "decoder", position="none", norm_placement=placement, num_decoder_layers=1, parallel=True
    )
    model = build_model(config)
    x = tokens(0, 1, 4)
    params = model.init(jax.random.key(0), x)
    hidden = model.apply(params, x, method="hidden")[0]
    pre = {"name": "pre", "final_norm": False}
    plain = build_model(dataclasses.replace(config, norm_placement=pre))
    expected = plain.apply(params, x, method="hidden")[0] / 2
    assert float(jnp.abs(expected).max()) > 0.1
    np.testing.assert_allclose(hidden, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"norm_placement": "pre", "layer_pattern": ({"norm_placement": "resi_dual"}, {})},
            "model.layer_pattern: norm_placement = 'resi_dual' and 'pre' carry different residual",
        ),
        (
            {"norm_placement": "keel", "layer_pattern": ({"feed_forward": "none"}, {})},
            "model.norm_placement: 'keel' needs the same number of sublayers in all layers",
        ),
        ({"norm_placement": {"name": "mhc", "streams": 1}}, "streams: 1 is too small; at least 2"),
        (
            {"norm_placement": {"name": "mhc", "iterations": 0}},
            "iterations: 0 is too small; at least 1",
        ),
        ({"norm_placement": {"name": "mhc", "out_norm": True}}, "out_norm: True is not possible"),
        ({"norm_placement": {"name": "mix_ln", "share": 1.5}}, "share: 1.5 must lie in"),
        ({"norm_placement": {"name": "attention_residuals", "block": 0}}, "block: 0 is too small"),
        (
            {"norm_placement": {"name": "hybrid_norm"}},
            "'hybrid_norm' normalizes values, too; set model.qk_norm=True and model.v_norm=True",
        ),
        (
            {"norm_placement": "hybrid_norm", "parallel": True},
            "'hybrid_norm' needs a feed-forward after attention; set model.parallel=False",
        ),
    ],
)
def test_invalid_topologies_raise(fields, message):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        small("decoder", **fields)
