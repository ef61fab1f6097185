"""Layers that differ, states that do not start at zero, and padding in unusual places."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import init_model, make, small, tokens
from flax import linen as nn, struct

from transformer import MIXERS, UserError
from transformer.model.cache import empty_cache
from transformer.model.inputs import check_interruptions
from transformer.model.mixers.base import Mixer
from transformer.model.modules import Linear
from transformer.model.network import abstract_params
from transformer.model.positions import SCHEMES, Position
from transformer.model.positions.absolute import sinusoids
from transformer.model.stack import distinct_schemes

OTHER_MIXERS = {
    "mla": ({"mixer": "mla"}, {"mixer": "attention"}),
    "gated_delta": ({"mixer": "gated_delta"}, {"mixer": "attention"}),
}


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
@pytest.mark.parametrize("pattern", ["mla", "gated_delta", "spelling"])
def test_layers_that_differ_add_position_embeddings_once(pattern, position, scan_layers):
    """If the layers add nothing, the stack returns norm(embedding + position)."""
    layers = OTHER_MIXERS.get(pattern, ({"position": {"name": position}}, {}))
    model, params = make(
        small(
            "decoder",
            position=position,
            layer_pattern=layers,
            scan_layers=scan_layers,
            num_kv_heads=2 if pattern == "gated_delta" else 0,
            norm_placement="pre",
        )
    )
    tables = [name for name in params["decoder"] if name.startswith("position_embedding")]
    assert tables == (["position_embedding"] if position == "learned" else [])
    kept = {name: params["decoder"][name] for name in (*tables, "final_norm")}
    idle = jax.tree.map(jnp.zeros_like, params["decoder"]) | kept
    x = tokens(0, 2, 9)
    hidden = jax.jit(functools.partial(model.apply, method="hidden"))
    h, _ = hidden(params | {"decoder": idle}, x)
    added = kept[tables[0]][:9] if tables else sinusoids(jnp.arange(9)[None], 16, 10_000.0)
    embedded = params["embedding"]["embedding"][x]
    norm = lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    assert np.abs(norm(embedded + added) - norm(embedded + 2 * added)).max() > 1e-2
    gain, offset = kept["final_norm"]["gain"], kept["final_norm"]["offset"]
    np.testing.assert_allclose(h, norm(embedded + added) * gain + offset, atol=1e-5)


def test_a_relative_table_is_shared_by_layers_with_other_heads():
    names = [
        [name for name in abstract_params(config)["decoder"] if name.startswith("relative_bias")]
        for config in (
            small("decoder", position="t5", num_kv_heads=0, layer_pattern=OTHER_MIXERS["mla"]),
            small("decoder", position="t5", layer_pattern=({"position": {"name": "t5"}}, {})),
            small(
                "decoder",
                layer_pattern=({"position": {"name": "t5", "num_buckets": 8}}, {"position": "t5"}),
            ),
        )
    ]
    assert names == [["relative_bias"], ["relative_bias"], ["relative_bias", "relative_bias_1"]]


class RunningMax(nn.Module):
    """y_t = W max_(s <= t) x_s."""

    config: object

    @nn.compact
    def __call__(self, x_BxTxD, context, position, state, deterministic):
        y_BxTxD = jax.lax.cummax(x_BxTxD, axis=1)
        if state is not None:
            y_BxTxD = jnp.maximum(y_BxTxD, state[:, None])
            state = y_BxTxD[:, -1]
        names = ("embed", "ff")
        return Linear(self.config, (16,), names, False, name="out")(y_BxTxD), state


def scheme_with_slope(steepness: float):
    """Returns a new class of a scheme whose bias depends on the size of a head."""

    @struct.dataclass
    class Slope(Position):
        by_distance: ClassVar = True
        slope: jax.Array | float = 0.0

        def bind(self, param, facts):
            return self.replace(slope=jnp.float32(steepness / facts.d_head))

        def bias(self, q_positions_BxT, k_positions_BxS):
            distance_BxTxS = q_positions_BxT[:, :, None] - k_positions_BxS[:, None, :]
            return -self.slope * jnp.abs(distance_BxTxS)[:, None].astype(jnp.float32)

    return Slope


def test_layers_share_a_scheme_only_if_bind_reads_equal_facts(monkeypatch):
    monkeypatch.setitem(SCHEMES._classes, "slope", scheme_with_slope(1.0))
    alike, other_heads = (
        small("decoder", position="slope", num_kv_heads=0, layer_pattern=pattern)
        for pattern in ((), OTHER_MIXERS["mla"])
    )
    assert [len(distinct_schemes(c, "decoder")[0]) for c in (alike, other_heads)] == [1, 2]


def test_scheme_that_is_defined_again_replaces_the_former_one(monkeypatch):
    outputs = []
    for steepness in (1.0, 40.0):
        monkeypatch.setitem(SCHEMES._classes, "slope", scheme_with_slope(steepness))
        model, params = make(small("decoder", position="slope"))
        outputs.append(model.apply(params, tokens(0, 2, 9)))
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3


@dataclasses.dataclass(frozen=True)
class RunningMaxMixer(Mixer):
    in_order: ClassVar[bool] = True
    shape: str = "good"

    def build(self, config, side, gain, out_gain):
        return functools.partial(RunningMax, config)

    def empty_state(self, config, batch, slots):
        shape = (batch, 16) if self.shape == "good" else (16,)
        return jnp.full(shape, -jnp.inf)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_an_initial_state_need_not_be_zero(scan_layers, monkeypatch):
    monkeypatch.setitem(MIXERS._classes, "running_max", RunningMaxMixer)
    monkeypatch.setattr(RunningMaxMixer, "name", "running_max", raising=False)
    fields = {"position": "none", "num_heads": 8, "num_kv_heads": 0, "scan_layers": scan_layers}
    model, params = make(small("decoder", mixer="running_max", **fields))
    x = tokens(0, 2, 7)
    whole, cache = model.apply(params, x), model.empty_cache(2, 7)
    for t in range(7):
        logits, cache = model.apply(params, x[:, t : t + 1], cache, method="decode")
        np.testing.assert_allclose(logits[:, 0], whole[:, t], atol=1e-5)
    wrong = small("decoder", mixer={"name": "running_max", "shape": "no batch"}, **fields)
    with pytest.raises(TypeError, match=r"empty_state: array '' has shape \[16\]; axis 0 must be"):
        empty_cache(wrong, 2, 7)


def test_every_spelling_of_a_layer_without_feed_forward():
    configs = [
        small("decoder", num_decoder_layers=2, layer_pattern=({"feed_forward": spec}, {}))
        for spec in ("none", {"name": "none"})
    ]
    first, second = (jax.tree.map(lambda x: x.shape, abstract_params(c)) for c in configs)
    assert first == second != jax.tree.map(lambda x: x.shape, abstract_params(small("decoder")))


def test_residual_init_scale_counts_the_sublayers_of_all_layers():
    fields = {"layer_pattern": ({}, {"feed_forward": "none"}), "scan_layers": False}
    scaled, plain = (
        init_model(small("encoder_decoder", residual_init_scale=on, **fields))[1]
        for on in (True, False)
    )
    for side, sublayers in {"encoder": 2 + 1, "decoder": 3 + 2}.items():
        kernels = [p[side]["layers_1"]["self_attention"]["out"]["kernel"] for p in (scaled, plain)]
        np.testing.assert_allclose(kernels[0], kernels[1] * sublayers**-0.5, rtol=1e-5)


def test_rounds_of_a_pipeline_keep_all_layers():
    """Without the first norm, the layers of a stack differ, so it has one period."""
    with pytest.raises(UserError, match="2 does not divide the 1 periods of 4 decoder layers"):
        small("decoder", num_decoder_layers=4, first_norm=False, pipeline_rounds=2)


@pytest.mark.parametrize("mixer", ["attention", "mla", "lstm", "gated_delta"])
def test_padding_between_tokens_of_a_document(mixer):
    """Mixers skip it or reject it, in one pass and in a continuation with padding in front."""
    heads = {"num_heads": 8} if mixer == "lstm" else {}
    position = "rotary" if mixer in ("attention", "mla") else "none"
    model, params = make(small("decoder", mixer=mixer, position=position, num_kv_heads=0, **heads))
    x = tokens(0, 1, 6)
    run = lambda *args, **options: jax.jit(lambda p: model.apply(p, *args, **options))(params)
    whole = run(x)
    gap = np.array([[1, 1, 1, 0, 0, 1, 1, 1]], bool)
    padded = jnp.zeros((1, 8), jnp.int32).at[gap].set(x[0])
    positions = jnp.maximum(jnp.cumsum(gap, axis=1) - 1, 0)
    options = {"padding_mask": jnp.asarray(gap), "positions": positions}
    cache = model.empty_cache(1, 8)
    first = {"padding_mask": options["padding_mask"][:, :3]}
    second = {name: value[:, 3:] for name, value in options.items()}
    _, cache = run(padded[:, :3], cache, method="decode", **first)
    if mixer == "gated_delta":
        with pytest.raises(UserError, match="padding between tokens of one document"):
            model.apply(params, padded, **options)
        with pytest.raises(UserError, match="padding between tokens of one document"):
            model.apply(params, padded[:, 3:], cache, method="decode", **second)
        return
    check_interruptions(model.config, "decoder", gap.astype(int))  # programs do not check values
    np.testing.assert_allclose(run(padded, **options)[gap], whole[0], atol=1e-5)
    logits, _ = run(padded[:, 3:], cache, method="decode", **second)
    np.testing.assert_allclose(logits[:, 2:], whole[:, 3:], atol=1e-5)


def test_a_window_in_the_cache_rejects_padding_after_a_token():
    model, params = make(small("decoder", position="rotary", window=4))
    x, mask = tokens(0, 1, 4), jnp.array([[False, True, True, True]])
    _, cache = model.apply(params, x, model.empty_cache(1, 12), method="decode", padding_mask=mask)
    with pytest.raises(UserError, match="padding after a token, but model.window = 4 keeps"):
        model.apply(params, x, cache, method="decode", padding_mask=mask)


@pytest.mark.parametrize(
    ("mixer", "read"),
    [
        ("attention", set()),
        ("gated_delta", {"norm_epsilon"}),
        ("mla", {"norm", "norm_gain", "norm_offset", "norm_epsilon", "norm_zero_centered"}),
    ],
)
def test_norms_of_a_mixer_are_configured_without_other_norms(mixer, read):
    values = {
        "norm": "rmsnorm", "norm_gain": False, "norm_offset": False, "norm_epsilon": 1e-3,
        "norm_zero_centered": True,
    }  # fmt: skip
    fields = {"mixer": mixer, "position": "none", "num_kv_heads": 0, "norm_placement": "none"}
    for name, value in values.items():
        build = functools.partial(small, "decoder", **fields, **{name: value})
        if name in read:
            build()
            continue
        with pytest.raises(UserError, match=f"model.{name}: .* has no effect"):
            build()


def test_positions_may_act_in_the_decoder_alone():
    """The encoder, whose only layer has no attention, differs in size."""
    fields = {"num_encoder_layers": 1, "position": "rotary", "num_kv_heads": 0}
    pattern = ({"mixer": "lstm"}, {})
    config = small("encoder_decoder", encoder={"d_ff": 8}, layer_pattern=pattern, **fields)
    assert not any(x.position_acts for x in config.layers("encoder"))
    with pytest.raises(UserError, match="model.position: 'rotary' has no effect on mixer"):
        small("encoder_decoder", encoder={"d_ff": 8}, mixer="lstm", **fields)
