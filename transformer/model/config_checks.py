"""Validation of a ModelConfig: ranges of values, and combinations of fields."""

import dataclasses
import re

from flax.core import FrozenDict

from transformer import checks
from transformer.checks import Effect, one_of, plain
from transformer.errors import UserError, nearest
from transformer.model import positions
from transformer.model.attention_backends import BACKENDS
from transformer.model.feed_forwards.base import FEED_FORWARDS
from transformer.model.mixers.base import MIXERS, SHARED_FIELDS, Mixer
from transformer.model.modules import ACTIVATIONS, INITIALIZERS, NORMS, WITH_OFFSET

MAX_LAYERS = 10_000
"""The limit of layers in a stack. Each is checked. The deepest published Transformer has 1,000."""

MAX_UNROLLED_LAYERS = 1000
"""The most layers of a stack without model.scan_layers. JAX traces each of them by itself."""

ENCODER_FIELDS = (
    "d_model", "d_ff", "num_heads", "num_kv_heads", "d_head", "d_value", "layer_pattern",
)  # fmt: skip
"""The fields that `encoder` may set."""

PER_LAYER_FIELDS = ("mixer", "position", "window", "feed_forward", "norm_placement")
"""The fields that `layer_pattern` may set per layer."""


def check(config) -> None:
    """Raises UserError for an invalid ModelConfig. The message names the field and the remedy."""
    choices = {"norm": NORMS, "activation": ACTIVATIONS, "initializer": INITIALIZERS}
    for field, names in (choices | {"attention_backend": ("auto", *BACKENDS)}).items():
        one_of(f"model.{field}", getattr(config, field), names)
    _convert(config)
    _check_sizes(config)
    _check_combinations(config)
    _check_layers(config)
    _check_rounds(config)
    _check_positions(config)
    if config.encoder:
        _check_encoder(config)


def _convert(config) -> None:
    """Converts the values in `layer_pattern` and `encoder` to the types of the fields they set."""
    hints = checks.type_hints(type(config))

    def converted(entry, path: str, others: str, allowed: tuple[str, ...]) -> FrozenDict:
        if unknown := [name for name in entry if name not in allowed]:
            problem = f"{unknown[0]!r} cannot differ {others}"
            raise UserError(f"{path}: {problem}; {nearest(str(unknown[0]), allowed)}")
        return FrozenDict({k: checks.coerce(x, hints[k], f"{path}.{k}") for k, x in entry.items()})

    of = lambda pattern, *path: tuple(converted(entry, *path) for entry in pattern)
    decoder, layers = "from the decoder's", "between layers"
    pattern = of(config.layer_pattern, "model.layer_pattern", layers, PER_LAYER_FIELDS)
    own = dict(converted(config.encoder, "model.encoder", decoder, ENCODER_FIELDS))
    if windows := own.get("layer_pattern"):
        own["layer_pattern"] = of(windows, "model.encoder.layer_pattern", decoder, ("window",))
    config._set("layer_pattern", pattern)
    config._set("encoder", FrozenDict(own))


def _check_sizes(config) -> None:
    if mixer_reads("num_heads")(config) and not config.d_head and config.d_model % config.num_heads:
        problem = f"{config.d_model} is not divisible by model.num_heads = {config.num_heads}"
        raise UserError(f"model.d_model: {problem}; change one, or set model.d_head")
    if config.num_heads % config.kv_heads:
        problem = f"{config.num_kv_heads} does not divide model.num_heads = {config.num_heads}"
        raise UserError(f"model.num_kv_heads: {problem}; change one")
    for side in config.sides:
        layers = f"num_{side}_layers"
        if getattr(config, layers) < 1:
            least = f"a family with a{'n' * (side == 'encoder')} {side} needs at least 1"
            raise UserError(f"model.{layers}: {getattr(config, layers)} is too small; {least}")
        most = MAX_LAYERS if config.scan_layers else MAX_UNROLLED_LAYERS
        if getattr(config, layers) > most:
            more = "" if config.scan_layers else "; set model.scan_layers=True for more"
            limit = f"at most {most:,}{more}"
            raise UserError(f"model.{layers}: {getattr(config, layers):,} is too large; {limit}")


def _check_combinations(config) -> None:
    has_labels = config.num_labels or config.pooler
    needs_head = config.is_encoder_decoder or (config.family == "decoder" and not has_labels)
    if needs_head and not config.lm_head:
        way_out = "set it to True, or set model.num_labels in a decoder"
        raise UserError(f"model.lm_head: False leaves the model without outputs; {way_out}")
    if config.pooling == "span" and config.num_labels != 2:
        problem = f"{config.num_labels}, but model.pooling='span' scores two ends"
        raise UserError(f"model.num_labels: {problem}; set it to 2")
    _check_sources(config)
    if config.random_positions and config.random_positions < config.max_length:
        problem = f"{config.random_positions} is less than model.max_length = {config.max_length}"
        raise UserError(f"model.random_positions: {problem}; increase it, or set it to 0")


def _check_sources(config) -> None:
    """Checks the mixers' option `source`, which only affects a decoder with an encoder."""
    if not config.is_encoder_decoder:
        return
    if all(mixer.source == "none" for mixer in config.mixers_of("decoder")):
        problem = "'none' in all layers of the decoder leaves the encoder unused"
        way_out = "choose another value in one of them, or set model.family='decoder'"
        raise UserError(f"model.mixer.source: {problem}; {way_out}")
    for mixer in set(config.mixers_of("encoder")) - set(config.mixers_of("decoder")):
        source = {field.name: field for field in dataclasses.fields(mixer)}.get("source")
        if source and mixer.source != source.default:
            problem = f"source = {mixer.source!r} has no effect"
            why = f"no layer of the decoder has this mixer; leave it at {source.default!r}"
            raise UserError(f"model.layer_pattern: {problem}, because {why}")


def _check_encoder(config) -> None:
    """Checks the fields in which the encoder of an encoder_decoder differs from its decoder."""
    stack = config.stack("encoder").part(family="encoder")
    if "layer_pattern" in config.encoder and any({*x} - {"window"} for x in config.layer_pattern):
        problem = "it would replace model.layer_pattern, which sets more than windows"
        raise UserError(f"model.encoder.layer_pattern: {problem}; leave it out")
    if config.parametrization != "standard":
        problem = "the base model of a parametrization has one size; set 'standard'"
        raise UserError(f"model.encoder: {problem}, or leave it out")
    sources = {mixer.source for mixer in config.mixers_of("decoder")} - {"cross_attention", "none"}
    if stack.d_model != config.d_model and (config.share_embeddings or sources):
        problem = "needs model.share_embeddings=False, and cross-attention as the only source"
        raise UserError(f"model.encoder.d_model: {stack.d_model} {problem}")
    try:
        for part in (_check_sizes, _check_layers, _check_rounds):
            part(stack)
    except UserError as e:
        raise UserError(str(e).replace("model.", "model.encoder.", 1)) from None
    checks.refuse_without_effect("model.encoder", stack, EFFECTS, config.encoder)


def _check_layers(config) -> None:
    for side in config.sides:
        for layer in dict.fromkeys(config.layers(side)):
            _check_layer(layer, side)
        _check_streams(config, side)
    for entry in config.used_pattern:
        mixer = MIXERS.build(entry.get("mixer", config.mixer))
        if entry.get("window") and "window" not in mixer.fields:
            problem = f"window = {entry['window']} has no effect with mixer = {mixer.name!r}"
            raise UserError(f"model.layer_pattern: {problem}; leave it out")


def _check_positions(config) -> None:
    """Checks that each position scheme acts in some layer of the model."""
    layers = [layer for side in config.sides for layer in config.layers(side)]
    for spec in dict.fromkeys(layer.position for layer in layers):
        matches = [layer for layer in layers if layer.position == spec]
        if positions.build(spec).hooks and not any(layer.position_acts for layer in matches):
            problem = f"{plain(spec)!r} has no effect on mixer = {plain(matches[0].mixer)!r}"
            raise UserError(f"model.position: {problem}; set it to 'none'")


def _check_streams(config, side: str) -> None:
    """Checks that the layers of a stack can pass their residual streams on to each other."""
    layers = {layer: layer.placement(side) for layer in config.layers(side)}
    if len({placement.topology for placement in layers.values()}) > 1:
        names = " and ".join(dict.fromkeys(repr(plain(x.norm_placement)) for x in layers))
        problem = f"norm_placement = {names} carry different residual streams"
        raise UserError(f"model.layer_pattern: {problem}; use one of them in all layers")
    counts = {layer.residuals_of_layer(side) for layer in layers}
    if len(counts) > 1 and any(placement.is_special for placement in layers.values()):
        name = plain(config.norm_placement)
        problem = f"{name!r} needs the same number of sublayers in all layers of the {side}"
        raise UserError(f"model.norm_placement: {problem}; change model.layer_pattern")
    first = config.layers(side)[0]
    if config.value_residual and "value_residual" not in first.token_mixer.fields:
        problem = f"the first layer's mixer = {plain(first.mixer)!r} does not support it"
        raise UserError(f"model.value_residual: {problem}; change model.layer_pattern")


def _check_rounds(config) -> None:
    rounds = config.pipeline_rounds
    for side in config.sides if rounds > 1 else ():
        period = config.period(side)
        if (repeats := config.num_layers(side) // period) % rounds:
            layers = f"{side} layers" if period == 1 else f"periods of {period} {side} layers"
            problem = f"{rounds} does not divide the {repeats} {layers}"
            raise UserError(f"model.pipeline_rounds: {problem}; change one of them")


def _check_layer(config, side: str) -> None:
    """Checks the components of a layer, given the layer's config."""
    kind, canon = config.feed_forward_kind, config.canon
    if problem := config.placement(side).check(config, side):
        raise UserError(problem)
    mixer, scheme = config.token_mixer, positions.build(config.position)
    if canon and "canon" not in mixer.fields:
        raise UserError(f"model.canon: mixer = {mixer.name!r} does not support it; leave it out")
    if not re.fullmatch("A?B?C?D?", canon):
        raise UserError(f"model.canon: {canon!r} must be letters of 'ABCD', in this order")
    if (not kind.exists and "C" in canon) or (kind.name != "dense" and "D" in canon):
        problem = f"'C' needs a feed-forward, and 'D' a dense one, not {kind.name!r}"
        raise UserError(f"model.canon: {problem}; change one of them")
    causal = f"canon: {canon!r}" if canon else f"mixer: {mixer.name!r}" * mixer.causal
    if causal and (side == "encoder" or not config.causal or config.prefix_lm):
        way_out = "set model.family='decoder', model.causal=True and model.prefix_lm=False"
        raise UserError(f"model.{causal} is causal; {way_out}")
    for part in config.mixers(side).values():
        if problem := part.check(config, side):
            raise UserError(problem)
    if problem := config.position_acts and scheme.check(config.stack_facts(side)):
        raise UserError(problem)
    # Mixers whose only hook is "embed" process tokens in order, and need no scheme of the model's.
    if mixer.hooks != Mixer.hooks and not scheme.hooks <= mixer.hooks:
        problem = f"{scheme.name!r} does not support mixer = {mixer.name!r}"
        why = f"which does not apply {' and '.join(sorted(scheme.hooks - mixer.hooks))}"
        raise UserError(f"model.position: {problem}, {why}; choose another")


def has_norm(c, *parts: str) -> bool:
    """Whether some placement has one of these norms; without `parts`, whether there is any norm."""
    in_heads = c.qk_norm or c.v_norm
    if not parts and (c.embedding_norm or in_heads or (c.head_transform and c.lm_head)):
        return True
    parts = parts or ("in_norm", "res_norm", "out_norm", "final_norm")
    return any(getattr(placement, part) for placement in c.placements for part in parts)


def norm_reads(field: str):
    """Whether some norm reads this field: a placement's, the embedding's, or one in a mixer."""
    return lambda c: has_norm(c) or mixer_reads(field)(c)


def mixer_reads(field: str):
    """Whether a mixer reads this field, in a layer that has the model's value."""
    return lambda c: any(field in mixer.fields for mixer in c.mixers_of(unset=field))


def has_feed_forward(c) -> bool:
    """Whether some layer has a feed-forward."""
    specs = [entry.get("feed_forward", c.feed_forward) for entry in c.used_pattern]
    return any(FEED_FORWARDS.build(spec).exists for spec in specs)


def several_sublayers(c) -> bool:
    """Whether some layer has more than one sublayer."""
    return any(layer.num_sublayers(side) > 1 for side in c.sides for layer in c.layers(side))


_MIXER = "a mixer that reads it: model.mixer='attention'"
_NORM = "a norm (model.norm_placement='pre')"

EFFECTS = (
    Effect(("num_encoder_layers",), "an encoder (model.family)", lambda c: "encoder" in c.sides),
    Effect(("num_decoder_layers",), "a decoder (model.family)", lambda c: "decoder" in c.sides),
    Effect(("token_types",), "an encoder alone: model.family='encoder'",
           lambda c: c.family == "encoder"),
    Effect(("prefix_lm",), "a decoder-only model: model.family='decoder'",
           lambda c: c.family == "decoder"),
    Effect(("causal",), "a decoder, and model.prefix_lm=False",
           lambda c: "decoder" in c.sides and not c.prefix_lm),
    Effect(("num_labels", "pooler"), "because an encoder_decoder generates text",
           lambda c: not c.is_encoder_decoder),
    Effect(("pipeline_rounds",), "stacked layers: model.scan_layers=True", lambda c: c.scan_layers),
    Effect(("share_embeddings", "decoder_start_id", "encoder"),
           "an encoder and a decoder: model.family='encoder_decoder'",
           lambda c: c.is_encoder_decoder),
    *(Effect((f,), f"a layer whose entry in model.layer_pattern omits {f!r}",
             lambda c, f=f: any(f not in entry for entry in c.used_pattern))
      for f in PER_LAYER_FIELDS),
    Effect(("cross_position",), "cross-attention: an encoder_decoder with source='cross_attention'",
           mixer_reads("cross_position")),
    *(Effect((f,), _MIXER, mixer_reads(f)) for f in SHARED_FIELDS),
    Effect(("layer_pattern",), "at least as many layers as entries, one of which sets a field",
           lambda c: len(c.used_pattern) == len(c.layer_pattern) and any(c.layer_pattern)),
    Effect(("random_positions",),
           "a position scheme that reads positions (model.position), or model.window",
           lambda c: any(entry.get("window", c.window) for entry in c.used_pattern)
                     or any(scheme.reads_positions for scheme in c.position_schemes)),
    *(Effect((f,), _NORM, norm_reads(f)) for f in ("norm", "norm_gain", "norm_epsilon")),
    Effect(("norm_epsilon",), "a norm that divides by a statistic: model.norm='layernorm'",
           lambda c: c.norm != "dynamic_tanh" or mixer_reads("norm_epsilon")(c)),
    Effect(("norm_offset",), "a norm with an offset: model.norm='layernorm'",
           lambda c: c.norm in WITH_OFFSET and norm_reads("norm_offset")(c)),
    Effect(("norm_zero_centered",), "a norm with a gain: model.norm_gain=True",
           lambda c: c.norm_gain and norm_reads("norm_zero_centered")(c)),
    Effect(("first_norm",), "a placement with in_norm: model.norm_placement='pre'",
           lambda c: has_norm(c, "in_norm")),
    Effect(("d_ff", "glu", "activation_dropout"),
           "a feed-forward: model.feed_forward='dense'", has_feed_forward),
    Effect(("glu_limit",), "model.glu=True", lambda c: c.glu),
    Effect(("activation",), "a feed-forward, or model.head_transform=True",
           lambda c: has_feed_forward(c) or c.head_transform),
    Effect(("use_bias",),
           "a projection: a feed-forward, a mixer that has a bias, or model.head_transform=True",
           lambda c: (c.attention_bias is None and mixer_reads("attention_bias")(c))
                     or mixer_reads("use_bias")(c) or has_feed_forward(c) or c.head_transform),
    Effect(("parallel",), "a second sublayer: model.feed_forward='dense'", several_sublayers),
    Effect(("residual_init_scale",), "a stack with more than one sublayer",
           lambda c: any(c.num_layers(side) > 1 for side in c.sides) or several_sublayers(c)),
    Effect(("qk_norm_joint",), "model.qk_norm=True", lambda c: c.qk_norm),
    Effect(("attention_scale", "attention_layer_scale"),
           "products of queries and keys: model.attention_score='dot'",
           lambda c: c.attention_score != "additive"),
    Effect(("attention_layer_scale",), "a stack with more than one layer",
           lambda c: any(c.num_layers(side) > 1 for side in c.sides)),
    Effect(("init_std",), "model.initializer='normal'", lambda c: c.initializer == "normal"),
    Effect(("tie_embeddings", "logit_bias", "logit_scale", "logit_soft_cap", "head_transform"),
           "model.lm_head=True", lambda c: c.lm_head),
    Effect(("label_bias",), "labels: model.num_labels", lambda c: c.num_labels),
    Effect(("pooler_activation",), "model.pooler=True", lambda c: c.pooler),
    Effect(("pooling",), "labels: model.num_labels or model.pooler",
           lambda c: c.num_labels or c.pooler),
)  # fmt: skip
"""The conditions under which fields of a ModelConfig have an effect. `ModelConfig` raises an error
for a field that differs from its default although its condition does not hold. Add a line here for
every new field that depends on another one."""
