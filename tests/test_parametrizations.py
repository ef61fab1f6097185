"""Parametrizations: bit equality at the base, the multipliers of every role, and size transfer."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import model_fields

from transformer import ModelConfig, build_model
from transformer.config import Experiment, MeshConfig, OptimizerConfig
from transformer.errors import UserError
from transformer.mapping import from_mapping
from transformer.model.layout import by_layer, flatten, unroll
from transformer.model.network import FAMILIES
from transformer.model.roles import parameter_rules
from transformer.parallel.mesh import make_mesh, use
from transformer.parallel.sharding import path_name, unbox
from transformer.training.optimizer import build_optimizer, decayed
from transformer.training.state import abstract_state, init_state

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "benchmarks"))
import coordinates

ADAMW = OptimizerConfig(
    schedule="constant",
    warmup_steps=0,
    learning_rate=0.01,
    weight_decay=0.1,
    clip_norm=1.0,
    epsilon=1e-3,
)


def sized(family="decoder", name="completep", base=None, layers=4, **fields) -> ModelConfig:
    """Returns a model that is twice as wide and as deep as its base."""
    depths = {f"num_{side}_layers": layers for side in ("encoder", "decoder") if side in family}
    wide = {"d_model": 32, "num_heads": 4, "d_ff": 128} | depths
    half = {"d_model": 16} | {key: layers // 2 for key in depths if name == "completep"}
    chosen = {"name": name, "base": base or half}
    return ModelConfig(**model_fields(family, **wide | {"parametrization": chosen} | fields))


def tokens_of(config, length=6):
    rows = jnp.arange(2 * length).reshape(2, length) % config.vocab_size
    return [rows] * len(config.sides)


def trained(config, optimizer=ADAMW, steps=3, start=None):
    """Returns the parameters at initialization and after `steps` updates on one batch."""
    model, tokens = build_model(config), tokens_of(config)
    boxed = model.init_with_axes(jax.random.key(0), *tokens)
    start = params = unbox(boxed) if start is None else start
    rule = build_optimizer(optimizer, steps, config)
    state = unbox(rule.init(boxed))
    loss = lambda params: jnp.mean(jnp.square(model.apply(params, *tokens)))
    update = jax.jit(lambda p, s: rule.update(jax.grad(loss)(p), s, p))
    for _ in range(steps):
        updates, state = update(params, state)
        params = optax.apply_updates(params, updates)
    return start, params


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["mup", "completep"])
def test_at_the_base_it_equals_the_standard_parametrization(family, name):
    """Initial values and updates are equal bit by bit, and at another size they are not."""
    half = sized(family, name)
    base = {"d_model": 32}
    if name == "completep":
        base |= {f"num_{side}_layers": 4 for side in half.sides}
    at_base = sized(family, name, base)
    standard = dataclasses.replace(half, parametrization="standard")
    expected, different = trained(standard), trained(half)
    jax.tree.map(np.testing.assert_array_equal, trained(at_base), expected)
    kernel = lambda pair: flatten(pair[1])[f"{half.sides[0]}/layers/feed_forward/in/kernel"]
    assert np.abs(kernel(different) - kernel(expected)).max() > 1e-4


def test_multipliers_of_every_role():
    """The table of CompleteP with alpha = 1/2, for twice the width and four times the depth."""
    base = {"d_model": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = sized(
        "encoder_decoder",
        base=base,
        position="t5",
        cross_position="deberta",
        tie_embeddings=False,
        num_kv_heads=2,
        attention_sink=True,
        feed_forward={"name": "experts", "num_experts": 4, "top_k": 2},
        parametrization={"name": "completep", "base": base, "alpha": 0.5},
    )
    layer, deep = "decoder/layers", 4**-0.5
    matrix = (0.5 * deep, deep, 0.5 * deep)
    expected = {
        "embedding/embedding": ("embedding", 1, 1, 0.5),
        "unembedding/kernel": ("unembedding", 1, 1, 0.5),
        f"{layer}/self_attention/query/kernel": ("matrix", *matrix),
        f"{layer}/self_attention/key/kernel": ("matrix", *matrix),
        f"{layer}/self_attention/out/kernel": ("matrix", *matrix),
        f"{layer}/cross_attention/value/kernel": ("matrix", *matrix),
        f"{layer}/feed_forward/in/kernel": ("matrix", *matrix),
        f"{layer}/feed_forward/out/kernel": ("matrix", *matrix),
        f"{layer}/feed_forward/router/kernel": ("readout", *matrix),
        f"{layer}/self_attention_residual/in_norm/gain": ("vector", deep, 1, 0.5 * deep),
        f"{layer}/self_attention/sink": ("vector", deep, 1, 0.5 * deep),
        "decoder/relative_bias": ("position", deep, 1, 0.5 * deep),
        f"{layer}/cross_attention/position_relative_embedding": ("embedding", 1, 1, 0.5),
        f"{layer}/cross_attention/position_relative_key": ("matrix", *matrix),
        "decoder/final_norm/gain": ("vector", 1, 1, 0.5),
    }
    rules = parameter_rules(FAMILIES[config.family], config)
    seen = {path: (rules[path][0].role, *rules[path][1][:3]) for path in expected}
    assert seen == expected
    assert config.placement("decoder").branch_scale == deep
    fire = dataclasses.replace(config, cross_position="fire")
    rules = parameter_rules(FAMILIES[config.family], fire)
    fire_rules = {path: rule for path, rule in rules.items() if "/position_fire_" in path}
    assert len(fire_rules) == 8
    assert {place.role for place, _ in fire_rules.values()} == {"position"}


@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("placement", ["post", "keel", "hybrid_norm", "mix_ln", "pre", "peri"])
def test_norms_of_the_stream_learn_by_the_inverse_of_the_depth(placement, alpha):
    """All 2 L of them add to one stream. The norms of a branch are multiplied with it."""
    fields = dict.fromkeys(("qk_norm", "v_norm"), placement == "hybrid_norm")
    chosen = {"name": "completep", "base": {"num_decoder_layers": 1}, "alpha": alpha}
    config = sized(norm_placement=placement, parametrization=chosen, **fields)
    rules = parameter_rules(type(build_model(config)), config)
    rates = {}
    for path, (_, rule) in rules.items():
        if "/layers/" in path and path.endswith("/offset"):
            name = path.split("/")[-2]
            rates[name] = (rule.learning_rate, rule.epsilon)
    on_stream = {"post": {"out_norm"}, "keel": {"out_norm"}, "pre": set(), "peri": set()}
    for name, found in rates.items():
        expected = (1 / 4, 1.0) if name in on_stream.get(placement, {"norm"}) else None
        assert found == (expected or (4 ** (alpha - 1), 4**-alpha)), name
    assert on_stream.get(placement, {"norm"}) <= rates.keys()


@pytest.mark.parametrize("initializer", ["normal", "lecun_normal", "xavier_uniform"])
def test_standard_deviations_of_initial_values(initializer):
    """Hidden matrices shrink as m_N^(-1/2); embedding and unembedding stay the same."""
    fields = {"initializer": initializer, "tie_embeddings": False, "vocab_size": 512}
    fields |= {"position": "deberta", "attention_gate": "elementwise"}
    config = sized(name="mup", layers=8, **fields)
    small = dataclasses.replace(config.base, parametrization="standard")
    wide, narrow = (
        flatten(build_model(c).init(jax.random.key(0), *tokens_of(c))) for c in (config, small)
    )
    rules = parameter_rules(FAMILIES["decoder"], config)
    checked = {"matrix": 0, "embedding": 0, "unembedding": 0}
    for path, x in narrow.items():
        if x.std() and (role := rules[path][0].role) in checked:
            expected = 2**-0.5 if role == "matrix" else 1.0
            np.testing.assert_allclose(
                wide[path].std() / x.std(), expected, rtol=0.06, err_msg=path
            )
            checked[role] += 1
    assert checked == {"matrix": 9, "embedding": 2, "unembedding": 1}


def test_updates_equal_those_of_one_adamw_per_group():
    """The published form: AdamW per group, with its rate, decay * m_N and epsilon."""
    base = {"d_model": 16, "num_decoder_layers": 1}
    config = sized(parametrization={"name": "completep", "base": base, "alpha": 0.5})
    rules = parameter_rules(FAMILIES["decoder"], config)
    start, seen = trained(config, dataclasses.replace(ADAMW, clip_norm=0.0))
    labels = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), start)
    flags = flatten(decayed(start))
    group = lambda path, rule: optax.adamw(
        0.01 * rule.learning_rate,
        b1=0.9,
        b2=0.98,
        eps=1e-3 * rule.epsilon,
        weight_decay=0.1 * rule.weight_decay / rule.learning_rate if flags[path] else 0.0,
    )
    reference = optax.partition({p: group(p, r) for p, (_, r) in rules.items()}, labels)
    params, state, model = start, reference.init(start), build_model(config)
    tokens = tokens_of(config)
    loss = lambda params: jnp.mean(jnp.square(model.apply(params, *tokens)))
    for _ in range(3):
        updates, state = reference.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    expected = flatten(params)
    for path, x in flatten(seen).items():
        np.testing.assert_allclose(x, expected[path], rtol=2e-4, atol=2e-6, err_msg=path)
    query = "decoder/layers/self_attention/query/kernel"
    assert rules[query][1].learning_rate == 0.25 and np.abs(x - flatten(start)[path]).max() > 0.01


def test_muon_has_its_own_multiplier():
    """An update of fixed root mean square shrinks as m_N^(-1/2), and AdamW's as 1 / m_N.

    The gradients differ, so that the singular values of the orthogonalized update differ a little.
    """
    config, sizes = sized(name="mup"), {}
    standard = dataclasses.replace(config, parametrization="standard")
    one = dataclasses.replace(ADAMW, weight_decay=0.0, epsilon=1e-12)
    for name in ("adamw", "muon"):
        for model in (config, standard):
            start, end = trained(model, dataclasses.replace(one, name=name), steps=1)
            change = jax.tree.map(lambda a, b: jnp.sqrt(jnp.mean(jnp.square(a - b))), start, end)
            sizes[name, model] = flatten(change)["decoder/layers/feed_forward/out/kernel"]
        ratio = sizes[name, config] / sizes[name, standard]
        expected = {"adamw": 0.5, "muon": 2**-0.5}[name]
        np.testing.assert_allclose(ratio, expected, rtol=0.15)


def test_scanned_and_unrolled_layers_train_alike():
    config = sized()
    start, end = trained(config)
    unrolled, same_start = unroll(config, start)
    expected = unroll(config, end)[1]
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), expected, same_start)
    assert moved["decoder"]["layers_1"]["feed_forward"]["in"]["kernel"] > 0.01
    _, seen = trained(unrolled, start=same_start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), seen, expected)


def test_a_mesh_gives_the_same_initial_values():
    fields = {"data": {"corpus": "pydoc", "length": 8, "batch_size": 8}, "mesh": {"data": 1}}
    fields["model"] = dataclasses.asdict(sized())
    states = []
    for mesh in (MeshConfig(data=1), MeshConfig(data=2, fsdp=2, tensor=2)):
        config = dataclasses.replace(from_mapping(Experiment, fields), mesh=mesh)
        parameter_rules.cache_clear()
        with use(make_mesh(mesh)) as devices:
            rule = build_optimizer(config.optimizer, 10, config.model)
            _, placed = abstract_state(config, build_model(config.model), rule, devices)
            states.append(
                jax.device_get(init_state(config, build_model(config.model), rule, placed))
            )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *states)


def test_a_role_may_be_frozen_or_start_at_zero():
    roles = {"embedding": {"learning_rate": 0.0, "weight_decay": 0.0}, "matrix": {"init": 0.0}}
    config = sized(parametrization={"name": "standard", **roles})
    start, end = (flatten(x) for x in trained(config))
    np.testing.assert_array_equal(start["embedding/embedding"], end["embedding/embedding"])
    assert np.any(start["decoder/final_norm/gain"] != end["decoder/final_norm/gain"])
    assert not np.any(start["decoder/layers/feed_forward/in/kernel"])


def test_branch_scale_multiplies_the_branches():
    """Half of each branch is the branch with half of its last matrix and bias."""
    plain = sized(parametrization="standard")
    half = dataclasses.replace(plain, norm_placement={"name": "pre", "branch_scale": 0.5})
    params = build_model(plain).init(jax.random.key(0), *tokens_of(plain))
    halved = jax.tree_util.tree_map_with_path(
        lambda path, x: x / 2 if "/out/" in path_name(path) else x, params
    )
    expected = build_model(plain).apply(halved, *tokens_of(plain))
    seen = build_model(half).apply(params, *tokens_of(plain))
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(seen - build_model(plain).apply(params, *tokens_of(plain))).max() > 0.01


def test_attention_logits_are_scaled_by_the_head_size():
    """With heads twice as wide as the base's, q k is divided by d_head / sqrt(d_head of base)."""
    config = sized(name="mup", base={"d_model": 16, "num_heads": 4}, position="none")
    expected = dataclasses.replace(config, attention_scale=4**0.5 / 8)
    other = dataclasses.replace(config, attention_scale=8**-0.5)
    params = build_model(config).init(jax.random.key(0), *tokens_of(config))
    out = [build_model(c).apply(params, *tokens_of(c)) for c in (config, expected, other)]
    np.testing.assert_allclose(out[0], out[1], rtol=1e-5, atol=1e-6)
    assert np.abs(out[0] - out[2]).max() > 1e-4


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"name": "mup"}, r"'mup' needs the sizes of the base model; set them"),
        ({"name": "mup", "base": {"num_decoder_layers": 2}}, r"'mup' has no size 'num_decoder_lay"),
        ({"name": "mup", "base": {"d_model": 1.5}}, r"base\.d_model: expected int, got 1\.5"),
        ({"name": "mup", "base": {"d_model": 0}}, r"base\.d_model: 0 is too small"),
        ({"name": "mup", "base": {"d_model": 20}}, r"num_heads = 4 times 20 / 32 is not an"),
        ({"name": "standard", "base": {"d_model": 8}}, r"'standard' has no option 'base'"),
        ({"name": "standard", "matrix": {"rate": 2.0}}, r"matrix\.rate: no such multiplier"),
        ({"name": "standard", "matrix": {"init": -1.0}}, r"matrix\.init: -1\.0 is too small"),
        ({"name": "standard", "vector": {"weight_decay": 2.0}}, r"vector\.weight_decay: 2\.0 has"),
    ],
)  # fmt: skip
def test_errors_name_the_field_and_a_remedy(chosen, message):
    with pytest.raises(UserError, match=message):
        sized(parametrization=chosen)


def test_optimizers_without_a_rule_are_refused():
    fields = {"data": {"corpus": "pydoc", "length": 8, "batch_size": 8}}
    for chosen, name, message in (
        ({"name": "mup", "base": {"d_model": 16}}, "lion", "'mup' has no rule for optimizer.name"),
        ({"name": "standard", "matrix": {"epsilon": 2.0}}, "sgd", "a multiplier of epsilon has no"),
    ):
        model = dataclasses.asdict(sized(parametrization=chosen))
        from_mapping(Experiment, fields | {"model": model})
        with pytest.raises(UserError, match=message):
            from_mapping(Experiment, fields | {"model": model, "optimizer": {"name": name}})


def test_outputs_of_scanned_layers_are_recorded():
    config = sized()
    params = build_model(config).init(jax.random.key(0), *tokens_of(config))
    sublayers = ("self_attention", "feed_forward")
    chosen = lambda module, method: method == "__call__" and module.name in sublayers

    def record(config, params):
        _, state = build_model(config).apply(
            params, *tokens_of(config), capture_intermediates=chosen, mutable=["intermediates"]
        )
        outputs = by_layer(config, state["intermediates"])
        return {(layer, name): jax.tree.leaves(x)[0] for _, layer, name, x in outputs}

    scanned, expected = record(config, params), record(*unroll(config, params))
    assert len(scanned) == 8 and scanned.keys() == expected.keys()
    for key, x in scanned.items():
        np.testing.assert_allclose(x, expected[key], atol=1e-5)
    first, second = (scanned[layer, "feed_forward/__call__"] for layer in (0, 1))
    assert np.max(np.abs(first - second)) > 0.1


def test_coordinates_do_not_depend_on_size_except_in_the_control():
    """Slopes of log size over log width, and over log depth, as in benchmarks/coordinates.py."""

    def slopes(name, placement="pre"):
        axis, chosen = coordinates.cases()[name]
        sizes = {"width": ((w, w, 2) for w in (32, 128)), "depth": ((d, 32, d) for d in (8, 32))}
        configs = {size: coordinates.model(placement, w, d, chosen) for size, w, d in sizes[axis]}
        seen = coordinates.measure_sizes(configs, coordinates.RATES[axis], seeds=2)
        slope = lambda name: coordinates.slope(list(configs), seen[name][..., -1])[0]
        return [slope(x) for x in ("features change", "logits change", "initial logits")]

    features, logits, initial = slopes("width, standard")
    assert features > 0.3
    assert logits > 0.6
    assert abs(initial) < 0.1
    features, logits, initial = slopes("width, mup")
    assert abs(features) < 0.15
    assert abs(logits) < 0.15
    assert abs(initial + 0.5) < 0.1
    # DeepNorm has norms of the stream, whose changes add up over the layers.
    assert slopes("depth, standard", "deepnorm")[0] > 0.4
    assert abs(slopes("depth, completep 1", "deepnorm")[0]) < 0.1
