"""Position schemes against their formulas in float64.

Covers xPos far from the start, where float32 loses precision, and the sum of Sandwich.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make, small, start_decoding, tokens

from transformer import ModelConfig, UserError, build_model
from transformer.decoding.prefill import advance
from transformer.model import positions
from transformer.model.positions import StackFacts


def stack_facts(d_head, max_length):
    return StackFacts(
        d_model=d_head,
        num_heads=1,
        d_head=d_head,
        d_value=d_head,
        max_length=max_length,
        causal=True,
    )


def xpos_scores(q_TxH, k_SxH, t, s, theta=1e4, gamma=0.4, scale_base=512.0):
    """Returns Re(sum_i q_i conj(k_i) exp(i f_i (t - s)) z_i^((t - s) / scale_base)) for t >= s.

    t and s are the positions of queries and keys. q_i and k_i are pairs of features as complex
    numbers. Scores for t < s are 0.
    """
    half = q_TxH.shape[1] // 2
    pairs = np.arange(half) / half
    z, f = (pairs + gamma) / (1 + gamma), theta**-pairs
    q, k = (x[:, :half].astype(complex) + 1j * x[:, half:] for x in (q_TxH, k_SxH))
    distance = np.maximum(t[:, None] - s[None], 0).astype(float)
    power = np.exp(distance[..., None] * (1j * f + np.log(z) / scale_base))
    scores = np.einsum("ti,si,tsi->ts", q, k.conj(), power).real
    return np.where(t[:, None] >= s[None], scores, 0.0)


@pytest.mark.parametrize(
    ("max_length", "d_head", "options"),
    [
        (600, 8, {}),
        (56_320, 16, {}),
        (56_321, 16, {}),
        (65_536, 64, {}),
        (200_000, 8, {}),
        (3_000, 8, {"gamma": 0.1, "scale_base": 40.0, "theta": 300.0}),
    ],
)
def test_xpos_scores_match_the_formula_at_every_position(max_length, d_head, options):
    draw = np.random.default_rng(max_length)
    starts = [0, 511, 512, 34_999, 35_000, 37_000, 56_319, 56_320, max_length // 2, max_length - 7]
    t = np.unique(
        [start + i for start in starts for i in range(7)] + list(draw.integers(0, max_length, 50))
    )
    t = t[t < max_length]
    # Magnitudes vary widely: small entries must not underflow where the powers are small too.
    q, k = draw.normal(size=(2, len(t), d_head)) * 10.0 ** draw.uniform(-5, 1, (2, len(t), 1))
    q, k = np.float32(q), np.float32(k)
    scheme = positions.build({"name": "xpos", **options})
    bound = scheme.bind(None, stack_facts(d_head, max_length)).at(jnp.asarray(t)[None])
    rotated_q, rotated_k = bound.rotate(
        jnp.asarray(q)[None, :, None], jnp.asarray(k)[None, :, None]
    )
    assert rotated_q.shape[-1] == scheme.key_size(stack_facts(d_head, max_length))
    scores = np.einsum("bthx,bshx->ts", rotated_q, rotated_k)
    expected = xpos_scores(q, k, t, t, **options)
    past = t[:, None] >= t[None]
    norms = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(k, axis=1)
    near = past & (t[:, None] - t[None] < 7)
    assert np.abs(expected / norms)[near].max() > 0.1
    assert np.isfinite(scores[past]).all()
    assert (np.abs(scores - expected) / norms)[past].max() < 5e-7


def test_xpos_widens_keys_only_for_long_sequences():
    scheme = positions.build("xpos")
    sizes = [scheme.key_size(stack_facts(64, length)) for length in (512, 56_320, 56_321, 112_640)]
    assert sizes == [64, 64, 128, 128]


def test_xpos_rejects_lengths_and_decays_beyond_float32():
    decoder = lambda length, **options: ModelConfig(
        family="decoder", vocab_size=9, max_length=length, position={"name": "xpos", **options}
    )
    decoder(16 * 56_320)
    with pytest.raises(UserError, match=r"model.max_length: 901121 is too large .* at most 901120"):
        decoder(16 * 56_320 + 1)
    with pytest.raises(
        UserError, match=r"scale_base: 1.0 with gamma = 0.4 decays by more than 2\^100"
    ):
        decoder(512, scale_base=1.0)
    for name in ("gamma", "scale_base"):
        with pytest.raises(UserError, match=f"model.position.{name}: 0.0 must be more than 0"):
            decoder(512, **{name: 0.0})


def test_xpos_logits_depend_only_on_distances():
    """Logits depend on distances alone.

    They are the same from position 0, across a boundary between blocks, and packed with another
    text.
    """
    config = small("decoder", position="xpos", max_length=65_536)
    model, params = make(config)
    text = tokens(1, 2, 9)
    plain = np.asarray(jax.jit(model.apply)(params, text))
    without_positions = build_model(small("decoder", position="none"))
    assert np.abs(np.asarray(jax.jit(without_positions.apply)(params, text)) - plain).max() > 1e-2
    boundary, last = 56_320 - 4, 65_536 - 9
    apply = jax.jit(
        lambda x, t, segments: model.apply(params, x, positions=t, segment_ids=segments)
    )
    for start in (35_000, 37_000, boundary, last):
        t = jnp.broadcast_to(start + jnp.arange(9), (2, 9))
        np.testing.assert_allclose(apply(text, t, jnp.ones_like(t)), plain, atol=2e-5)
    # Two texts in one sequence: one far from the start, one from position 0.
    joined = text.reshape(1, 18)
    t = jnp.concatenate([boundary + jnp.arange(9), jnp.arange(9)])[None]
    packed = apply(joined, t, jnp.repeat(jnp.array([[1, 2]]), 9, axis=1))
    np.testing.assert_allclose(packed.reshape(plain.shape), plain, atol=2e-5)


def test_xpos_cached_decoding_across_blocks():
    config = small("decoder", position={"name": "xpos", "scale_base": 10.0}, max_length=1600)
    assert config.key_size("decoder") > config.head_size
    model, params = make(config)
    text = tokens(1, 2, 7)
    full_logits = jax.jit(model.apply)(params, text)
    logits, memory = start_decoding(model, params, text[:, :2], 9)
    step = jax.jit(lambda t, m: advance(model, params, t, m))
    for t in range(2, 7):
        np.testing.assert_allclose(logits, full_logits[:, t - 1], atol=3e-5)
        logits, memory = step(text[:, t], memory)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_rotations_on_a_tpu_equal_those_elsewhere(layout, fraction, monkeypatch):
    """On a TPU, they are a product with a matrix. yarn also scales the rotated dimensions."""
    options = {"layout": layout, "fraction": fraction}
    options["scaling"] = {"name": "yarn", "factor": 4.0, "original_length": 8}
    scheme = (
        positions.build({"name": "rotary", **options})
        .replace(d_head=16)
        .at(jnp.arange(7)[None] + jnp.array([[0], [100]]))
    )
    keys = jax.random.split(jax.random.key(0))
    for dtype in (jnp.float32, jnp.bfloat16):
        x, d_out = (jax.random.normal(key, (2, 7, 3, 16), dtype) for key in keys)
        found, products = [], []
        for name in ("cpu", "tpu"):
            module = "transformer.model.positions.rotary"
            monkeypatch.setattr(f"{module}.platform", lambda name=name: name)
            run = lambda x, d=d_out: jax.vjp(scheme._rotated, x)[1](d)[0]
            products.append(str(jax.make_jaxpr(run)(x)).count("dot_general"))
            found.append((scheme._rotated(x), run(x)))
        assert products[0] == 0 < products[1]
        assert float(jnp.abs(found[0][0] - x).max()) > 1
        jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_bias_without_an_axis_of_heads_is_an_error():
    class Half(positions.Position):
        name = "halfpos"

        def distance_bias(self, distance):
            return -0.5 * distance

    t = jnp.zeros((8, 32), int)
    expected = (
        r"'halfpos': distance_bias returned shape \[8, 32, 32\] for distances of shape "
        r"\[8, 32, 32\]; expected \[num_heads or 1, 8, 32, 32\]"
    )
    with pytest.raises(UserError, match=expected):
        Half().bias(t, t)


@pytest.mark.parametrize("first", [0, 1])
def test_sandwich_is_the_product_of_two_sinusoidal_embeddings(first):
    """Indices from 0 give the frequencies of Vaswani et al.; indices from 1 give the next ones."""
    width, t = 16, np.array([0, 1, 5, 100])
    angles = t[:, None] / 1e4 ** (2 * (np.arange(width // 2) + first) / width)
    embedding = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    scheme = positions.build({"name": "sandwich", "width": width, "first_index": first})
    facts = StackFacts(d_model=8, num_heads=4, d_head=2, d_value=2, max_length=128, causal=True)
    bound = scheme.bind(None, facts)
    bias = np.asarray(bound.bias(jnp.asarray(t)[None], jnp.asarray(t)[None]))[0]
    for head in range(4):  # a constant does not change the softmax
        expected = (embedding @ embedding.T - width / 2) / (8 * (head + 1) / 4)
        np.testing.assert_allclose(bias[head], expected, atol=1e-5)
    assert positions.build("sandwich").first_index == 0
    with pytest.raises(UserError, match="first_index: 2 must be 0 or 1"):
        ModelConfig(family="decoder", vocab_size=9, position={"name": "sandwich", "first_index": 2})
