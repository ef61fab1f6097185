"""The conditions under which fields of a ModelConfig have an effect. `ModelConfig` raises an error
for a field that differs from its default although its condition does not hold. Add a line here for
every new field that depends on another one."""

from transformer.checks import Effect
from transformer.model.feed_forwards.base import FEED_FORWARDS
from transformer.model.mixers.base import SHARED_FIELDS
from transformer.model.norms import WITH_OFFSET

PER_LAYER_FIELDS = ("mixer", "position", "window", "feed_forward", "norm_placement")
"""The fields that `layer_pattern` may set per layer."""


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


def reads_use_bias(c) -> bool:
    """Whether `use_bias` controls the biases of some projection."""
    in_attention = c.attention_bias is None and mixer_reads("attention_bias")(c)
    return in_attention or mixer_reads("use_bias")(c) or has_feed_forward(c) or c.head_transform


def depends_on_positions(c) -> bool:
    """Whether some layer depends on the positions of its tokens."""
    windows = any(entry.get("window", c.window) for entry in c.used_pattern)
    return windows or any(scheme.reads_positions for scheme in c.position_schemes)


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
    Effect(("pipeline_rounds",), "stacked layers: model.scan_layers=True",
           lambda c: c.scan_layers),
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
           depends_on_positions),
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
           reads_use_bias),
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
    Effect(("pooling",), "labels: model.num_labels or model.pooler",
           lambda c: c.num_labels or c.pooler),
)  # fmt: skip
