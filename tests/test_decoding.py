"""Decoding compared with references.

Cached decoding equals teacher forcing, beam search equals brute force, and sampling follows the
distribution of the model.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make, masks, schemes, small, start_decoding, tokens
from jax.extend.core import jaxprs_in_params

from transformer import UserError
from transformer.decoding.beam import beam_search
from transformer.decoding.prefill import advance
from transformer.decoding.sampling import largest, sample, truncate
from transformer.model.network import build_model
from transformer.planning.hlo import HloProgram
from transformer.planning.work import hbm_bytes

EOS = 2
ENDING = {"eos_id": EOS, "pad_id": 0, "suppress_tokens": (0,)}


@pytest.mark.parametrize(("family", "position"), schemes("decoder", "encoder_decoder"))
def test_cached_decoding_equals_teacher_forcing(family, position):
    """Prefills left-padded prompts of unequal length, then decodes one token at a time."""
    scan = position not in ("rotary", "t5")
    model, params = make(small(family, position=position, scan_layers=scan))
    target, source = tokens(1, 2, 8), tokens(2, 2, 6)
    source = source.at[1, 4:].set(0)
    sources = (source,) if family == "encoder_decoder" else ()
    teacher_forced = jax.jit(model.apply)(params, *sources, target, **masks(*sources, target))
    lengths = (3, 1)
    prompt = jnp.stack([jnp.pad(target[i, :n], (3 - n, 0)) for i, n in enumerate(lengths)])
    assert bool((prompt == 0).any())
    logits, memory = start_decoding(model, params, prompt, 10, *sources)
    step = jax.jit(lambda t, m: advance(model, params, t, m))
    for k in range(6):
        expected = jnp.stack(
            [teacher_forced[i, n - 1 + k] for i, n in enumerate(lengths) if n - 1 + k < 8]
        )
        np.testing.assert_allclose(logits[: len(expected)], expected, atol=3e-5)
        logits, memory = step(
            jnp.stack([target[i, min(n + k, 7)] for i, n in enumerate(lengths)]), memory
        )


def scorer(model, params, length: int, rows: int):
    """Returns a function (source, texts) -> log p of the next tokens, float[len(texts), length, V].

    It compiles once, for at most `rows` texts of at most `length` tokens.
    """

    @jax.jit
    def log_softmax(source, ids, mask):
        source = jnp.broadcast_to(source, (rows, source.shape[1]))
        return jax.nn.log_softmax(model.apply(params, source, ids, segment_ids=mask))

    def score(source, texts):
        ids, mask = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        return np.asarray(log_softmax(source, ids, mask))[: len(texts)]

    return score


def searcher(model, params, source, limits, beam_size: int, max_new: int, eos=EOS):
    """Returns a function alpha -> (texts, scores), which compiles once for all alphas."""
    start = jnp.ones((len(source), 1), jnp.int32)
    return jax.jit(
        lambda alpha: beam_search(
            model,
            params,
            start,
            limits,
            beam_size=beam_size,
            alpha=alpha,
            max_new=max_new,
            source_BxS=source,
            **ENDING | {"eos_id": eos},
        )
    )


@pytest.fixture(scope="module", params=[0, 1])
def exhaustive_search(request):
    """(search with an exhaustive beam, log p of each ended text, by row)."""
    seed, limits = request.param, (4, 3)
    model, params = make(
        small("encoder_decoder", vocab_size=5, scan_layers=bool(seed)), seed=seed, noise=0.6
    )
    source, logp_of_texts = tokens(seed, 2, 4, vocab=5), []
    inner_tokens = [t for t in range(1, 5) if t != EOS]
    score = scorer(model, params, max(limits), len(inner_tokens) ** (max(limits) - 1))
    for row, limit in enumerate(limits):
        logp_of_texts.append({})
        for length in range(1, limit + 1):
            texts = [(*body, EOS) for body in itertools.product(inner_tokens, repeat=length - 1)]
            logp = score(source[row : row + 1], [(1, *text[:-1]) for text in texts])
            for i, text in enumerate(texts):
                logp_of_texts[row][text] = sum(logp[i, t, token] for t, token in enumerate(text))
    return searcher(model, params, source, jnp.array(limits), 64, 5), logp_of_texts


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_beam_search_equals_brute_force(exhaustive_search, alpha):
    search, logp_of_texts = exhaustive_search
    texts, scores = search(alpha)
    for row, all_texts in enumerate(logp_of_texts):
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
    """Plain beam search for one sequence. Uses lists, and scores each prefix from scratch."""
    live, ended = [(0.0, (1,))], []
    for step in range(1, limit + 1):
        candidates = []
        for (logp, text), out in zip(live, score(source, [text for _, text in live]), strict=True):
            candidates += [
                (logp + float(out[step - 1, t]), (*text, t)) for t in range(1, out.shape[-1])
            ]
        candidates = sorted(candidates, reverse=True)[: (1 + len(eos)) * k]
        ended += [(s / ((5 + step) / 6) ** alpha, t) for s, t in candidates if t[-1] in eos]
        ended = sorted(ended, reverse=True)[:k]
        live = [(s, t) for s, t in candidates if t[-1] not in eos][:k]
        if len(ended) == k and live[0][0] / ((5 + limit) / 6) ** alpha <= ended[-1][0]:
            break
    return ended or [(s / ((5 + limit) / 6) ** alpha, t) for s, t in live]


@pytest.fixture(scope="module", params=[(EOS,), (EOS, 3, 5, 8)])
def narrow_search(request):
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
def test_narrow_beam_equals_plain_beam_search(narrow_search, alpha):
    """Tests pruning, freezing and stopping with a beam that is too narrow to be exhaustive."""
    search, score, source, limits, eos = narrow_search
    texts, scores = search(alpha)
    for row, limit in enumerate(limits):
        expected = plain_beam(score, source[row : row + 1], limit, alpha, 3, eos)
        for (expected_score, expected_text), text, text_score in zip(
            expected, np.asarray(texts[row]), scores[row], strict=False
        ):
            assert float(text_score) == pytest.approx(expected_score, abs=1e-4)
            assert tuple(t for t in text.tolist() if t) == expected_text[1:]


def test_beam_of_one_is_greedy_and_sequences_are_independent():
    model, params = make(small("encoder_decoder"))
    source, prompt, limits = tokens(0, 3, 6), jnp.ones((3, 1), jnp.int32), jnp.array([7, 4, 7])
    options = {"max_new": 8, **ENDING}

    def search(k):
        return jax.jit(
            lambda prompt, limits, source: beam_search(
                model,
                params,
                prompt,
                limits,
                beam_size=k,
                alpha=0.6,
                source_BxS=source,
                **options,
            )
        )

    keys = jax.random.split(jax.random.key(0), 3)
    greedy = jax.jit(
        lambda s: sample(model, params, prompt, limits, keys, source_BxS=s, **options)
    )(source)
    np.testing.assert_array_equal(search(1)(prompt, limits, source)[0][:, 0], greedy)
    wide = search(4)
    together = wide(prompt, limits, source)
    assert len({tuple(t) for t in np.asarray(together[0][:, 0]).tolist()}) > 1
    for row in range(3):
        alone = wide(*(x[row : row + 1] for x in (prompt, limits, source)))
        np.testing.assert_array_equal(alone[0][0, 0], together[0][row, 0])
        np.testing.assert_allclose(alone[1][0], together[1][row], rtol=1e-5)


@pytest.mark.parametrize("many", [6, 7])
def test_greedy_decoding_takes_the_argmax_of_the_full_forward_pass(many, monkeypatch):
    """From `many` new tokens, the cache grows on the way."""
    monkeypatch.setattr("transformer.decoding.prefill.MANY", many)
    model, params = make(small("decoder"))
    prompt, keys = tokens(3, 2, 3), jax.random.split(jax.random.key(0), 2)
    greedy = jax.jit(
        lambda x: sample(model, params, x, jnp.array([6, 2]), keys, max_new=6, **ENDING)
    )
    out, apply = np.asarray(greedy(prompt)), jax.jit(model.apply)
    program = jax.make_jaxpr(greedy)(prompt).jaxpr
    loops = [e for e in jax_equations(program) if e.primitive.name == "while"]
    assert len(loops) == 1 + (many <= 6) and (out[1, 2:] == 0).all()
    text = np.zeros((1, 9), np.int32)
    text[0, :3] = prompt[0]
    for k in range(6):
        assert int(apply(params, text)[0, 2 + k].argmax()) == out[0, k]
        text[0, 3 + k] = out[0, k]
        if out[0, k] == EOS:
            break


def test_scanned_layers_do_not_copy_the_cache_in_each_step():
    """Compares the bytes that a program moves, loops counted once, with unrolled layers."""
    moved, prompt, keys = {}, tokens(0, 8, 3), jax.random.split(jax.random.key(0), 8)
    for scan_layers in (False, True):
        config = small("decoder", scan_layers=scan_layers, max_length=128, num_decoder_layers=4)
        model, limits = build_model(config), jnp.full(8, 125)
        decode = functools.partial(sample, model, max_new=125, **ENDING)
        params = jax.eval_shape(model.init, keys[0], prompt)
        text = jax.jit(decode).lower(params, prompt, limits, keys).compile().as_text()
        program = HloProgram.read(text)
        moved[scan_layers] = hbm_bytes(program)
    cache = 2 * 4 * 8 * 128 * config.kv_heads * config.head_size * 4
    # The prefill stacks the states of its few tokens. Scanned steps would move 17 caches more.
    assert moved[True] < moved[False] + cache


def test_beam_search_does_not_move_keys_and_values():
    """The beams of a sentence append to the same slots. Only their tokens are reordered."""
    model, beams = build_model(small("decoder", num_decoder_layers=1)), 3
    prompt, limits = tokens(0, 2, 4), jnp.full(2, 9)
    search = functools.partial(beam_search, model, beam_size=beams, alpha=1.0, max_new=9, **ENDING)
    params = jax.eval_shape(model.init, jax.random.key(0), prompt)
    loops, program = [], jax.make_jaxpr(search)(params, prompt, limits).jaxpr
    for equation in jax_equations(program):
        if equation.primitive.name == "while":
            loops.append([e for e in jax_equations(equation.params["body_jaxpr"].jaxpr)])
    assert len(loops) == 1
    slots = 4 + beams * 9
    entries = 2 * model.config.kv_heads * slots * model.config.head_size
    written = [e for e in loops[0] if e.primitive.name == "dynamic_update_slice"]
    assert sorted(e.outvars[0].aval.size for e in written)[-2:] == [entries, entries]
    moved = [e.outvars[0].aval for e in loops[0] if e.primitive.name == "gather"]
    assert max(x.size for x in moved) == 2 * beams * slots, "segments or positions"


def jax_equations(program):
    """Yields the equations of a jaxpr, and of those inside it."""
    for equation in program.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from jax_equations(inner)


def test_sampling_follows_the_distribution_with_one_key_per_sequence():
    model, params = make(small("decoder"), noise=0.1)
    rows = 4000
    prompt = jnp.broadcast_to(tokens(3, 1, 3), (rows, 3))
    keys = jax.random.split(jax.random.key(1), rows)
    draw = jax.jit(
        lambda p, k, n: sample(model, params, p, n, k, max_new=1, temperature=0.7, **ENDING)
    )
    out = np.asarray(draw(prompt, keys, jnp.ones(rows, jnp.int32)))[:, 0]
    # Padding is never generated.
    logits = model.apply(params, prompt[:1])[0, -1].at[0].set(-jnp.inf)
    expected = np.asarray(jax.nn.softmax(logits / 0.7))
    frequencies = np.bincount(out, minlength=37) / rows
    assert np.abs(frequencies - expected).max() < 4 * np.sqrt(expected.max() / rows)
    np.testing.assert_array_equal(
        np.asarray(draw(prompt[:10], keys[:10], jnp.ones(10, jnp.int32)))[:, 0], out[:10]
    )


@pytest.mark.parametrize("length", [3, 512, 513, 767, 769, 1024, 1025, 5000])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_largest_numbers_are_those_of_top_k(length, k):
    """Also with equal numbers, whose first ones count, and where all but a few are -inf."""
    rng = np.random.default_rng(length)
    rows = rng.standard_normal((3, length)), rng.integers(0, 4, (3, length))
    few, increasing = np.full((1, length), -np.inf), np.arange(length)[None]
    few[0, [0, length - 1, length // 2, length // 2 + 1]] = 1.0, 1.0, 2.0, 1.0
    x = np.concatenate([*rows, few, increasing]).astype(np.float32)
    assert (length > k * 256) == (largest_sorts_fewer(x, k) < length)
    for ours, theirs in zip(largest(x, k), jax.lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def largest_sorts_fewer(x, k: int) -> int:
    """Returns the most numbers of a row that `largest` passes to `jax.lax.top_k`."""
    traced = jax.make_jaxpr(lambda x: largest(x, k))(x)
    sorts = [e for e in traced.jaxpr.eqns if e.primitive.name == "top_k"]
    return max(e.invars[0].aval.shape[-1] for e in sorts)


def test_low_temperature_selects_the_most_likely_token():
    """Quotients of logits and a small temperature would be infinite for several tokens."""
    model, params = make(small("decoder", logit_scale=1e4))
    x, limits, keys = tokens(0, 3, 4), jnp.full(3, 5), jax.random.split(jax.random.key(0), 3)
    draw = lambda temperature: jax.jit(
        lambda p: sample(model, p, x, limits, keys, max_new=5, temperature=temperature, **ENDING)
    )(params)
    cold, greedy = draw(1e-6), draw(0.0)
    np.testing.assert_array_equal(cold, greedy)
    with pytest.raises(UserError, match=r"temperature: 1e-38 is too small; at least 1e-6"):
        sample(model, params, x, limits, keys, max_new=5, temperature=1e-38, **ENDING)


def test_top_k_and_top_p_truncate_the_distribution():
    logits = jnp.log(jnp.array([[0.5, 0.05, 0.3, 0.15]]))
    is_kept = lambda *options: np.isfinite(np.asarray(truncate(logits, *options))[0]).tolist()
    assert is_kept(0, 1.0) == [True] * 4
    assert is_kept(2, 1.0) == [True, False, True, False]
    assert is_kept(0, 0.79) == [True, False, True, False]
    assert is_kept(0, 0.81) == [True, False, True, True]
    assert is_kept(0, 0.01) == [True, False, False, False]
