"""The worked examples of the course material, number by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ALONE
from flax.core import meta

from transformer import ModelConfig, build_model
from transformer.model.attention_backends import BACKENDS, Inputs
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Tokens


def attend(backend, q, k, v, mask=SAME_SEGMENT, scale=None):
    """One head: [T, d_k], [S, d_k], [S, d_v] -> [T, d_v]."""
    head = lambda x: jnp.asarray(x, jnp.float32)[None, :, None]
    at = lambda x: Tokens(jnp.arange(len(x))[None], jnp.ones((1, len(x)), jnp.int32))
    given = Inputs(mask, at(q), at(k), None, np.shape(q)[1] ** -0.5 if scale is None else scale)
    return np.asarray(BACKENDS[backend].attend(head(q), head(k), head(v), given))[0, :, 0]


@pytest.mark.parametrize("backend", ALONE)
def test_two_by_two(backend):
    q, k, v = [[1, 0], [0, 1]], [[1, 0], [1, 1]], [[1, 2], [3, 4]]
    np.testing.assert_array_equal(np.array(q) @ np.array(k).T, [[1, 1], [0, 1]])
    weights = attend(backend, q, k, np.eye(2))
    np.testing.assert_allclose(weights, [[0.5, 0.5], [0.330, 0.670]], atol=5e-4)
    np.testing.assert_allclose(attend(backend, q, k, v), [[2, 3], [2.34, 3.34]], atol=5e-3)


@pytest.mark.parametrize("backend", ALONE)
def test_three_tokens_of_one_dimension(backend):
    q, k, v = [[2], [0], [1]], [[1], [3], [-1]], [[10], [20], [30]]
    np.testing.assert_array_equal(np.array(q) @ np.array(k).T, [[2, 6, -2], [0, 0, 0], [1, 3, -1]])
    out = attend(backend, q, k, v)
    assert out[1, 0] == pytest.approx(20)  # no preference: the mean
    weights = np.exp([2, 6, -2]) / np.exp([2, 6, -2]).sum()
    assert out[0, 0] == pytest.approx(float(weights @ [10, 20, 30]), rel=1e-5)


def test_the_causal_mask_of_four():
    at = Tokens(jnp.arange(4)[None], jnp.ones((1, 4), jnp.int32))
    np.testing.assert_array_equal(CAUSAL(at, at)[0], np.tril(np.ones((4, 4))))


@pytest.mark.parametrize("backend", ALONE)
def test_a_large_negative_number_and_exact_zeros_are_the_same_mask(backend):
    """The additive mask of the notes, finite so that no NaN is bred, gives weights of exactly zero, as ours does."""
    generator = np.random.default_rng(0)
    q, k = generator.normal(size=(2, 4, 3))
    ours = attend(backend, q, k, np.eye(4), CAUSAL)
    logits = q @ k.T * 3**-0.5 + np.where(np.tril(np.ones((4, 4))), 0, -1e9)
    theirs = np.exp(logits - logits.max(1, keepdims=True))
    theirs /= theirs.sum(1, keepdims=True)
    np.testing.assert_array_equal(ours == 0, np.triu(np.ones((4, 4)), 1))
    np.testing.assert_array_equal(theirs == 0, np.triu(np.ones((4, 4)), 1))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(("d_model", "heads", "length", "d_k"), [(8, 2, 3, 4), (1024, 16, 128, 64)])
def test_shapes(d_model, heads, length, d_k):
    config = ModelConfig(
        family="decoder", vocab_size=11, d_model=d_model, d_ff=d_model, num_heads=heads, num_decoder_layers=1, max_length=length,
        scan_layers=False,
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((1, length), jnp.int32)
    model = build_model(config)
    params = meta.unbox(jax.eval_shape(model.init, jax.random.key(0), x))
    attention = params["params"]["decoder"]["layers_0"]["self_attention"]
    assert config.head_size == d_k
    for part in ("query", "key", "value"):
        assert attention[part]["kernel"].shape == (d_model, heads, d_k)
    assert attention["out"]["kernel"].shape == (
        heads,
        d_k,
        d_model,
    )  # h d_k x d_model, once the heads are concatenated
    jaxpr = str(jax.make_jaxpr(model.apply)(params, x))
    assert f"f32[1,{heads},1,{length},{length}]" in jaxpr  # a score for every pair, in every head
    assert jax.eval_shape(model.apply, params, x).shape == (1, length, 11)


def test_heads_concatenated_or_summed_are_the_same():
    """W_O over all heads at once (J&M 9.20) is the sum over heads of each one's own part of it (MIT 6.390, eq. 9.9)."""
    generator = np.random.default_rng(0)
    heads, w = generator.normal(size=(5, 4, 3)), generator.normal(size=(4, 3, 8))
    np.testing.assert_allclose(
        heads.reshape(5, 12) @ w.reshape(12, 8), sum(heads[:, n] @ w[n] for n in range(4))
    )


def test_disentangled_attention_is_that_of_the_authors():
    """One attention sublayer against Transformers' DeBERTa, whose code is the authors'."""
    torch = pytest.importorskip("torch", reason="the test extra brings it")
    deberta = pytest.importorskip(
        "transformers.models.deberta.modeling_deberta", reason="the test extra brings it"
    )
    from conftest import make, small

    from transformer.model.masks import Tokens
    from transformer.model.mixers import Context
    from transformer.model.mixers.attention import Attention
    from transformer.model.positions import build

    n, h, d, most, length = 4, 4, 16, 3, 7
    spec = {"name": "deberta", "max_distance": most}
    config = small(
        "encoder",
        position=spec,
        num_kv_heads=n,
        use_bias=False,
        num_encoder_layers=1,
        scan_layers=False,
    )
    _, params = make(config)
    own, table = (
        params["params"]["encoder"]["layers_0"]["self_attention"],
        params["params"]["encoder"]["relative_embedding"],
    )
    theirs = deberta.DisentangledSelfAttention(deberta.DebertaConfig(
        hidden_size=d, num_attention_heads=n, relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=most,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )).eval()  # fmt: skip
    kernel = lambda name: np.asarray(own[name]["kernel"])  # [d, n, h]
    flat = lambda x: torch.tensor(np.ascontiguousarray(np.asarray(x).reshape(d, n * h).T))
    with torch.no_grad():
        each = np.concatenate(
            [kernel(name) for name in ("query", "key", "value")], axis=-1
        )  # a head's three, side by side
        theirs.in_proj.weight.copy_(
            torch.tensor(np.ascontiguousarray(each.reshape(d, 3 * n * h).T))
        )
        theirs.pos_proj.weight.copy_(flat(own["relative_key"]))
        theirs.pos_q_proj.weight.copy_(flat(own["relative_query"]))
        theirs.pos_q_proj.bias.zero_()
        x = np.random.default_rng(0).standard_normal((2, length, d)).astype(np.float32)
        at = torch.arange(length)
        wanted = theirs(
            torch.tensor(x), torch.ones(2, 1, length, length), relative_pos=(at[:, None] - at[None])[None], rel_embeddings=torch.tensor(np.asarray(table)),
        )[0].numpy()  # fmt: skip
    where = Tokens(jnp.arange(length)[None], jnp.ones((2, length), jnp.int32))
    position = build(config.position).replace(table_RxD=table).at(where.positions_BxT)
    attention = Attention(config, "encoder", 1.0, 1.0)
    eye = {"out": {"kernel": jnp.eye(d).reshape(n, h, d)}}
    found, _ = attention.apply(
        {"params": own | eye}, x, Context(where, where), position, None, True
    )
    assert length > most  # so that distances are clipped
    np.testing.assert_allclose(found, wanted, atol=2e-5)
