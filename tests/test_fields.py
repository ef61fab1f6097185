"""Every config field has an effect: another value changes a program or a number, or is rejected.

The tests iterate over all existing fields and options. A field that no table lists fails a test,
which reports its name. Programs are only traced, not compiled.
"""

import dataclasses
import itertools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import combinations

from transformer import ModelConfig, UserError, build_model
from transformer.convert.special_tokens import write
from transformer.decoding.sampling import sample
from transformer.model.feed_forwards.base import FEED_FORWARDS
from transformer.model.mixers.base import MIXERS
from transformer.model.placements.base import PLACEMENTS, Placement
from transformer.model.positions import SCHEMES
from transformer.model.positions.rotary_scaling import SCALINGS

DECODER = {
    "family": "decoder", "vocab_size": 11, "d_model": 8, "d_ff": 12, "num_heads": 2,
    "num_decoder_layers": 1, "max_length": 8, "position": "rotary", "scan_layers": False,
}  # fmt: skip
ENCODER = {k: v for k, v in DECODER.items() if "decoder" not in k} | {
    "family": "encoder",
    "num_encoder_layers": 1,
}
BOTH = DECODER | {"family": "encoder_decoder", "num_encoder_layers": 1}
SCANNED = DECODER | {"num_decoder_layers": 2, "scan_layers": True}
RECURRENT = {
    "family": "encoder_decoder", "vocab_size": 11, "d_model": 8, "num_encoder_layers": 2,
    "num_decoder_layers": 2, "max_length": 8, "mixer": {"name": "lstm", "source": "attention"},
    "feed_forward": "none", "position": "none", "norm_placement": "none",
}  # fmt: skip
LABELS = DECODER | {"num_labels": 2}

MODEL = {
    "family": ("encoder", SCANNED | {"num_decoder_layers": 6}), "vocab_size": 13, "d_model": 16,
    "d_ff": 16, "num_heads": 1, "num_kv_heads": 1, "d_head": 2, "d_value": 3,
    "num_encoder_layers": (3, BOTH), "num_decoder_layers": 3,
    "max_length": (9, DECODER | {"position": "learned"}), "d_embedding": 6, "mixer": "mla",
    "encoder": ({"d_ff": 20}, BOTH),
    "token_types": (2, ENCODER), "position": "alibi", "random_positions": 20,
    "cross_position": ("alibi", BOTH),
    "layer_pattern": ({"window": 2},), "norm_placement": "post", "norm": "rmsnorm",
    "norm_gain": False, "norm_offset": False, "norm_zero_centered": True, "norm_epsilon": 1e-3,
    "embedding_norm": True, "first_norm": False, "parallel": True, "feed_forward": "experts",
    "activation": "gelu", "glu": True, "glu_limit": (1.0, DECODER | {"glu": True}),
    "use_bias": False, "attention_bias": False,
    "qkv_bias": False, "qk_norm": True, "v_norm": True,
    "qk_norm_joint": (True, DECODER | {"qk_norm": True}),
    "attention_scale": 0.3, "attention_layer_scale": (True, DECODER | {"num_decoder_layers": 2}),
    "attention_soft_cap": 5.0, "attention_sink": True, "causal": False,
    "attention_score": "bilinear", "attention_mask_value": -1e5,
    "attention_gate": "headwise", "attention_out": False,
    "value_residual": "fixed", "canon": "AC",
    "prefix_lm": (True, DECODER | {"position": "t5"}),
    "window": 2, "attention_backend": "blockwise", "tie_embeddings": False,
    "share_embeddings": (False, BOTH), "logit_bias": True, "logit_scale": 0.5,
    "logit_soft_cap": 5.0, "head_transform": True, "lm_head": (False, LABELS),
    "pooling": ("mean", LABELS), "pooler": (True, LABELS), "num_labels": 3,
    "pooler_activation": ("gelu", LABELS | {"pooler": True}),
    "label_bias": (False, LABELS), "embedding_scale": True,
    "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1, "initializer": "normal",
    "init_std": (0.5, DECODER | {"initializer": "normal"}), "embedding_init_std": 0.5,
    "residual_init_scale": True, "scan_layers": True, "pipeline_rounds": (2, SCANNED),
    "parametrization": {"name": "mup", "base": {"d_model": 4}},
    "remat": "full", "dtype": "bfloat16", "param_dtype": "bfloat16",
}  # fmt: skip
"""Another value of each field, or (value, model) if the field has no effect on DECODER."""


def program_text(function, *shapes) -> str:
    """Returns the traced program as text, including its constants."""
    program = jax.make_jaxpr(function)(*shapes)
    text = re.sub(r" at 0x[0-9a-f]+", "", str(program))
    return text + str([np.asarray(x).tobytes() for x in program.consts if hasattr(x, "dtype")])


def model_program(tree: dict) -> str:
    """Returns the program that initializes a model and runs a training forward pass."""
    config = ModelConfig(**tree)
    model, ids = (
        build_model(config),
        (jnp.ones((1, 4), jnp.int32),) * (1 + config.is_encoder_decoder),
    )

    def program(key):
        params = model.init(key, *ids)
        return params, model.apply(params, *ids, deterministic=False, rngs={"dropout": key})

    return program_text(program, jax.random.key(0))


def fields_without_effect(table: dict, observe, base: dict) -> list[str]:
    """Returns the fields of `table` whose other value does not change the result of `observe`.

    An entry is a value, or (value, fields) to test the value with `fields` instead of `base`.
    """
    cache, unused = {}, []
    cached = lambda tree: cache.get(repr(tree)) or cache.setdefault(repr(tree), observe(tree))
    for field, entry in table.items():
        value, fields = (
            entry
            if isinstance(entry, tuple) and isinstance(entry[-1], dict) and len(entry) == 2
            else (entry, base)
        )
        if cached(fields | {field: value}) == cached(fields):
            unused.append(field)
    return unused


def test_every_model_field_has_an_effect():
    assert model_program(DECODER) == model_program(DECODER)
    assert not fields_without_effect(MODEL, model_program, DECODER)


@pytest.mark.parametrize("base", [RECURRENT], ids=["recurrent"])
def test_every_model_field_changes_a_family_or_raises(base):
    baseline, unused, refused = model_program(base), [], 0
    resolved = ModelConfig(**base).resolved
    for field, entry in MODEL.items():
        value = (
            entry[0]
            if isinstance(entry, tuple) and isinstance(entry[-1], dict) and len(entry) == 2
            else entry
        )
        if value in (resolved.get(field), ModelConfig.__dataclass_fields__[field].default):
            continue  # already the value of this family, or the default
        try:
            changed = model_program({**base, field: value})
        except UserError as error:
            refused += str(error).startswith("model.")
            continue
        unused += [field] if changed == baseline and field != "max_length" else []
    assert not unused and 20 < refused < len(MODEL)


WALKED = {f: values for f, values in combinations.OPTIONS.items() if f != "attention_backend"} | {
    "num_heads": (2, 8),
    "d_ff": (40,),
    "d_model": (32,),
    "attention_bias": (True, False),
    "norm_epsilon": (1e-3,),
    "init_std": (0.5,),
    "embedding_init_std": (0.5,),
    "causal": (False,),
    "lm_head": (False,),
    "pooling": ("mean",),
    "pooler": (True,),
    "pooler_activation": ("gelu",),
    "num_labels": (3,),
    "token_types": (2,),
    "num_encoder_layers": (1, 3),
    "num_decoder_layers": (1, 3),
}
"""Field -> values for changes of random models. An automatic backend may be any of them."""


def walked_program(config: ModelConfig) -> str:
    """Returns the program of a model on sequences that are longer than its windows."""
    model, ids = build_model(config), [jnp.ones((1, 7), jnp.int32)] * len(config.sides)
    options = {"prefix_mask": jnp.arange(7)[None] < 2} if config.prefix_lm else {}

    def program(key):
        params, options["rngs"] = model.init(key, *ids), {"dropout": key}
        return params, model.apply(params, *ids, deterministic=False, **options)

    return program_text(program, jax.random.key(0))


def spelled(config: ModelConfig, field: str):
    """Returns the value to which a field's None resolves: spelling it out changes nothing."""
    has_bias = {"attention_bias": config.use_bias, "qkv_bias": config.attention_has_bias}
    return has_bias.get(field) if getattr(config, field) is None else None


@pytest.mark.parametrize("seed", range(2))
def test_one_change_of_a_random_model_changes_its_program_or_raises(seed):
    rng, unused, changed, refused = random.Random(seed), [], 0, 0
    for case in itertools.islice(combinations.cases(seed), 4):
        base = ModelConfig(**case.tree["model"])
        program = walked_program(base)
        for field in rng.sample(sorted(WALKED), 5):
            value = rng.choice(WALKED[field])
            if value in (getattr(base, field), spelled(base, field)):
                continue
            try:
                other = walked_program(ModelConfig(**case.tree["model"] | {field: value}))
            except UserError:
                refused += 1
                continue
            changed += other != program
            unused += [f"{field} = {value!r} of {case}"] if other == program else []
    assert not unused and changed > 5 and refused


SPECIAL_TOKENS = {"pad_id": 3, "bos_id": 4, "eos_id": 5, "decoder_start_id": 6}
"""Special tokens affect generation or export, but not the forward pass."""


def test_every_special_token_has_an_effect():
    base = {**BOTH, "pad_id": 0, "eos_id": 2, "decoder_start_id": 1}
    model = build_model(ModelConfig(**base))
    source, limits_B = jnp.ones((1, 4), jnp.int32), jnp.ones((1,), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), source, source)

    def generated(tree):
        model = build_model(ModelConfig(**tree))
        generate = lambda params: sample(
            model,
            params,
            None,
            limits_B,
            jax.random.split(jax.random.key(0), 1),
            max_new=2,
            source_BxS=source,
        )
        return program_text(generate, params)

    assert fields_without_effect(SPECIAL_TOKENS, generated, base) == ["bos_id"]
    assert not fields_without_effect(
        SPECIAL_TOKENS, lambda tree: str(write(ModelConfig(**tree), {})), base
    )


def other_value(value):
    """Returns another value of the same type."""
    if isinstance(value, bool):
        return not value
    return value * 2 or 2 if isinstance(value, int) else value / 2 or 0.5


def position_program(spec) -> str:
    return model_program(DECODER | {"num_heads": 1, "d_head": 64, "position": spec})


def test_every_position_scheme_option_has_an_effect():
    unused, alternatives = (
        [],
        {
            "layout": {"halves": "interleaved", "interleaved": "halves"},
            "scaling": {"none": {"name": "linear", "factor": 2.0}},
            "first_index": {0: 1},
            "slopes": {"geometric": "learned"},
            "start": {"zero": "uniform"},
        },
    )
    for name, cls in SCHEMES.items():
        options = {f.name: f.default for f in dataclasses.fields(cls) if f.metadata.get("option")}
        baseline = position_program(name) if options else ""
        for option, default in options.items():
            value = alternatives.get(option, {}).get(default, None) or other_value(default)
            unused += (
                [f"{name}.{option}"]
                if position_program({"name": name, option: value}) == baseline
                else []
            )
    for name, cls in SCALINGS.items():
        options = {f.name: f.default for f in dataclasses.fields(cls)}
        factors = {"short_factors": (2.0,) * 32, "long_factors": (3.0,) * 32}
        base = {"name": name, "factor": 2.0, "original_length": 4096} | factors
        base = {key: value for key, value in base.items() if key in ("name", *options)}
        baseline = position_program({"name": "rotary", "scaling": base})
        for option, default in options.items():
            new = {"factor": 4.0} | {option: (4.0, *xs[1:]) for option, xs in factors.items()}
            value = new.get(option) or other_value(base.get(option, default))
            changed = position_program({"name": "rotary", "scaling": base | {option: value}})
            unused += [f"{name}.{option}"] if changed == baseline else []
    assert not unused


def test_every_norm_placement_part_has_an_effect():
    assert "pre" in PLACEMENTS
    parts = {f.name: f.default for f in dataclasses.fields(Placement) if f.name != "warmup_hint"}
    pre = {"in_norm": True, "final_norm": True}
    small, unused = DECODER | {"num_decoder_layers": 1}, []
    baseline = model_program(small)
    for part, default in parts.items():
        placement = {"name": "pre", part: other_value(pre.get(part, default))}
        unused += [part] if model_program(small | {"norm_placement": placement}) == baseline else []
    assert not unused


def test_every_mixer_option_has_an_effect():
    small = DECODER | {"num_decoder_layers": 1, "d_head": 8, "position": "none"}
    unused = []
    for name, cls in MIXERS.items():
        options = {f.name: f.default for f in dataclasses.fields(cls)}
        baseline = (
            model_program(small | {"mixer": name}) if options and "source" not in options else ""
        )
        for option, default in options.items():
            values = {"chunk": 1, "source": "attention"}  # a chunk shorter than the sequence
            base = small
            if option == "source":  # needs a decoder with cross-attention
                base = RECURRENT
                baseline = model_program(base | {"mixer": name})
            mixer = {"name": name, option: values.get(option) or other_value(default)}
            unused += (
                [f"{name}.{option}"] if model_program(base | {"mixer": mixer}) == baseline else []
            )
    assert {"mla", "gated_delta"} <= set(MIXERS) and not unused


def test_every_feed_forward_option_has_an_effect():
    def program(spec):
        config = ModelConfig(**DECODER | {"num_decoder_layers": 1, "feed_forward": spec})
        model, ids = build_model(config), jnp.ones((1, 4), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), ids)
        return str(params) + program_text(lambda p: model.apply(p, ids, mutable=["losses"]), params)

    for name, cls in FEED_FORWARDS.items():
        options = {f.name: f.default for f in dataclasses.fields(cls)}
        baseline = program(name) if options else ""
        values = {option: other_value(x) for option, x in options.items() if option != "score"}
        values |= {"score": "sigmoid"} if "score" in options else {}
        assert not [
            x for x, value in values.items() if program({"name": name, x: value}) == baseline
        ]
