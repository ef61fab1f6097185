"""Cached decoding equals teacher forcing; beam search equals brute force; sampling follows its distribution."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make, schemes, small, tokens

from transformer.decoding.beam import beam_search
from transformer.decoding.prefill import advance, prefill
from transformer.decoding.sampling import sample, truncate

EOS = 2


@pytest.mark.parametrize(("family", "position"), schemes("decoder", "encoder_decoder"))
def test_cached_decoding_equals_teacher_forcing(family, position):
    """A prefill of prompts of unequal length (padded on the left), then one token at a time."""
    scan = position not in ("rotary", "t5")
    model, params = make(small(family, position=position, scan_layers=scan))
    target, source = tokens(1, 2, 8), tokens(2, 2, 6)
    source = source.at[1, 4:].set(0)
    sides = (source,) if family == "encoder_decoder" else ()
    whole = model.apply(params, *sides, target)
    lengths = (3, 1)
    prompt = jnp.stack([jnp.pad(target[i, :n], (3 - n, 0)) for i, n in enumerate(lengths)])
    assert bool((prompt == 0).any())
    logits, memory = prefill(model, params["params"], prompt, 10, *sides)
    step = jax.jit(lambda t, m: advance(model, params["params"], t, m))
    for k in range(6):
        expected = jnp.stack([whole[i, n - 1 + k] for i, n in enumerate(lengths) if n - 1 + k < 8])
        np.testing.assert_allclose(logits[: len(expected)], expected, atol=3e-5)
        logits, memory = step(jnp.stack([target[i, min(n + k, 7)] for i, n in enumerate(lengths)]), memory)


def brute_force(model, params, source, limit, alpha):
    """Every sequence of up to `limit` tokens that ends in eos, scored one by one."""
    vocab, best = model.config.vocab_size, []
    for length in range(1, limit + 1):
        bodies = np.array(
            list(itertools.product([t for t in range(1, vocab) if t != EOS], repeat=length - 1)), np.int32
        ).reshape((vocab - 2) ** (length - 1), length - 1)
        texts = np.concatenate([bodies, np.full((len(bodies), 1), EOS, np.int32)], 1)
        inputs = np.concatenate([np.ones((len(texts), 1), np.int32), texts[:, :-1]], 1)
        where = {"segment_ids": jnp.ones(inputs.shape, jnp.int32)}
        logp = jax.nn.log_softmax(
            model.apply(params, jnp.broadcast_to(source, (len(texts), source.shape[1])), jnp.asarray(inputs), **where)
        )
        total = np.take_along_axis(np.asarray(logp), texts[..., None], -1)[..., 0].sum(-1)
        best += [(s, tuple(t)) for s, t in zip(total / ((5 + length) / 6) ** alpha, texts.tolist(), strict=True)]
    return sorted(best, reverse=True)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_beam_search_equals_brute_force(alpha, seed):
    model, params = make(small("encoder_decoder", vocab_size=5, scan_layers=bool(seed)), seed=seed, noise=0.6)
    source = tokens(seed, 2, 4, vocab=5)
    limits = jnp.array([4, 3])
    beam = 64  # as wide as the search can get: exhaustive
    texts, scores = jax.jit(
        lambda p: beam_search(
            model,
            p,
            jnp.ones((2, 1), jnp.int32),
            limits,
            beam_size=beam,
            alpha=alpha,
            max_new=5,
            eos_id=EOS,
            source_BxS=source,
        )
    )(params["params"])
    for row in range(2):
        expected = brute_force(model, params, source[row : row + 1], int(limits[row]), alpha)
        assert len(expected) > 10
        for k in range(10):
            text = tuple(t for t in np.asarray(texts[row, k]).tolist() if t)
            assert float(scores[row, k]) == pytest.approx(expected[k][0], abs=1e-4)
            assert text == expected[k][1] or expected[k][0] == pytest.approx(expected[k + 1][0], abs=1e-5)


def plain_beam(model, params, source, limit, alpha, k):
    """Beam search as one would write it for a single sentence, with lists, scoring every prefix anew."""
    live, ended = [(0.0, (1,))], []
    for step in range(1, limit + 1):
        grown = []
        for logp, text in live:
            ids = jnp.asarray([text])
            out = jax.nn.log_softmax(
                model.apply(params, source, ids, segment_ids=jnp.ones(ids.shape, jnp.int32))[0, -1]
            )
            grown += [(logp + float(out[t]), (*text, t)) for t in range(1, model.config.vocab_size)]
        grown = sorted(grown, reverse=True)[: 2 * k]
        ended += [(s / ((5 + step) / 6) ** alpha, t) for s, t in grown if t[-1] == EOS]
        ended = sorted(ended, reverse=True)[:k]
        live = [(s, t) for s, t in grown if t[-1] != EOS][:k]
        if len(ended) == k and live[0][0] / ((5 + limit) / 6) ** alpha <= ended[-1][0]:
            break
    return ended or [(s / ((5 + limit) / 6) ** alpha, t) for s, t in live]


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_narrow_beam_equals_a_plain_one(alpha):
    """Pruning, freezing and stopping, where the beam is too narrow to be exhaustive."""
    model, params = make(small("encoder_decoder", vocab_size=9), noise=0.5)
    source, limits = tokens(5, 3, 5, vocab=9), jnp.array([6, 6, 4])
    search = jax.jit(
        lambda p: beam_search(
            model,
            p,
            jnp.ones((3, 1), jnp.int32),
            limits,
            beam_size=3,
            alpha=alpha,
            max_new=6,
            eos_id=EOS,
            source_BxS=source,
        )
    )
    texts, scores = search(params["params"])
    for row in range(3):
        expected = plain_beam(model, params, source[row : row + 1], int(limits[row]), alpha, 3)
        for (score, text), found, found_score in zip(expected, np.asarray(texts[row]), scores[row], strict=False):
            assert float(found_score) == pytest.approx(score, abs=1e-4)
            assert tuple(t for t in found.tolist() if t) == text[1:]


def test_a_beam_of_one_is_greedy_and_rows_do_not_depend_on_each_other():
    model, params = make(small("encoder_decoder"))
    source, prompt, limits = tokens(0, 3, 6), jnp.ones((3, 1), jnp.int32), jnp.array([7, 4, 7])
    search = lambda rows, k: beam_search(
        model,
        params["params"],
        prompt[rows],
        limits[rows],
        beam_size=k,
        alpha=0.6,
        max_new=8,
        eos_id=EOS,
        source_BxS=source[rows],
    )
    greedy = sample(
        model,
        params["params"],
        prompt,
        limits,
        jax.random.split(jax.random.key(0), 3),
        max_new=8,
        eos_id=EOS,
        source_BxS=source,
    )
    np.testing.assert_array_equal(search(slice(None), 1)[0][:, 0], greedy)
    together = search(slice(None), 4)
    assert len({tuple(t) for t in np.asarray(together[0][:, 0]).tolist()}) > 1
    for row in range(3):
        alone = search(slice(row, row + 1), 4)
        np.testing.assert_array_equal(alone[0][0, 0], together[0][row, 0])
        np.testing.assert_allclose(alone[1][0], together[1][row], rtol=1e-5)


def test_greedy_decoding_takes_the_likeliest_token_of_the_whole_model():
    model, params = make(small("decoder"))
    prompt = tokens(3, 2, 3)
    out = sample(
        model,
        params["params"],
        prompt,
        jnp.array([6, 2]),
        jax.random.split(jax.random.key(0), 2),
        max_new=6,
        eos_id=EOS,
    )
    assert (np.asarray(out[1, 2:]) == 0).all()
    text = np.asarray(prompt)
    for k in range(6):
        expected = np.asarray(model.apply(params, jnp.asarray(text)))[0, -1].argmax()
        assert expected == out[0, k]
        text = np.concatenate([text, np.asarray(out[:, k : k + 1])], 1)
        if expected == EOS:
            break


def test_sampling_draws_from_the_distribution_and_each_row_by_its_own_key():
    model, params = make(small("decoder"), noise=0.1)
    rows = 4000
    prompt = jnp.broadcast_to(tokens(3, 1, 3), (rows, 3))
    keys = jax.random.split(jax.random.key(1), rows)
    draw = jax.jit(lambda p, k, n: sample(model, params["params"], p, n, k, max_new=1, eos_id=EOS, temperature=0.7))
    out = np.asarray(draw(prompt, keys, jnp.ones(rows, jnp.int32)))[:, 0]
    logits = model.apply(params, prompt[:1])[0, -1].at[0].set(-jnp.inf)  # pad is never written
    expected = np.asarray(jax.nn.softmax(logits / 0.7))
    seen = np.bincount(out, minlength=37) / rows
    assert np.abs(seen - expected).max() < 4 * np.sqrt(expected.max() / rows)
    np.testing.assert_array_equal(np.asarray(draw(prompt[:10], keys[:10], jnp.ones(10, jnp.int32)))[:, 0], out[:10])


def test_top_k_and_top_p_keep_what_they_say():
    logits = jnp.log(jnp.array([[0.5, 0.05, 0.3, 0.15]]))
    kept = lambda *options: np.isfinite(np.asarray(truncate(logits, *options))[0]).tolist()
    assert kept(0, 1.0) == [True] * 4
    assert kept(2, 1.0) == [True, False, True, False]
    assert kept(0, 0.79) == [True, False, True, False]
    assert kept(0, 0.81) == [True, False, True, True]
    assert kept(0, 0.01) == [True, False, False, False]
