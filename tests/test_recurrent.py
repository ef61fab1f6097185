"""The recurrent baseline: LSTMs in a `layer_pattern`.

A layer is compared with PyTorch's, and the whole model with slow loops.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle_mixers
import pytest
from conftest import SMALL, TINY, make, masks, small, start_decoding, tokens

from transformer import ModelConfig, UserError
from transformer.config import Experiment
from transformer.decoding.beam import beam_search
from transformer.decoding.prefill import advance
from transformer.mapping import from_mapping
from transformer.model.masks import Tokens
from transformer.model.mixers.recurrent import GRU, LSTM, RNN, Recurrence
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state, init_state
from transformer.training.step import make_train_step


def recurrent(source: str = "attention", sizes: dict = SMALL, **fields) -> dict:
    """Returns the fields of the baseline.

    The first layer of each stack has no residual connection. That of the decoder reads the source.
    """
    size_names = ("vocab_size", "d_model", "num_encoder_layers", "num_decoder_layers", "max_length")
    no_residual = {"name": "none", "residual_scale": 0.0}
    lstm = lambda source: {"name": "lstm", "source": source}
    return {
        "family": "encoder_decoder",
        "position": "none",
        "feed_forward": "none",
        **{name: sizes[name] for name in size_names},
        "layer_pattern": (
            {"mixer": lstm(source), "norm_placement": no_residual},
            {"mixer": lstm("none"), "norm_placement": "none"},
        ),
    } | fields


def slow_logits(params, source, target, last=False):
    """Computes the float64 logits of one pair, token by token, from the equations."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    table = p["embedding"]["embedding"]
    layer = lambda side, i: jax.tree.map(lambda x: x[0], p[side]["layers"][f"layer_{i}"])["lstm"]
    x, y, source_mask, target_mask = (
        table[source],
        table[target],
        np.ones(len(source)),
        np.ones(len(target)),
    )
    x = oracle_mixers.bidirectional_lstm(layer("encoder", 0), x, source_mask)
    x = x + oracle_mixers.bidirectional_lstm(layer("encoder", 1), x, source_mask)
    y = oracle_mixers.attentive_lstm(layer("decoder", 0), y, target_mask, x, source_mask, last)
    y = y + oracle_mixers.lstm(layer("decoder", 1)["forward"], y, target_mask)[0]
    return y @ table.T


def pair(batch=2):
    return tokens(0, batch, 7), tokens(1, batch, 5)


@pytest.fixture(scope="module")
def model():
    module, params = make(ModelConfig(**recurrent()), noise=0.4)
    return module, params, jax.jit(module.apply)


def test_model_matches_its_equations(model):
    _, params, apply = model
    source, target = pair()
    logits = np.asarray(apply(params, source, target))
    for i in range(2):
        np.testing.assert_allclose(
            logits[i], slow_logits(params, np.asarray(source[i]), np.asarray(target[i])), atol=2e-5
        )


def test_without_attention_decoder_reads_the_last_state(model):
    _, params, apply = model
    source, target = pair()
    source = source.at[1, 4:].set(0)
    padding = masks(source, target)
    last_model, last_params = make(ModelConfig(**recurrent("last")), noise=0.4)
    ablated = jax.tree.map(lambda x, _: x, params, params)
    lstm_params = ablated["decoder"]["layers"]["layer_0"]["lstm"]
    for name in ("query", "score", "keys"):
        del lstm_params[name]
    assert jax.tree.structure(ablated) == jax.tree.structure(last_params), (
        "the model has no attention parameters"
    )
    logits = np.asarray(last_model.apply(ablated, source, target, **padding))
    assert np.abs(logits - apply(params, source, target, **padding)).max() > 1e-2
    for i, length in enumerate((7, 4)):
        expected = slow_logits(params, np.asarray(source[i, :length]), np.asarray(target[i]), True)
        np.testing.assert_allclose(logits[i], expected, atol=2e-5)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", [LSTM(), GRU(), RNN()], ids=lambda kind: kind.name)
def test_recurrent_layer_matches_pytorch(kind, reverse):
    torch = pytest.importorskip("torch", reason="the test extra brings it")
    from flax.core import meta

    config, rng = ModelConfig(**recurrent()), np.random.default_rng(0)
    layer = Recurrence(config, kind, 8, 1.0, reverse)
    draw = lambda shape: rng.standard_normal(shape).astype(np.float32)
    x, tokens = draw((2, 6, 16)), Tokens(jnp.arange(6)[None], jnp.ones((2, 6), jnp.int32))
    shapes = meta.unbox(jax.eval_shape(layer.init, jax.random.key(0), x, tokens, None))
    params = jax.tree.map(lambda shape: 0.5 * draw(shape.shape), shapes)
    p = params["params"]
    theirs = getattr(torch.nn, kind.name.upper())(16, 8, batch_first=True)
    # PyTorch's order is i, f, g, o. The package adds 1 to f.
    order = [0, 1, 3, 2] if kind.gates == 4 else list(range(kind.gates))
    bias = p["input"]["bias"].copy()
    bias[1:2] += kind.gates == 4
    matrix = lambda kernel: torch.tensor(
        kernel[:, order].transpose(1, 2, 0).reshape(-1, len(kernel))
    )
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(matrix(p["input"]["kernel"]))
        theirs.weight_hh_l0.copy_(matrix(p["hidden"]["kernel"]))
        theirs.bias_ih_l0.copy_(torch.tensor(bias[order].reshape(-1)))
        theirs.bias_hh_l0.zero_()
        expected = theirs(torch.tensor(x[:, ::-1].copy() if reverse else x))[0].numpy()
    expected = expected[:, ::-1] if reverse else expected
    np.testing.assert_allclose(layer.apply(params, x, tokens, None)[0], expected, atol=2e-6)


def test_padding_packing_and_batch_order_do_not_change_logits(model):
    _, params, apply = model
    source, target = pair()
    base = np.asarray(apply(params, source, target))
    padded_inputs = jnp.pad(source, ((0, 0), (0, 3))), jnp.pad(target, ((0, 0), (0, 2)))
    padded = apply(params, *padded_inputs, **masks(*padded_inputs))
    np.testing.assert_allclose(padded[:, :5], base, atol=2e-5)
    swapped = apply(params, source[::-1], target[::-1])
    np.testing.assert_allclose(swapped[::-1], base, atol=2e-5)
    packing = {
        "source_segment_ids": jnp.repeat(jnp.array([[1, 2]]), 7, axis=1),
        "segment_ids": jnp.repeat(jnp.array([[1, 2]]), 5, axis=1),
        "source_positions": jnp.tile(jnp.arange(7), 2)[None],
        "positions": jnp.tile(jnp.arange(5), 2)[None],
    }
    packed = apply(params, source.reshape(1, -1), target.reshape(1, -1), **packing)
    np.testing.assert_allclose(packed.reshape(base.shape), base, atol=2e-5)
    concatenated = apply(params, source.reshape(1, -1), target.reshape(1, -1))
    assert np.abs(np.asarray(concatenated.reshape(base.shape)) - base).max() > 1e-2


def test_model_looks_ahead_only_in_the_source(model):
    _, params, apply = model
    source, target = pair(1)
    base = apply(params, source, target)
    for t in range(5):
        changed = (
            np.abs(np.asarray(apply(params, source, target.at[:, t].set(3)) - base)).max((0, 2)) > 0
        )
        np.testing.assert_array_equal(changed, np.arange(5) >= t)
    assert (
        np.abs(np.asarray(apply(params, source.at[:, -1].set(3), target) - base)).max((0, 2)) > 0
    ).all()


def test_cached_decoding_equals_teacher_forcing(model):
    module, params, apply = model
    source, target = pair()
    source = source.at[1, 5:].set(0)
    full_logits = apply(params, source, target, **masks(source, target))
    logits, memory = start_decoding(module, params, target[:, :2], 6, source)
    step = jax.jit(lambda t, m: advance(module, params, t, m))
    for t in range(2, 5):
        np.testing.assert_allclose(logits, full_logits[:, t - 1], atol=2e-5)
        logits, memory = step(target[:, t], memory)
    np.testing.assert_allclose(logits, full_logits[:, -1], atol=2e-5)


def test_beam_score_equals_log_probability_of_its_text(model):
    module, params, apply = model
    source = tokens(0, 2, 6)
    start = jnp.full((2, 1), 1)
    search = jax.jit(
        lambda source: beam_search(
            module,
            params,
            start,
            jnp.full(2, 5),
            beam_size=3,
            alpha=0.0,
            max_new=5,
            eos_id=2,
            source_BxS=source,
        )
    )
    texts, scores = search(source)
    for i in range(2):
        text = np.asarray(texts[i, 0])
        length = int(np.flatnonzero(text == 2)[0]) + 1 if 2 in text else 5
        inputs = jnp.concatenate([start[i], texts[i, 0, :-1]])[None]
        logp = jax.nn.log_softmax(apply(params, source[i : i + 1], inputs))[0]
        assert float(scores[i, 0]) == pytest.approx(
            float(logp[np.arange(length), text[:length]].sum()), abs=1e-4
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_learns_the_same_on_every_mesh(dtype):
    config = from_mapping(
        Experiment,
        {
            "model": recurrent(sizes=TINY, dtype=dtype, dropout=0.1),
            "data": {"corpus": "pydoc", "objective": "seq2seq", "length": 12, "batch_size": 8},
            "optimizer": {"learning_rate": 0.02, "warmup_steps": 2},
            "train": {"steps": 10},
            "mesh": {"data": 1},
        },
    )
    from test_training import random_batch

    losses = []
    for mesh_fields in ({"data": 1}, {"data": 2, "fsdp": 2}):
        mesh_config = dataclasses.replace(
            config, mesh=dataclasses.replace(config.mesh, **mesh_fields)
        )
        with use(make_mesh(mesh_config.mesh)) as mesh:
            model, optimizer = (
                build_model(config.model),
                build_optimizer(config.optimizer, 10, config.model),
            )
            _, placed = abstract_state(mesh_config, model, optimizer, mesh)
            state, batch = (
                init_state(mesh_config, model, optimizer, placed),
                random_batch(mesh_config, rows=8),
            )
            step, curve = make_train_step(mesh_config, model, optimizer, mesh, placed), []
            for _ in range(8):
                state, metrics = step(state, batch)
                curve.append(float(metrics["loss"]))
        losses.append(curve)
    assert losses[0][-1] < losses[0][0] - 0.1
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4 if dtype == "float32" else 0.02)


def test_only_biases_are_exempt_from_weight_decay(model):
    from transformer.training.optimizer import decayed

    flags = jax.tree_util.tree_leaves_with_path(decayed(model[1]))
    not_decayed = {path[-1].key for path, flag in flags if not flag}
    assert not_decayed == {"bias"} and len(flags) > 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"d_model": 15},
            r"model\.d_model: 15 must be even: model\.mixer = 'lstm' has two directions",
        ),
        (
            {"layer_pattern": (), "mixer": {"name": "lstm", "source": "none"}},
            "'none' in all layers of the decoder leaves the encoder unused",
        ),
        (
            {"layer_pattern": (), "mixer": {"name": "lstm", "source": "first"}},
            "model.mixer.source: unknown value 'first'",
        ),
        ({"causal": False}, "model.causal=True"),
        ({"num_heads": 4}, "model.num_heads: 4 has no effect"),
        ({"d_ff": 4}, "model.d_ff: 4 has no effect without a feed-forward"),
        ({"parallel": True}, "model.parallel: True has no effect without a second sublayer"),
        ({"norm": "rmsnorm"}, "model.norm: 'rmsnorm' has no effect"),
        ({"pooling": "last"}, "model.pooling: 'last' has no effect without labels"),
    ],
)
def test_invalid_recurrent_configs_raise(fields, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**recurrent(**fields))


def test_source_without_a_decoder_layer_raises():
    lstms = [{"mixer": {"name": "lstm", "source": source}} for source in ("attention", "last")]
    sizes = {"num_encoder_layers": 2, "num_decoder_layers": 1}
    for source, pattern in (("last", lstms), ("attention", lstms[::-1])):
        with pytest.raises(UserError, match=f"source = '{source}' has no effect"):
            ModelConfig(**recurrent(**sizes, layer_pattern=tuple(pattern)))
    ModelConfig(**recurrent(**sizes | {"num_decoder_layers": 2}, layer_pattern=tuple(lstms)))


def test_source_without_an_encoder_raises():
    lstm = {"name": "lstm", "source": "attention"}
    with pytest.raises(UserError, match=r"model\.mixer\.source: 'attention' needs an encoder"):
        small("decoder", mixer=lstm, position="none", num_heads=8, num_kv_heads=0)
