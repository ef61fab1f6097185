"""Inputs that do not fit a model raise errors of one line."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make, small, tokens

import transformer
from transformer import UserError, beam_search, build_model, sample
from transformer.decoding.config import DecodingConfig
from transformer.decoding.generate import Generator
from transformer.decoding.prefill import prefill

ONES = np.ones((2, 5), np.int32)
FAULTS = {
    "rank 1": (
        (ONES[0],), {},
        r"tokens: expected integers of shape \[B, T\], got int32\[5\]; "
        r"add the batch axis, tokens\[None\]",
    ),
    "rank 3": ((ONES[None],), {}, r"got int32\[1, 2, 5\]"),
    "float": (
        (ONES * 1.0,), {}, r"tokens: expected integers of shape \[B, T\], got float64",
    ),
    "no tokens": ((ONES[:, :0],), {}, r"tokens: an array of shape \[2, 0\] has no tokens"),
    "no sequences": ((ONES[:0],), {}, r"tokens: an array of shape \[0, 5\] has no tokens"),
    "list": (([[1, 2]],), {}, "tokens: expected an integer array, got a list"),
    "long": (
        (np.ones((1, 25), int),), {},
        r"a sequence of 25 tokens is longer than model\.max_length = 24",
    ),
    "mask's shape": (
        (ONES,), {"padding_mask": ONES[:, :4] > 0},
        r"padding_mask: shape \[2, 4\] differs from the tokens' shape \[2, 5\]",
    ),
    "mask's rank": ((ONES,), {"padding_mask": ONES[0] > 0}, r"padding_mask: shape \[5\]"),
    "mask's type": (
        (ONES,), {"padding_mask": ONES * 0.5},
        "padding_mask: expected an array of bool, got float64",
    ),
    "segments' type": (
        (ONES,), {"segment_ids": ONES > 0}, "segment_ids: expected an integer array, got bool",
    ),
    "both masks": (
        (ONES,), {"padding_mask": ONES > 0, "segment_ids": ONES},
        "padding_mask: passed together with segment_ids; pass one",
    ),
    "positions' shape": ((ONES,), {"positions": ONES[:1, :3]}, r"positions: shape \[1, 3\]"),
    "prefix": ((ONES,), {"prefix_mask": ONES > 0}, r"prefix_mask: .*; set model\.prefix_lm=True"),
    "types": ((ONES,), {"token_types": ONES}, r"token_types: passed, but model\.token_types = 0"),
}  # fmt: skip
"""Shapes and types that do not fit: (tokens, keyword arguments, message)."""

VALUES = {
    "beyond": (
        (ONES + 36,), {}, r"tokens: 37 must be between 0 and 36 \(model\.vocab_size = 37\)",
    ),
    "negative": ((ONES - 2,), {}, "tokens: -1 must be between 0 and 36"),
    "mask": ((ONES,), {"padding_mask": 2 * ONES}, "padding_mask: 2 must be between 0 and 1"),
    "segments": ((ONES,), {"segment_ids": -ONES}, "segment_ids: -1 must be at least 0"),
    "positions": (
        (ONES,), {"positions": 24 * ONES},
        r"positions: 24 must be between 0 and 23 \(model\.max_length = 24\)",
    ),
}  # fmt: skip
"""Values that do not fit: (tokens, keyword arguments, message)."""


@pytest.mark.parametrize("fault", [*FAULTS, *VALUES])
def test_invalid_inputs_raise_in_one_line(fault):
    """Shapes and types are also checked under jit, where values are unknown."""
    inputs, kwargs, message = (FAULTS | VALUES)[fault]
    model, params = make(small("decoder", position="learned"))
    with pytest.raises(UserError, match=message) as error:
        model.apply(params, *inputs, **kwargs)
    assert "\n" not in str(error.value)
    trace = lambda: jax.eval_shape(
        lambda p, x, kwargs: model.apply(p, x, **kwargs), params, inputs[0], kwargs
    )
    if fault in VALUES:
        trace()
    elif fault != "list":
        with pytest.raises(UserError, match=message.replace("float64", "float32")):
            trace()


def test_invalid_parameters_options_and_collections_raise():
    model, params = make(small("decoder"))
    x = tokens(0, 2, 4)
    for argument, options, message in (
        (params["decoder"], {}, "params: there is no 'embedding'; pass what `init` returned"),
        (params, {"train": True}, "apply: no option 'train'; .*deterministic"),
        (params, {"paddingmask": x}, "apply: no option 'paddingmask'; .*'padding_mask'"),
        (params, {"mutable": ["map"]}, "mutable: .* 'map'; did you mean 'maps'?"),
        (params, {"mutable": "attention"}, "mutable: .* 'attention'; .*sizes, streams"),
    ):
        with pytest.raises(UserError, match=message):
            model.apply(argument, x, **options)
    with pytest.raises(UserError, match="init_with_output: not supported; call init"):
        model.init_with_output(jax.random.key(0), x)


def test_sampling_needs_a_key_for_each_sequence():
    model, params = make(small("decoder"))
    x, limits, key = tokens(0, 2, 4), jnp.full(2, 3), jax.random.key(0)
    options = {"max_new": 3, "eos_id": 1, "temperature": 1.0}
    for keys in (key, jax.random.split(key, 3), jax.random.PRNGKey(0)):
        with pytest.raises(UserError, match=r"keys: expected \[2\] keys; use jax.random.split"):
            sample(model, params, x, limits, keys, **options)
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    assert sample(model, params, x, limits, keys, **options).shape == (2, 3)


def test_invalid_encoder_decoder_inputs_raise_and_name_the_side():
    model, params = make(small("encoder_decoder"))
    x = jnp.asarray(ONES)
    for inputs, kwargs, message in (
        ((x[0], x), {}, r"source: expected integers of shape \[B, T\], got int32\[5\]"),
        ((x, x + 36), {}, "target: 37 must be between 0 and 36"),
        ((x, x), {"source_padding_mask": x[:, 1:]}, "padding_mask of the source: shape"),
        (
            (x, x),
            {"segment_ids": x + 1},
            "segment_ids: 2 documents in a sequence, but no source_segment_ids",
        ),
    ):
        with pytest.raises(UserError, match=message):
            model.apply(params, *inputs, **kwargs)
    with_types = build_model(small("encoder", token_types=2))
    with pytest.raises(
        UserError, match=r"token_types: 2 must be between 0 and 1 \(model\.token_types = 2\)"
    ):
        with_types.init(jax.random.key(0), x, token_types=x + 1)


def test_invalid_prompts_and_caches_raise():
    model, params = make(small("decoder", scan_layers=False))
    x = tokens(0, 2, 4)
    with pytest.raises(
        UserError, match="prompt_mask: padding after a real token; pad prompts on the left"
    ):
        prefill(model, params, x, 8, None, x[:, ::-1] != x[:, :1])
    with pytest.raises(UserError, match=r"slots: 3 are fewer than the 4 tokens of the prompt"):
        prefill(model, params, x, 3)


def test_decoding_broadcasts_masks_and_positions():
    """An option of shape [1, T] holds for every sequence of the cache."""
    model, params = make(small("decoder", position="rotary"))
    x, mask, positions = tokens(0, 2, 4), jnp.array([[0, 1, 1, 1]]) > 0, jnp.array([[0, 0, 1, 2]])
    caches = [
        model.apply(
            params,
            x,
            model.empty_cache(2, 5),
            method="decode",
            padding_mask=jnp.tile(mask, (rows, 1)),
            positions=jnp.tile(positions, (rows, 1)),
        )[1]
        for rows in (1, 2)
    ]
    assert caches[1].tokens.segments_BxT[1, :4].tolist() == [0, 1, 1, 1]
    jax.tree.map(np.testing.assert_array_equal, caches[0].tokens, caches[1].tokens)


def test_models_that_cannot_generate_raise():
    x, limits, keys = tokens(0, 2, 4), jnp.full(2, 3), jax.random.split(jax.random.key(0), 2)
    for family, source, message in (
        ("encoder", None, "model.family: 'encoder' does not generate text; use another family"),
        ("decoder", x, "source: passed; leave it out, because model.family = 'decoder'"),
        ("encoder_decoder", None, "source: missing; pass one, because model.family = 'encoder_d"),
    ):
        model, params = make(small(family))
        options = {"max_new": 3, "source_BxS": source}  # no eos: the family is checked first
        for generate, *arguments in (
            (sample, limits, keys),
            (functools.partial(beam_search, beam_size=2, alpha=0.6), limits),
        ):
            with pytest.raises(UserError, match=message):
                generate(model, params, x, *arguments, **options)
        with pytest.raises(UserError, match=message):
            prefill(model, params, x, 8, source)


NAN = float("nan")
NUMBERS = {
    "temperature": {-1.0: "-1.0 is too small; at least 0", NAN: "nan is too small",
                    1e-30: "at least 1e-6", 1e9: "1,000,000,000.0 is too large; at most 100"},
    "top_k": {-1: "-1 is too small; at least 0", 0.5: "expected int, got 0.5"},
    "top_p": {x: rf"{x} must be more than 0" for x in (-1.0, 0.0, NAN)} | {2.0: "at most 1"},
    "beam_size": {0: "0 is too small; at least 1", -1: "-1 is too small", 1.5: "expected int"},
    "length_penalty": {NAN: "nan is too small; at least 0", -1.0: "-1.0 is too small",
                       1e9: "at most 100: above it, all beams score about 0"},
}  # fmt: skip
"""Numbers of decoding that are refused: field -> value -> message."""


@pytest.mark.parametrize("field", [*NUMBERS, "max_new"])
def test_invalid_numbers_of_decoding_raise(field):
    """The functions refuse the same numbers as the config."""
    model, params = make(small("decoder"))
    x, limits, keys = tokens(0, 2, 4), jnp.full(2, 3), jax.random.split(jax.random.key(0), 2)
    name = "alpha" if field == "length_penalty" else field
    for value, message in NUMBERS.get(field, {0: "0 is too small; at least 1"}).items():
        call = functools.partial(sample, model, params, x, limits, keys)
        if name in ("beam_size", "alpha"):
            call = functools.partial(beam_search, model, params, x, limits, beam_size=2, alpha=0.6)
        with pytest.raises(UserError, match=f"^{name}: .*{message}"):
            call(**{"max_new": 3, "eos_id": 1, name: value})
        if field != "max_new":
            with pytest.raises(UserError, match=rf"^decoding\.{field}: .*{message}"):
                DecodingConfig(**{field: value})


def test_arrays_that_do_not_fit_decoding_raise():
    model, params = make(small("decoder"))
    both, both_params = make(small("encoder_decoder"))
    x, limits, keys = tokens(0, 2, 4), jnp.full(2, 3), jax.random.split(jax.random.key(0), 2)

    def draw(prompt=x, limits=limits, keys=keys, **options):
        options = {"max_new": 3, "eos_id": 1, "temperature": 1.0} | options
        return sample(model, params, prompt, limits, keys, **options)

    def search(prompt=x, limits=limits, **options):
        options = {"beam_size": 2, "alpha": 0.6, "max_new": 3, "eos_id": 1} | options
        return beam_search(both, both_params, prompt, limits, **options)

    decode = lambda tokens: model.apply(params, tokens, model.empty_cache(2, 8), method="decode")
    source = both.apply(both_params, x, method="encode")
    decode_both = lambda target: both.apply(
        both_params, target, both.empty_cache(2, 8), *source, method="decode"
    )
    rank = r"expected integers of shape \[B, T\], got int32\[4\]"
    for call, message in (
        (lambda: draw(x[0]), f"prompt: {rank}; add the batch axis"),
        (lambda: search(x, source_BxS=x[0]), f"source: {rank}"),
        (lambda: search(x, source_BxS=[[1]]), "source: expected an integer array, got a list"),
        (lambda: prefill(model, params, x[0], 8), f"prompt: {rank}"),
        (lambda: decode(x[0]), f"tokens: {rank}"),
        (lambda: decode_both(x[0]), f"target: {rank}"),
        (
            lambda: draw(prompt_mask_BxP=[[True] * 4] * 2),
            "prompt_mask: expected an array of bool, got list",
        ),
        (
            lambda: draw(prompt_mask_BxP=x[:, :3] > 0),
            r"prompt_mask: shape \[2, 3\] differs from the tokens' shape \[2, 4\]",
        ),
        (
            lambda: draw(limits=limits[:1]),
            r"limits_B: shape \[1\], but there are 2 prompts; pass an array with one value for ea",
        ),
        (lambda: search(limits=[3, 3], source_BxS=x), "limits_B: list, but there are 2 prompts"),
        (lambda: draw(keys=keys[0]), r"keys: expected \[2\] keys"),
        (
            lambda: draw(suppress_tokens=range(37)),
            "suppress_tokens: the whole vocabulary; leave one token out",
        ),
    ):
        with pytest.raises(UserError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_inputs_that_are_not_text_raise():
    for texts, message in (
        (None, "texts: expected a list of strings, got NoneType"),
        ("one", "texts: expected a list of strings, got str"),
        ([b"x"], r"texts\[0\]: b'x' is not text; pass strings"),
        (["x", 3], r"texts\[1\]: 3 is not text"),
        (["x\ud800"], r"texts\[0\]: '\\ud800' is not in UTF-8; remove it"),
    ):
        with pytest.raises(UserError, match=message):
            transformer.generate("runs/none", texts)
        with pytest.raises(UserError, match=message):
            Generator.__call__(None, texts)


@pytest.mark.parametrize("position", ["learned", "xpos"])
def test_cache_longer_than_the_positions_raises(position):
    """Past its last position, a table would repeat its last row, and xPos has no factor."""
    model, params = make(small("decoder", position=position))
    x = tokens(0, 1, 4)
    assert prefill(model, params, x, 24)[0].shape == (1, 37)
    too_long = r"take 25 positions, but the positions .* end at 23"
    with pytest.raises(UserError, match=too_long):
        prefill(model, params, x, 25)
    answer = lambda max_new: jax.eval_shape(
        lambda: sample(model, params, x, jnp.full(1, max_new), None, max_new=max_new, eos_id=1)
    )
    assert answer(21).shape == (1, 21)  # no token follows the last one, so it has no position
    with pytest.raises(UserError, match=too_long):
        answer(22)
    model, params = make(small("decoder", position="rotary"))
    assert prefill(model, params, x, 25)[0].shape == (1, 37)


@pytest.mark.parametrize(("sources", "targets"), [(4, 2), (4, 8), (4, 1), (4, 3)])
def test_each_target_has_a_source(sources, targets):
    model, params = make(small("encoder_decoder"))
    with pytest.raises(UserError, match=f"source: {sources} sequences, but the target has"):
        model.apply(params, tokens(0, sources, 5), tokens(1, targets, 6))
    one = model.apply(params, tokens(0, 1, 5), tokens(1, 3, 6))
    np.testing.assert_allclose(
        one, model.apply(params, jnp.tile(tokens(0, 1, 5), (3, 1)), tokens(1, 3, 6)), atol=1e-5
    )


def test_cache_accepts_one_source():
    model, params = make(small("encoder_decoder"))
    encode = lambda seed: model.apply(params, tokens(seed, 2, 5), method="encode")
    _, wider = model.apply(params, tokens(0, 4, 5), method="encode")
    cache = model.empty_cache(2, 8)
    _, cache = model.apply(params, tokens(1, 2, 3), cache, *encode(0), method="decode")
    with pytest.raises(UserError, match="the cache already has a source"):
        model.apply(params, tokens(2, 2, 1), cache, *encode(3), method="decode")
    with pytest.raises(UserError, match="source: 4 sequences, but the target has 2"):
        model.apply(params, tokens(2, 2, 1), cache, None, wider, method="decode")
