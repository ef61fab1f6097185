"""Cached decoding equals teacher forcing; beam search equals brute force; sampling follows its distribution."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make, masks, schemes, small, start_decoding, tokens

from transformer.decoding.beam import beam_search
from transformer.decoding.prefill import advance
from transformer.decoding.sampling import sample, truncate

EOS = 2
ENDING = {"eos_id": EOS, "pad_id": 0, "suppress_tokens": (0,)}


@pytest.mark.parametrize(("family", "position"), schemes("decoder", "encoder_decoder"))
def test_cached_decoding_equals_teacher_forcing(family, position):
    """A prefill of prompts of unequal length (padded on the left), then one token at a time."""
    scan = position not in ("rotary", "t5")
    model, params = make(small(family, position=position, scan_layers=scan))
    target, source = tokens(1, 2, 8), tokens(2, 2, 6)
    source = source.at[1, 4:].set(0)
    sides = (source,) if family == "encoder_decoder" else ()
    whole = jax.jit(model.apply)(params, *sides, target, **masks(*sides, target))
    lengths = (3, 1)
    prompt = jnp.stack([jnp.pad(target[i, :n], (3 - n, 0)) for i, n in enumerate(lengths)])
    assert bool((prompt == 0).any())
    logits, memory = start_decoding(model, params, prompt, 10, *sides)
    step = jax.jit(lambda t, m: advance(model, params["params"], t, m))
    for k in range(6):
        expected = jnp.stack([whole[i, n - 1 + k] for i, n in enumerate(lengths) if n - 1 + k < 8])
        np.testing.assert_allclose(logits[: len(expected)], expected, atol=3e-5)
        logits, memory = step(
            jnp.stack([target[i, min(n + k, 7)] for i, n in enumerate(lengths)]), memory
        )


def scorer(model, params, length: int, rows: int):
    """(source, texts of up to `length` tokens) -> log p of every next token, float[len(texts), length, V], with one compile."""

    @jax.jit
    def score(source, read, real):
        source = jnp.broadcast_to(source, (rows, source.shape[1]))
        return jax.nn.log_softmax(model.apply(params, source, read, segment_ids=real))

    def of(source, texts):
        read, real = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
        for r, text in enumerate(texts):
            read[r, : len(text)], real[r, : len(text)] = text, 1
        return np.asarray(score(source, read, real))[: len(texts)]

    return of


def searcher(model, params, source, limits, beam_size: int, max_new: int, eos=EOS):
    """alpha -> (texts, scores), with one compile for all."""
    start = jnp.ones((len(source), 1), jnp.int32)
    return jax.jit(
        lambda alpha: beam_search(
            model, params["params"], start, limits, beam_size=beam_size, alpha=alpha, max_new=max_new, source_BxS=source,
            **ENDING | {"eos_id": eos},
        )
    )  # fmt: skip


@pytest.fixture(scope="module", params=[0, 1])
def exhaustive(request):
    """A beam as wide as the search can get; and, of each row, log p of every text that ends."""
    seed, limits = request.param, (4, 3)
    model, params = make(
        small("encoder_decoder", vocab_size=5, scan_layers=bool(seed)), seed=seed, noise=0.6
    )
    source, rows = tokens(seed, 2, 4, vocab=5), []
    letters = [t for t in range(1, 5) if t != EOS]
    score = scorer(model, params, max(limits), len(letters) ** (max(limits) - 1))
    for row, limit in enumerate(limits):
        rows.append({})
        for length in range(1, limit + 1):
            texts = [(*body, EOS) for body in itertools.product(letters, repeat=length - 1)]
            logp = score(source[row : row + 1], [(1, *text[:-1]) for text in texts])
            for i, text in enumerate(texts):
                rows[row][text] = sum(logp[i, t, token] for t, token in enumerate(text))
    return searcher(model, params, source, jnp.array(limits), 64, 5), rows


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_beam_search_equals_brute_force(exhaustive, alpha):
    search, rows = exhaustive
    texts, scores = search(alpha)
    for row, all_texts in enumerate(rows):
        expected = sorted(
            ((logp / ((5 + len(t)) / 6) ** alpha, t) for t, logp in all_texts.items()), reverse=True
        )
        assert len(expected) > 10
        for k in range(10):
            text = tuple(t for t in np.asarray(texts[row, k]).tolist() if t)
            assert float(scores[row, k]) == pytest.approx(expected[k][0], abs=1e-4)
            assert text == expected[k][1] or expected[k][0] == pytest.approx(
                expected[k + 1][0], abs=1e-5
            )


def plain_beam(score, source, limit, alpha, k, eos):
    """Beam search as one would write it for a single sentence, with lists, scoring every prefix anew."""
    live, ended = [(0.0, (1,))], []
    for step in range(1, limit + 1):
        grown = []
        for (logp, text), out in zip(live, score(source, [text for _, text in live]), strict=True):
            grown += [(logp + float(out[step - 1, t]), (*text, t)) for t in range(1, out.shape[-1])]
        grown = sorted(grown, reverse=True)[: (1 + len(eos)) * k]
        ended += [(s / ((5 + step) / 6) ** alpha, t) for s, t in grown if t[-1] in eos]
        ended = sorted(ended, reverse=True)[:k]
        live = [(s, t) for s, t in grown if t[-1] not in eos][:k]
        if len(ended) == k and live[0][0] / ((5 + limit) / 6) ** alpha <= ended[-1][0]:
            break
    return ended or [(s / ((5 + limit) / 6) ** alpha, t) for s, t in live]


@pytest.fixture(scope="module", params=[(EOS,), (EOS, 3, 5, 8)])
def narrow(request):
    model, params = make(small("encoder_decoder", vocab_size=9), noise=0.5)
    source, limits = tokens(5, 3, 5, vocab=9), (6, 6, 4)
    return (
        searcher(model, params, source, jnp.array(limits), 3, 6, request.param),
        scorer(model, params, 6, 3),
        source,
        limits,
        request.param,
    )


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_narrow_beam_equals_a_plain_one(narrow, alpha):
    """Pruning, freezing and stopping, where the beam is too narrow to be exhaustive."""
    search, score, source, limits, eos = narrow
    texts, scores = search(alpha)
    for row, limit in enumerate(limits):
        expected = plain_beam(score, source[row : row + 1], limit, alpha, 3, eos)
        for (wanted, text), found, found_score in zip(
            expected, np.asarray(texts[row]), scores[row], strict=False
        ):
            assert float(found_score) == pytest.approx(wanted, abs=1e-4)
            assert tuple(t for t in found.tolist() if t) == text[1:]


def test_a_beam_of_one_is_greedy_and_rows_do_not_depend_on_each_other():
    model, params = make(small("encoder_decoder"))
    source, prompt, limits = tokens(0, 3, 6), jnp.ones((3, 1), jnp.int32), jnp.array([7, 4, 7])
    given = {"max_new": 8, **ENDING}

    def search(k):
        return jax.jit(lambda prompt, limits, source: beam_search(
            model, params["params"], prompt, limits, beam_size=k, alpha=0.6, source_BxS=source, **given
        ))  # fmt: skip

    keys = jax.random.split(jax.random.key(0), 3)
    greedy = jax.jit(
        lambda s: sample(model, params["params"], prompt, limits, keys, source_BxS=s, **given)
    )(source)
    np.testing.assert_array_equal(search(1)(prompt, limits, source)[0][:, 0], greedy)
    wide = search(4)
    together = wide(prompt, limits, source)
    assert len({tuple(t) for t in np.asarray(together[0][:, 0]).tolist()}) > 1
    for row in range(3):
        alone = wide(*(x[row : row + 1] for x in (prompt, limits, source)))
        np.testing.assert_array_equal(alone[0][0, 0], together[0][row, 0])
        np.testing.assert_allclose(alone[1][0], together[1][row], rtol=1e-5)


def test_greedy_decoding_takes_the_likeliest_token_of_the_whole_model():
    model, params = make(small("decoder"))
    prompt, keys = tokens(3, 2, 3), jax.random.split(jax.random.key(0), 2)
    greedy = jax.jit(
        lambda x: sample(model, params["params"], x, jnp.array([6, 2]), keys, max_new=6, **ENDING)
    )
    out, read = np.asarray(greedy(prompt)), jax.jit(model.apply)
    assert (out[1, 2:] == 0).all()
    text = np.zeros((1, 9), np.int32)
    text[0, :3] = prompt[0]
    for k in range(6):
        assert int(read(params, text)[0, 2 + k].argmax()) == out[0, k]
        text[0, 3 + k] = out[0, k]
        if out[0, k] == EOS:
            break


def test_sampling_draws_from_the_distribution_and_each_row_by_its_own_key():
    model, params = make(small("decoder"), noise=0.1)
    rows = 4000
    prompt = jnp.broadcast_to(tokens(3, 1, 3), (rows, 3))
    keys = jax.random.split(jax.random.key(1), rows)
    draw = jax.jit(
        lambda p, k, n: sample(
            model, params["params"], p, n, k, max_new=1, temperature=0.7, **ENDING
        )
    )
    out = np.asarray(draw(prompt, keys, jnp.ones(rows, jnp.int32)))[:, 0]
    logits = model.apply(params, prompt[:1])[0, -1].at[0].set(-jnp.inf)  # pad is never written
    expected = np.asarray(jax.nn.softmax(logits / 0.7))
    seen = np.bincount(out, minlength=37) / rows
    assert np.abs(seen - expected).max() < 4 * np.sqrt(expected.max() / rows)
    np.testing.assert_array_equal(
        np.asarray(draw(prompt[:10], keys[:10], jnp.ones(10, jnp.int32)))[:, 0], out[:10]
    )


def test_top_k_and_top_p_keep_what_they_say():
    logits = jnp.log(jnp.array([[0.5, 0.05, 0.3, 0.15]]))
    kept = lambda *options: np.isfinite(np.asarray(truncate(logits, *options))[0]).tolist()
    assert kept(0, 1.0) == [True] * 4
    assert kept(2, 1.0) == [True, False, True, False]
    assert kept(0, 0.79) == [True, False, True, False]
    assert kept(0, 0.81) == [True, False, True, True]
    assert kept(0, 0.01) == [True, False, False, False]
