"""Worked examples from course material, checked number by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from conftest import GENERAL_BACKENDS
from flax.core import meta

from transformer import ModelConfig, architecture, build_model
from transformer.data.config import TokenizerConfig
from transformer.data.tokenizer import train_tokenizer
from transformer.model import positions
from transformer.model.attention_backends import BACKENDS, Inputs
from transformer.model.attention_backends.base import softmax
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Tokens


def attend(backend, q, k, v, mask=SAME_SEGMENT, scale=None):
    """One head: [T, d_k], [S, d_k], [S, d_v] -> [T, d_v]."""
    head = lambda x: jnp.asarray(x, jnp.float32)[None, :, None]
    tokens = lambda x: Tokens(jnp.arange(len(x))[None], jnp.ones((1, len(x)), jnp.int32))
    inputs = Inputs(
        mask, tokens(q), tokens(k), None, np.shape(q)[1] ** -0.5 if scale is None else scale
    )
    return np.asarray(BACKENDS[backend].attend(head(q), head(k), head(v), inputs))[0, :, 0]


@pytest.mark.parametrize("backend", GENERAL_BACKENDS)
def test_attention_of_two_tokens(backend):
    q, k, v = [[1, 0], [0, 1]], [[1, 0], [1, 1]], [[1, 2], [3, 4]]
    np.testing.assert_array_equal(np.array(q) @ np.array(k).T, [[1, 1], [0, 1]])
    weights = attend(backend, q, k, np.eye(2))
    np.testing.assert_allclose(weights, [[0.5, 0.5], [0.330, 0.670]], atol=5e-4)
    np.testing.assert_allclose(attend(backend, q, k, v), [[2, 3], [2.34, 3.34]], atol=5e-3)


@pytest.mark.parametrize("backend", GENERAL_BACKENDS)
def test_attention_of_three_one_dimensional_tokens(backend):
    q, k, v = [[2], [0], [1]], [[1], [3], [-1]], [[10], [20], [30]]
    np.testing.assert_array_equal(np.array(q) @ np.array(k).T, [[2, 6, -2], [0, 0, 0], [1, 3, -1]])
    out = attend(backend, q, k, v)
    assert out[1, 0] == pytest.approx(20)  # no preference: the mean
    weights = np.exp([2, 6, -2]) / np.exp([2, 6, -2]).sum()
    assert out[0, 0] == pytest.approx(float(weights @ [10, 20, 30]), rel=1e-5)
    # O_3 = (10 e + 20 e^3 + 30 / e) / (e + e^3 + 1 / e) = (27.18 + 401.71 + 11.04) / 23.17
    assert out[2, 0] == pytest.approx(18.985, abs=1e-3)


def masked_weights(logits, mask, mask_value: float) -> np.ndarray:
    """The weights of one query with these logits, where the mask is True for allowed keys."""
    where = Tokens(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32))
    inputs = Inputs(SAME_SEGMENT, where, where, None, 1.0, mask_value=mask_value)
    logits = jnp.asarray(logits, jnp.float32)[None, None, None]
    return np.asarray(softmax(logits, jnp.asarray(mask)[None, None], inputs))[0, 0, 0]


def test_how_finite_and_infinite_masks_fail():
    some, none = [True, True, False], [False, False, False]
    exact = masked_weights([1.0, 2.0, 3.0], some, 0.0)
    np.testing.assert_allclose(exact, [0.2689, 0.7311, 0.0], atol=1e-4)
    # With usual logits, all constants are as good as an exclusion.
    for value in (-1e5, -1e9, -np.inf):
        np.testing.assert_array_equal(masked_weights([1.0, 2.0, 3.0], some, value), exact)
    # A constant fails if allowed logits are below it: the masked key takes all the weight.
    low = [-2e5, -2e5, 0.0]
    np.testing.assert_array_equal(masked_weights(low, some, -1e5), [0, 0, 1])
    np.testing.assert_array_equal(masked_weights(low, some, -1e9), [0.5, 0.5, 0])
    # A query without keys: with constants it attends to masked keys, and -1e9 in float32 also
    # erases their logits. -inf gives NaN. Without a constant, its weights are 0.
    last = [0.0, 1.0, 2.0]
    np.testing.assert_allclose(masked_weights(last, none, -1e5), [0.09, 0.245, 0.665], atol=5e-3)
    np.testing.assert_allclose(masked_weights(last, none, -1e9), [1 / 3] * 3)
    assert np.isnan(masked_weights(last, none, -np.inf)).all()
    np.testing.assert_array_equal(masked_weights(last, none, 0.0), [0, 0, 0])


def test_a_model_with_a_finite_mask_sees_later_tokens():
    fields = {"family": "decoder", "vocab_size": 11, "d_model": 8, "num_heads": 2, "d_ff": 8}
    fields |= {"num_decoder_layers": 1, "position": "none"}
    x, changed = jnp.array([[3, 1, 4, 1, 5]]), jnp.array([[3, 1, 4, 1, 9]])
    for value, leaks in ((0.0, False), (-1e5, False), (-1.0, True)):
        model = build_model(ModelConfig(**fields, attention_mask_value=value))
        params = model.init(jax.random.key(0), x)
        before, after = (model.apply(params, tokens)[0, :4] for tokens in (x, changed))
        assert (float(jnp.abs(before - after).max()) > 1e-3) == leaks


@pytest.mark.parametrize("score", ["bilinear", "additive"])
def test_attention_with_other_scores(score):
    """Luong et al. 2015: q M k ("general"). Bahdanau et al. 2015: v . tanh(q + k)."""
    config = ModelConfig(
        family="decoder", vocab_size=11, d_model=8, num_heads=1, num_decoder_layers=1,
        position="none", norm_placement="none", feed_forward="none", use_bias=False,
        attention_score=score,
    )  # fmt: skip
    model, x = build_model(config), jnp.array([[3, 1, 4, 1, 5]])
    params = meta.unbox(model.init(jax.random.key(0), x))
    layer = params["decoder"]["layers"]["self_attention"]
    layer[score] = layer[score] + jax.random.normal(jax.random.key(1), layer[score].shape)
    table = np.asarray(params["embedding"]["embedding"], np.float64)
    h = table[np.array(x[0])]
    q, k, v = (h @ np.asarray(layer[name]["kernel"])[0, :, 0] for name in ("query", "key", "value"))
    extra = np.asarray(layer[score])[0, 0]
    e = q @ extra @ k.T / 8**0.5 if score == "bilinear" else np.tanh(q[:, None] + k) @ extra
    weights = np.where(np.tril(np.ones((5, 5))), np.exp(e), 0.0)
    weights /= weights.sum(-1, keepdims=True)
    out = h + weights @ v @ np.asarray(layer["out"]["kernel"])[0, 0]
    np.testing.assert_allclose(model.apply(params, x)[0], out @ table.T, atol=1e-4)


def test_causal_mask_of_four_tokens():
    tokens = Tokens(jnp.arange(4)[None], jnp.ones((1, 4), jnp.int32))
    np.testing.assert_array_equal(CAUSAL(tokens, tokens)[0], np.tril(np.ones((4, 4))))


@pytest.mark.parametrize("backend", GENERAL_BACKENDS)
def test_padding_and_causal_masks_combine(backend):
    """A pair of tokens is allowed if both masks allow it: the sum of the additive masks is 0."""
    segments = jnp.array([[1, 1, 0, 1]])  # the third token is padding
    tokens = Tokens(jnp.arange(4)[None], segments)
    both = (SAME_SEGMENT & CAUSAL)(tokens, tokens)[0]
    causal = np.where(np.tril(np.ones((4, 4))), 0, -np.inf)
    padding = np.where(segments[0] == 1, 0, -np.inf)
    real = np.array([0, 1, 3])
    np.testing.assert_array_equal(both[real], (causal + padding)[real] == 0)
    head = lambda x: jnp.asarray(x, jnp.float32)[None, :, None]
    inputs = Inputs(SAME_SEGMENT & CAUSAL, tokens, tokens, None, 1.0)
    zeros = np.zeros((4, 2))
    weights = BACKENDS[backend].attend(head(zeros), head(zeros), head(np.eye(4)), inputs)[0, :, 0]
    expected = [[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 0, 1 / 3]]
    np.testing.assert_allclose(weights[real], expected, atol=1e-6)


@pytest.mark.parametrize("backend", GENERAL_BACKENDS)
def test_additive_and_boolean_masks_agree(backend):
    """The additive mask of the notes gives weights of exactly zero, like the boolean mask.

    Its large negative number is finite, so that it cannot cause NaN.
    """
    generator = np.random.default_rng(0)
    q, k = generator.normal(size=(2, 4, 3))
    weights = attend(backend, q, k, np.eye(4), CAUSAL)
    logits = q @ k.T * 3**-0.5 + np.where(np.tril(np.ones((4, 4))), 0, -1e9)
    expected = np.exp(logits - logits.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_array_equal(weights == 0, np.triu(np.ones((4, 4)), 1))
    np.testing.assert_array_equal(expected == 0, np.triu(np.ones((4, 4)), 1))
    np.testing.assert_allclose(weights, expected, atol=1e-6)


@pytest.mark.parametrize(("d_model", "heads", "length", "d_k"), [(8, 2, 3, 4), (1024, 16, 128, 64)])
def test_shapes_of_parameters_scores_and_logits(d_model, heads, length, d_k):
    config = ModelConfig(
        family="decoder", vocab_size=11, d_model=d_model, d_ff=d_model, num_heads=heads,
        num_decoder_layers=1, max_length=length, scan_layers=False,
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((1, length), jnp.int32)
    model = build_model(config)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    attention = params["decoder"]["layers_0"]["self_attention"]
    assert config.head_size == d_k
    for part in ("query", "key", "value"):
        assert attention[part]["kernel"].shape == (d_model, heads, d_k)
    # h d_k x d_model for concatenated heads
    assert attention["out"]["kernel"].shape == (heads, d_k, d_model)
    jaxpr = str(jax.make_jaxpr(model.apply)(params, x))
    assert f"f32[1,{heads},1,{length},{length}]" in jaxpr  # a logit for every pair and head
    assert jax.eval_shape(model.apply, params, x).shape == (1, length, 11)


def test_concatenating_heads_equals_summing_over_heads():
    """W_O on concatenated heads (J&M 9.20) equals the sum over heads of W_O's part for each head.

    The sum is eq. 9.9 of MIT 6.390.
    """
    generator = np.random.default_rng(0)
    heads, w = generator.normal(size=(5, 4, 3)), generator.normal(size=(4, 3, 8))
    np.testing.assert_allclose(
        heads.reshape(5, 12) @ w.reshape(12, 8), sum(heads[:, n] @ w[n] for n in range(4))
    )


def test_disentangled_attention_matches_hugging_face():
    """Compares one attention sublayer with Hugging Face's DeBERTa, which is the authors' code."""
    torch = pytest.importorskip("torch", reason="the test extra brings it")
    deberta = pytest.importorskip(
        "transformers.models.deberta.modeling_deberta", reason="the test extra brings it"
    )
    from conftest import make, small

    from transformer.model.masks import Tokens
    from transformer.model.mixers.attention import Attention
    from transformer.model.mixers.base import Context
    from transformer.model.positions import build

    n, h, d, max_distance, length = 4, 4, 16, 3, 7
    spec = {"name": "deberta", "max_distance": max_distance}
    config = small(
        "encoder", position=spec, num_kv_heads=n, use_bias=False, num_encoder_layers=1,
        scan_layers=False,
    )  # fmt: skip
    _, params = make(config)
    weights = params["encoder"]["layers_0"]["self_attention"]
    table = params["encoder"]["relative_embedding"]
    reference = deberta.DisentangledSelfAttention(deberta.DebertaConfig(
        hidden_size=d, num_attention_heads=n, relative_attention=True, pos_att_type=["c2p", "p2c"],
        max_relative_positions=max_distance, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )).eval()  # fmt: skip
    kernel = lambda name: np.asarray(weights[name]["kernel"])  # [d, n, h]
    flat = lambda x: torch.tensor(np.ascontiguousarray(np.asarray(x).reshape(d, n * h).T))
    with torch.no_grad():
        # q, k and v of a head are adjacent
        qkv = np.concatenate([kernel(name) for name in ("query", "key", "value")], axis=-1)
        reference.in_proj.weight.copy_(
            torch.tensor(np.ascontiguousarray(qkv.reshape(d, 3 * n * h).T))
        )
        reference.pos_proj.weight.copy_(flat(weights["relative_key"]))
        reference.pos_q_proj.weight.copy_(flat(weights["relative_query"]))
        reference.pos_q_proj.bias.zero_()
        x = np.random.default_rng(0).standard_normal((2, length, d)).astype(np.float32)
        index = torch.arange(length)
        expected = reference(
            torch.tensor(x), torch.ones(2, 1, length, length),
            relative_pos=(index[:, None] - index[None])[None],
            rel_embeddings=torch.tensor(np.asarray(table)),
        )[0].numpy()  # fmt: skip
    tokens = Tokens(jnp.arange(length)[None], jnp.ones((2, length), jnp.int32))
    position = build(config.position).replace(table_RxD=table).at(tokens.positions_BxT)
    attention = Attention(config, config.token_mixer, "encoder", 1.0, 1.0)
    identity_out = {"out": {"kernel": jnp.eye(d).reshape(n, h, d)}}
    actual, _ = attention.apply(
        {"params": weights | identity_out}, x, Context(tokens, tokens), position, None, True
    )
    assert length > max_distance  # so that distances are clipped
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def attention_only(**fields):
    """Returns (model, random parameters, tokens) of Hewitt's attention without a nonlinearity."""
    config = architecture(
        "minimal", vocab_size=11, d_model=6, max_length=8, feed_forward="none", d_ff=0,
        activation="relu", scan_layers=False, tie_embeddings=False, **fields,
    )  # fmt: skip
    model, tokens = build_model(config), jnp.array([[3, 1, 4, 1, 5, 9]])
    params = model.init(jax.random.key(0), tokens)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    draw = lambda key, x: 0.5 * jax.random.normal(key, x.shape)
    params = tree.unflatten(map(draw, keys, leaves))
    return model, jax.tree.map(np.asarray, params), tokens


def test_minimal_attention_is_the_softmax_of_unscaled_products():
    """Hewitt's eqs. 7 and 8: q = Q x, k = K x, v = V x; alpha = softmax(q . k); h = sum alpha v."""
    model, params, tokens = attention_only(num_decoder_layers=1)
    layer = params["decoder"]["layers_0"]
    assert layer.keys() == {"self_attention"}
    assert {name: x["kernel"].shape for name, x in layer["self_attention"].items()} == {
        name: (6, 1, 6) for name in ("query", "key", "value")
    }
    x = params["embedding"]["embedding"][tokens[0]] + params["decoder"]["position_embedding"][:6]
    q, k, v = (x @ layer["self_attention"][n]["kernel"][:, 0] for n in ("query", "key", "value"))
    alpha = np.where(np.tril(np.ones((6, 6))), np.exp(q @ k.T), 0)
    expected = alpha / alpha.sum(1, keepdims=True) @ v @ params["unembedding"]["kernel"]
    np.testing.assert_allclose(model.apply(params, tokens)[0], expected, rtol=2e-4, atol=1e-4)


def test_stacked_attention_without_a_nonlinearity_is_one_weighted_mean():
    """Hewitt's eqs. 14 to 16: two layers average values of one matrix V* = V2 V1."""
    model, params, tokens = attention_only(num_decoder_layers=2)
    logits, seen = model.apply(params, tokens, mutable=["maps"])
    layers = [
        (seen["maps"]["decoder"][f"layers_{i}"], params["decoder"][f"layers_{i}"]) for i in (0, 1)
    ]
    maps = [m["self_attention"]["weights"][0][0, 0] for m, _ in layers]
    first, second = (p["self_attention"]["value"]["kernel"][:, 0] for _, p in layers)
    x = params["embedding"]["embedding"][tokens[0]] + params["decoder"]["position_embedding"][:6]
    expected = (maps[1] @ maps[0]) @ x @ (first @ second) @ params["unembedding"]["kernel"]
    np.testing.assert_allclose(logits[0], expected, rtol=1e-3, atol=1e-3)


def test_attention_without_positions_ignores_the_order_of_tokens():
    """Hewitt's eqs. 9 to 11: a permutation of the other tokens changes no output."""
    model, params, tokens = attention_only(num_decoder_layers=1, position="none", causal=False)
    permuted = tokens[:, jnp.array([4, 2, 0, 1, 3, 5])]
    a, b = (model.apply(params, x)[0, -1] for x in (tokens, permuted))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    other = model.apply(params, tokens.at[0, 0].set(7))[0, -1]
    assert np.abs(other - a).max() > 1e-2


def test_attention_without_projections():
    """J&M 9.6 to 9.8: score(x_i, x_j) = x_i . x_j, alpha = softmax, a_i = sum over j <= i.

    Identity matrices in place of W_Q, W_K and W_V give this form.
    """
    model, params, tokens = attention_only(num_decoder_layers=1)
    for matrix in params["decoder"]["layers_0"]["self_attention"].values():
        matrix["kernel"] = np.eye(6)[:, None].astype(np.float32)
    x = params["embedding"]["embedding"][tokens[0]] + params["decoder"]["position_embedding"][:6]
    for i in range(6):
        scores = np.array([x[i] @ x[j] for j in range(i + 1)])
        alpha = np.exp(scores - scores.max())
        a_i = sum(w / alpha.sum() * x[j] for j, w in enumerate(alpha))
        logits = model.apply(params, tokens)[0, i]
        np.testing.assert_allclose(
            logits, a_i @ params["unembedding"]["kernel"], rtol=1e-3, atol=1e-4
        )


def test_one_hot_times_the_table_selects_a_row():
    """J&M: an embedding is the product of a one-hot vector and the matrix E."""
    table = np.random.default_rng(0).normal(size=(7, 4))
    np.testing.assert_array_equal(np.eye(7)[[5, 2]] @ table, table[[5, 2]])


def test_sinusoidal_position_4_is_nearer_to_5_than_to_17():
    """J&M, section 9.4."""
    scheme, at = positions.build("sinusoidal"), jnp.arange(18)[None]
    embedded = scheme.embed(jnp.zeros((1, 18, 16)), at)[0]
    distance = lambda s, t: float(np.linalg.norm(embedded[s] - embedded[t]))
    assert distance(4, 5) < distance(4, 17)


def test_softmax_of_given_numbers():
    """Softmax of [1, 7, -143.6, 0] is nearly one-hot, and less so at temperature 10."""
    logits = jnp.array([1.0, 7.0, -143.6, 0.0])
    plain, flat = jax.nn.softmax(logits), jax.nn.softmax(logits / 10)
    np.testing.assert_allclose(plain, [0.00247, 0.99662, 0, 0.00091], atol=1e-5)
    assert plain[2] == 0 and 0 < flat[2] < 1e-6
    np.testing.assert_allclose(flat[:2], [0.26832, 0.48890], atol=1e-5)


def test_several_heads_cost_what_one_head_costs():
    """Hewitt's eqs. 22 to 24: k heads of size d / k have the parameters and products of one."""

    def cost(heads: int) -> tuple[int, int]:
        config = ModelConfig(
            family="decoder", vocab_size=11, d_model=16, d_ff=16, num_heads=heads,
            num_decoder_layers=1, max_length=8, scan_layers=False, attention_backend="reference",
        )  # fmt: skip
        model, x = build_model(config), jnp.zeros((1, 8), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), x)
        products = 0
        pending = [jax.make_jaxpr(model.apply)(params, x).jaxpr]
        for jaxpr in pending:
            for step in jaxpr.eqns:
                inner = [getattr(value, "jaxpr", None) for value in step.params.values()]
                pending.extend(x for x in inner if x is not None)
                if step.primitive.name == "dot_general":
                    (contracted, _), _ = step.params["dimension_numbers"]
                    summed = [step.invars[0].aval.shape[i] for i in contracted]
                    products += int(np.prod([*step.outvars[0].aval.shape, *summed]))
        return sum(x.size for x in jax.tree.leaves(params)), products

    assert cost(4) == cost(1)
    # Four projections, scores and values, two of the feed-forward, and the logits.
    assert cost(1)[1] == 4 * 8 * 16 * 16 + 2 * 8 * 8 * 16 + 2 * 8 * 16 * 16 + 8 * 16 * 11


def test_bpe_merges_the_most_frequent_pair():
    """Merges by hand, where _ begins a word.

    hug 10, pug 5, pun 12, bun 4, hugs 5: u g occurs 20 times, then _ p 17 times, then u n 16 times.
    """
    counts = {"hug": 10, "pug": 5, "pun": 12, "bun": 4, "hugs": 5}
    text = [word for word, count in counts.items() for _ in range(count)]
    tokenizer = train_tokenizer(TokenizerConfig(kind="bpe"), 280, text)
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    merged = [piece for piece in pieces if len(piece) == 2 and piece[0] != "<"]
    assert merged[:3] == ["ug", "\u2581p", "un"]
