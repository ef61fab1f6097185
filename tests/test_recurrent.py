"""LSTMs: their layers against PyTorch's, their attention against a slow loop, and all that other mixers promise."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import RECURRENT, make, masks, small, start_decoding, tokens

from transformer import ModelConfig, UserError
from transformer.config import Experiment
from transformer.decoding.beam import beam_search
from transformer.decoding.prefill import advance
from transformer.mapping import from_mapping
from transformer.model.masks import Tokens
from transformer.model.mixers.lstm import Recurrence
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state, init_state
from transformer.training.step import make_train_step

sigmoid = lambda x: 1 / (1 + np.exp(-x))


def gates(z, h, c):
    i, f, o, g = (z[n] for n in range(4))
    c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def lstm(p, x, order):
    """One direction over one text, float64[T, D] -> float64[T, G]."""
    out, h, c = {}, *np.zeros((2, p["hidden"]["kernel"].shape[0]))
    for t in order:
        z = (
            np.einsum("d,dfg->fg", x[t], p["input"]["kernel"])
            + p["input"]["bias"]
            + np.einsum("g,gfh->fh", h, p["hidden"]["kernel"])
        )
        h, c = gates(z, h, c)
        out[t] = h
    return np.stack([out[t] for t in range(len(x))])


def slow(params, source, target, attends=True):
    """float64 logits of one pair, token by token, from the equations; without attention the decoder reads the encoder's last state."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    table = p["embedding"]["embedding"]
    x, enc = table[source], p["encoder"]
    for i in range(2):
        both = [
            lstm(enc[f"layers_{i}"]["lstm"]["forward"], x, range(len(x))),
            lstm(enc[f"layers_{i}"]["lstm"]["backward"], x, range(len(x))[::-1]),
        ]
        x = np.concatenate(both, -1) + (x if i else 0)
    encoded, dec = x, p["decoder"]
    first, out = dec["layers_0"]["lstm"], []
    first |= first["forward"]
    keys = encoded @ first["keys"]["kernel"] if attends else ()
    h, c = np.zeros((2, encoded.shape[1]))
    for y in table[target]:
        context = encoded[-1]
        if attends:
            asked = h @ first["query"]["kernel"]
            e = np.array([np.tanh(asked + key) @ first["score"]["kernel"][:, 0] for key in keys])
            a = np.exp(e - e.max()) / np.exp(e - e.max()).sum()
            context = a @ encoded
        z = np.einsum("d,dfe->fe", y, first["input"]["kernel"]) + first["input"]["bias"]
        z += np.einsum("d,dfe->fe", h, first["hidden"]["kernel"]) + np.einsum(
            "d,dfe->fe", context, first["context"]["kernel"]
        )
        h, c = gates(z, h, c)
        out.append(
            np.tanh(np.concatenate([h, context, y]) @ first["out"]["kernel"] + first["out"]["bias"])
        )
    x = np.stack(out)
    x = x + lstm(dec["layers_1"]["lstm"]["forward"], x, range(len(x)))
    return x @ table.T


def pair(rows=2):
    return tokens(0, rows, 7), tokens(1, rows, 5)


def recurrent(source="attention", **fields) -> ModelConfig:
    """The model of RECURRENT, whose decoder reads the source in this way."""
    first, above = RECURRENT["layer_pattern"]
    first = first | {"mixer": {"name": "lstm", "source": source}}
    given = {"layer_pattern": (first, above), "scan_layers": False} | fields
    return ModelConfig(**RECURRENT | given)


@pytest.fixture(scope="module")
def model():
    module, params = make(recurrent(), noise=0.4)
    return module, params, jax.jit(module.apply)


def test_it_is_its_equations(model):
    _, params, apply = model
    source, target = pair()
    found = np.asarray(apply(params, source, target))
    for row in range(2):
        np.testing.assert_allclose(
            found[row], slow(params, np.asarray(source[row]), np.asarray(target[row])), atol=2e-5
        )


def test_without_attention_it_reads_the_last_state(model):
    module, params = make(recurrent("last"), noise=0.4)
    apply = jax.jit(module.apply)
    source, target = pair()
    source = source.at[1, 4:].set(0)
    found = np.asarray(apply(params, source, target, **masks(source, target)))
    for row, length in enumerate((7, 4)):
        given = params, np.asarray(source[row, :length]), np.asarray(target[row])
        expected = slow(*given, attends=False)
        np.testing.assert_allclose(found[row], expected, atol=2e-5)
    moved = apply(params, source.at[0, -1].set(3), target, **masks(source, target))
    assert np.abs(np.asarray(moved)[0] - found[0]).max() > 1e-2
    with pytest.raises(UserError, match=r"model.mixer.source: no 'first'; .*last"):
        recurrent("first")


@pytest.mark.parametrize("source", ["cross_attention", "none"])
def test_a_layer_may_cross_attend_or_read_no_source(source):
    """And a decoder of which no layer reads the source does not hang on it."""
    module, params = make(recurrent(source, **{"num_heads": 4} if source != "none" else {}))
    crosses = "cross_attention" in params["params"]["decoder"]["layers_0"]
    assert crosses == (source == "cross_attention")
    x, y = pair()
    base, other = (module.apply(params, one, y) for one in (x, x[::-1]))
    assert (np.abs(np.asarray(base - other)).max() > 1e-3) == crosses


@pytest.mark.parametrize("reverse", [False, True])
def test_a_layer_is_pytorchs(reverse):
    torch = pytest.importorskip("torch", reason="the test extra brings it")
    config = recurrent()
    layer, x = (
        Recurrence(config, 8, 1.0, reverse),
        np.random.default_rng(0).standard_normal((2, 6, 16)).astype(np.float32),
    )
    where = Tokens(jnp.arange(6)[None], jnp.ones((2, 6), jnp.int32))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x, where, None)
    rng = np.random.default_rng(1)
    from flax.core import meta

    params = jax.tree.map(
        lambda s: rng.standard_normal(s.shape).astype(np.float32) * 0.5, meta.unbox(shapes)
    )
    p = params["params"]
    theirs = torch.nn.LSTM(16, 8, batch_first=True)
    order = [0, 1, 3, 2]  # theirs are i, f, g, o
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(
            torch.tensor(p["input"]["kernel"][:, order].transpose(1, 2, 0).reshape(32, 16))
        )
        theirs.weight_hh_l0.copy_(
            torch.tensor(p["hidden"]["kernel"][:, order].transpose(1, 2, 0).reshape(32, 8))
        )
        bias = p["input"]["bias"] + np.array([0, 1, 0, 0], np.float32)[:, None]  # ours adds 1 to f
        theirs.bias_ih_l0.copy_(torch.tensor(bias[order].reshape(-1)))
        theirs.bias_hh_l0.zero_()
        given = torch.tensor(x[:, ::-1].copy() if reverse else x)
        wanted = theirs(given)[0].numpy()
    np.testing.assert_allclose(
        layer.apply(params, x, where, None)[0], wanted[:, ::-1] if reverse else wanted, atol=2e-6
    )


def test_padding_packing_and_neighbours_change_nothing(model):
    _, params, apply = model
    source, target = pair()
    base = np.asarray(apply(params, source, target))
    sides = jnp.pad(source, ((0, 0), (0, 3))), jnp.pad(target, ((0, 0), (0, 2)))
    padded = apply(params, *sides, **masks(*sides))
    np.testing.assert_allclose(padded[:, :5], base, atol=2e-5)
    swapped = apply(params, source[::-1], target[::-1])
    np.testing.assert_allclose(swapped[::-1], base, atol=2e-5)
    given = {
        "source_segment_ids": jnp.repeat(jnp.array([[1, 2]]), 7, axis=1), "segment_ids": jnp.repeat(jnp.array([[1, 2]]), 5, axis=1),
        "source_positions": jnp.tile(jnp.arange(7), 2)[None], "positions": jnp.tile(jnp.arange(5), 2)[None],
    }  # fmt: skip
    packed = apply(params, source.reshape(1, -1), target.reshape(1, -1), **given)
    np.testing.assert_allclose(packed.reshape(base.shape), base, atol=2e-5)
    run_together = apply(params, source.reshape(1, -1), target.reshape(1, -1))
    assert np.abs(np.asarray(run_together.reshape(base.shape)) - base).max() > 1e-2


def test_it_looks_ahead_in_the_source_alone(model):
    _, params, apply = model
    source, target = pair(1)
    base = apply(params, source, target)
    for t in range(5):
        moved = (
            np.abs(np.asarray(apply(params, source, target.at[:, t].set(3)) - base)).max((0, 2)) > 0
        )
        np.testing.assert_array_equal(moved, np.arange(5) >= t)
    assert (
        np.abs(np.asarray(apply(params, source.at[:, -1].set(3), target) - base)).max((0, 2)) > 0
    ).all()


def test_step_by_step_is_all_at_once(model):
    module, params, apply = model
    source, target = pair()
    source = source.at[1, 5:].set(0)
    whole = apply(params, source, target, **masks(source, target))
    logits, memory = start_decoding(module, params, target[:, :2], 6, source)
    step = jax.jit(lambda t, m: advance(module, params["params"], t, m))
    for t in range(2, 5):
        np.testing.assert_allclose(logits, whole[:, t - 1], atol=2e-5)
        logits, memory = step(target[:, t], memory)
    np.testing.assert_allclose(logits, whole[:, -1], atol=2e-5)


def test_a_beams_score_is_that_of_its_text(model):
    module, params, apply = model
    source = tokens(0, 2, 6)
    start = jnp.full((2, 1), 1)
    search = jax.jit(
        lambda s: beam_search(
            module,
            params["params"],
            start,
            jnp.full(2, 5),
            beam_size=3,
            alpha=0.0,
            max_new=5,
            eos_id=2,
            source_BxS=s,
        )
    )
    texts, scores = search(source)
    for row in range(2):
        text = np.asarray(texts[row, 0])
        length = int(np.flatnonzero(text == 2)[0]) + 1 if 2 in text else 5
        read = jnp.concatenate([start[row], texts[row, 0, :-1]])[None]
        logp = jax.nn.log_softmax(apply(params, source[row : row + 1], read))[0]
        assert float(scores[row, 0]) == pytest.approx(
            float(logp[np.arange(length), text[:length]].sum()), abs=1e-4
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns_on_any_mesh(dtype):
    config = from_mapping(Experiment, {
        "model": RECURRENT | {"dtype": dtype, "dropout": 0.1}, "data": {"corpus": "pydoc", "objective": "seq2seq", "length": 12, "batch_size": 8},
        "optimizer": {"learning_rate": 0.02, "warmup_steps": 2}, "train": {"steps": 10}, "mesh": {"data": 1},
    })  # fmt: skip
    from test_training import batch_of

    losses = []
    for mesh_fields in ({"data": 1}, {"data": 2, "fsdp": 2}):
        moved = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **mesh_fields))
        with use(make_mesh(moved.mesh)) as mesh:
            model, optimizer = build_model(config.model), build_optimizer(config.optimizer, 10)
            _, placed = abstract_state(moved, model, optimizer, mesh)
            state, batch = init_state(moved, model, optimizer, placed), batch_of(moved, rows=8)
            step, found = make_train_step(moved, model, optimizer, mesh, placed), []
            for _ in range(8):
                state, metrics = step(state, batch)
                found.append(float(metrics["loss"]))
        losses.append(found)
    assert losses[0][-1] < losses[0][0] - 0.1
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4 if dtype == "float32" else 0.02)


def test_its_matrices_decay_like_those_of_attention(model):
    from transformer.training.optimizer import decayed

    flags = jax.tree_util.tree_leaves_with_path(decayed(model[1]["params"]))
    kept = {path[-1].key for path, flag in flags if not flag}
    assert kept == {"bias"} and len(flags) > 10


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: recurrent(d_model=15), "model.d_model: 15 must be even: model.mixer = 'lstm' has two directions"),
        (lambda: small("decoder", mixer="lstm", num_heads=8, causal=False, position="none"), "model.mixer: 'lstm' reads each token after"),
        (lambda: small("decoder", mixer={"name": "lstm", "source": "last"}, num_heads=8, position="none"), "model.mixer.source: 'last' needs an encoder"),
    ],
)  # fmt: skip
def test_what_an_lstm_cannot_do_is_refused(build, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build()
