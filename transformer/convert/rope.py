"""Rotary positions in config.json: `rope_parameters` of Transformers 5, and earlier fields."""

import math
from collections.abc import Mapping

from transformer.checks import Choice
from transformer.convert.fields import Field, Fields, field, needed, optional, positive, printable
from transformer.errors import UserError
from transformer.model.config import ModelConfig

ROPE = {
    "rope_parameters": optional(dict), "rope_scaling": optional(dict),
    "rope_theta": positive(10_000.0),
}  # fmt: skip
"""The fields that a family with rotary positions reads."""

_FACTOR = {"factor": needed(float, "factor")}
_ORIGINAL = {"original_max_position_embeddings": optional(int)}
_YARN = {
    "beta_fast": optional(float, ours="beta_fast"), "beta_slow": optional(float, ours="beta_slow"),
    "attention_factor": optional(float, ours="attention_factor"),
    "truncate": field(True, "truncate"), "mscale": optional(float),
    "mscale_all_dim": optional(float),
}  # fmt: skip
_LONG = {
    "short_factor": needed(list, "short_factors"), "long_factor": needed(list, "long_factors"),
    "attention_factor": optional(float, ours="attention_factor"), "factor": optional(float),
}  # fmt: skip
_LLAMA = {
    "low_freq_factor": needed(float, "low_frequency_factor"),
    "high_freq_factor": needed(float, "high_frequency_factor"),
}
_SCALINGS: dict[str, dict[str, Field]] = {
    "default": {}, "linear": _FACTOR, "dynamic": _FACTOR, "yarn": _FACTOR | _ORIGINAL | _YARN,
    "longrope": _ORIGINAL | _LONG, "llama3": _FACTOR | _ORIGINAL | _LLAMA,
}  # fmt: skip
"""rope_type, our scaling's name ("none" for "default") -> its fields, paired with our options."""


def rotary(f: Fields, theta="rope_theta", fraction="", default: Mapping | None = None) -> dict:
    """Returns our `position` and `max_length` for the rotary fields of a config.json. `theta` and
    `fraction` name the fields outside of `rope_parameters` that set the base and the rotated share
    of each head. Without `fraction`, Transformers rotates whole heads and ignores
    `partial_rotary_factor`, so any factor other than 1 raises UserError. Where the field
    `original_max_position_embeddings` exists outside of `rope_parameters`, it takes precedence.
    `default` is `rope_parameters` if config.json has none."""
    # Where both are set, the legacy field takes precedence.
    current, legacy = f.get("rope_parameters"), f.get("rope_scaling")
    if not fraction and f.has("partial_rotary_factor"):
        f.must("partial_rotary_factor", 1.0, "Transformers ignores it in this family")
    f.ignore("partial_rotary_factor")
    rotated = f.get(fraction) if fraction else 1.0
    length = f.get("max_position_embeddings")
    values, original = dict(legacy or current or default or {}), "original_max_position_embeddings"
    has_original = values.get("rope_type", values.get("type")) in ("yarn", "longrope", "llama3")
    if original in f.table and (value := f.get(original)) and has_original:
        values[original] = value
    position = rope(values, f.family, length, f.get(theta), rotated, partial=bool(fraction))
    scaling = position.get("scaling", {})
    if scaling.get("name") == "dynamic":  # their length is the length before scaling
        length = int(length * scaling["factor"])
    return {"position": position, "max_length": length}


def write_rotary(config: ModelConfig, **defaults) -> dict:
    """Returns the rotary fields of config.json; `defaults` are entries for omitted options."""
    position = options(config.position)
    scaling = position.get("scaling", {})
    length = scaling["original_length"] if scaling.get("name") == "dynamic" else config.max_length
    return {"rope_parameters": defaults | write_rope(position), "max_position_embeddings": length}


def options(choice: Choice) -> Mapping:
    """Returns a choice as a mapping with a `name`."""
    return {"name": choice} if isinstance(choice, str) else choice


def rope(
    values: Mapping, family: str, length: int, theta: float, fraction: float = 1.0,
    partial: bool = False, inside: str = "rope_parameters.",
) -> dict:  # fmt: skip
    """Returns our position for one `rope_parameters` object. `theta` and `fraction` are defaults of
    the base and of each head's rotated share. `partial`: the family supports shares below 1."""
    kept_as_null = ("rope_type", "type", "factor")
    values = {k: v for k, v in values.items() if v is not None or k in kept_as_null}
    values.setdefault("rope_type", values.pop("type", "default"))
    of_type = Fields(values, family, {"rope_type": ""}, inside=inside)
    table, kind = of_type.one_of("rope_type", _SCALINGS), values["rope_type"]
    common = {"rope_theta": positive(theta), "partial_rotary_factor": positive(fraction)}
    f = Fields(values, f"{family} ({kind!r} rotary)", common | table, inside=inside)
    f.ignore("rope_type", "finetuned")
    out = {"name": "rotary", "theta": f.get("rope_theta")}
    if not partial:
        f.must("partial_rotary_factor", 1.0, "Transformers ignores it in this family")
    if (rotated := f.get("partial_rotary_factor")) != 1.0:
        out["fraction"] = rotated
    scaling = {"name": kind} | f.paired()
    original = "original_max_position_embeddings"
    if original in table:
        scaling["original_length"] = f.get(original) or length
    if "attention_factor" not in scaling and kind in ("yarn", "longrope"):
        scaling |= _attention_factor(kind, f, length, scaling["original_length"])
    if kind == "dynamic":
        # Dynamic scaling starts at max_position_embeddings, whatever the other fields are.
        f.must(original, length, "max_position_embeddings sets this length")
        scaling["original_length"] = length
    f.check_all_read()
    unscaled = scaling.get("factor") == 1.0 and not scaling.get("attention_factor")
    return out if kind == "default" or unscaled else out | {"scaling": scaling}


def _attention_factor(kind: str, f: Fields, length: int, original: int) -> dict:
    """Returns the attention factor that other fields imply, or nothing for our default."""
    if kind == "longrope":
        factor = f.get("factor") or length / original
        growth = math.log(factor) / math.log(original) if factor > 1 and original > 1 else 0.0
        return {"attention_factor": math.sqrt(1 + growth)}
    scales = {name: f.get(name) for name in ("mscale", "mscale_all_dim")}
    if not any(scales.values()):
        return {}
    for name, other in zip(scales, reversed(scales), strict=True):
        if not scales[other]:
            raise f.error(name, f"has no effect without {other}; leave it out")
    above, below = (0.1 * scale * math.log(f.get("factor")) + 1 for scale in scales.values())
    return {"attention_factor": above / below}


def rotary_by_type(f: Fields, thetas: Mapping[str, float]) -> dict:
    """Returns layer type -> our position, where types have their own settings. `thetas` are the
    default bases by type. Legacy settings of "full_attention" (`rope_scaling`) take precedence."""
    name = "rope_parameters"
    entries = dict(f.get(name) or {})
    if unknown := sorted(entries.keys() - thetas):
        raise f.error(name, f"has {printable(unknown[0])!r}, which is not a layer type")
    if wrong := [x for x, entry in entries.items() if not isinstance(entry, dict | None)]:
        raise f.error(name, f"must have an object for {wrong[0]!r}")
    if "rope_scaling" in f.table and (legacy := f.get("rope_scaling")):
        entries["full_attention"] = (entries.get("full_attention") or {}) | legacy
    if any((entry or {}).get("truncate") is False for entry in entries.values()):
        raise f.error(name, "is not supported: Transformers ignores truncate in this family")
    length, positions = f.get("max_position_embeddings"), {}
    for kind, theta in thetas.items():
        inside = f"rope_parameters.{kind}."
        positions[kind] = rope(entries.get(kind) or {}, f.family, length, theta, inside=inside)
    return positions


def write_rope(position: Choice) -> dict:
    """Returns `rope_parameters` for our position; UserError for a scaling without counterpart."""
    position = options(position)
    scaling = dict(position.get("scaling") or {"name": "none"})
    theirs = {kind if kind != "default" else "none": kind for kind in _SCALINGS}
    if scaling["name"] not in theirs:
        problem = f"{scaling['name']!r} has no counterpart in Transformers"
        raise UserError(f"model.position.scaling: {problem}; use one of {', '.join(theirs)}")
    kind = theirs[scaling["name"]]
    out = {"rope_type": kind, "rope_theta": position.get("theta", 10_000.0)}
    if "fraction" in position:
        out["partial_rotary_factor"] = position["fraction"]
    if "original_length" in scaling and kind != "dynamic":
        out["original_max_position_embeddings"] = scaling["original_length"]
    plain = lambda value: list(value) if isinstance(value, tuple) else value
    pairs = {name: x.ours for name, x in _SCALINGS[kind].items()}
    return out | {name: plain(scaling[x]) for name, x in pairs.items() if x in scaling}
