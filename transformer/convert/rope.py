"""Rotary positions in an outside config.json: the object `rope_parameters` of Transformers 5, and
the fields of the time before it."""

from collections.abc import Mapping
from typing import Any

from transformer.checks import Choice
from transformer.convert.fields import Field, Fields, needed, optional, positive
from transformer.errors import UserError
from transformer.model.config import ModelConfig

FIELDS = {
    "rope_parameters": Field(None, dict, nullable=True),
    "rope_scaling": Field(None, dict, nullable=True),
    "rope_theta": positive(10_000.0),
}
"""What a family with rotary positions reads."""

_FACTOR = {"factor": needed(float)}
_ORIGINAL = {"original_max_position_embeddings": optional(int)}
_SCALINGS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "default": ("none", {}, {}),
    "linear": ("linear", _FACTOR, {"factor": "factor"}),
    "dynamic": ("dynamic", _FACTOR, {"factor": "factor"}),
    "yarn": (
        "yarn",
        _FACTOR
        | _ORIGINAL
        | {
            "beta_fast": optional(float),
            "beta_slow": optional(float),
            "attention_factor": optional(float),
            "truncate": True,
        },
        {
            name: name
            for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate")
        },
    ),
    "llama3": (
        "llama3",
        _FACTOR | _ORIGINAL | {"low_freq_factor": needed(float), "high_freq_factor": needed(float)},
        {
            "factor": "factor",
            "low_freq_factor": "low_frequency_factor",
            "high_freq_factor": "high_frequency_factor",
        },
    ),
}
"""Their rope_type -> our scaling, the fields that it reads, and their names -> ours."""

_KINDS = {kind: kind for kind in _SCALINGS}


def rotary(f: Fields, theta: str = "rope_theta", fraction: str = "") -> dict:
    """Our position and max_length of their rotary fields.

    `theta` and `fraction` name the fields that say both outside of `rope_parameters`. Without
    `fraction`, Transformers turns whole heads whatever `partial_rotary_factor` says, so that a
    model that asks for less is refused.
    """
    new, old = f.get("rope_parameters"), f.get("rope_scaling")  # of both, the old one counts
    if not fraction and f.has("partial_rotary_factor"):
        f.must("partial_rotary_factor", 1.0, "Transformers ignores it in this family")
    f.ignore("partial_rotary_factor")
    part = f.get(fraction) if fraction else 1.0
    length = f.get("max_position_embeddings")
    position = rope(old or new or {}, f.family, length, f.get(theta), part, partial=bool(fraction))
    scaling = position.get("scaling", {})
    if scaling.get("name") == "dynamic":  # their length is that before the stretch
        length = int(length * scaling["factor"])
    return {"position": position, "max_length": length}


def rotary_back(config: ModelConfig, **defaults) -> dict:
    """Their rotary fields of our position and max_length."""
    position = options(config.position)
    scaling = position.get("scaling", {})
    length = scaling["original_length"] if scaling.get("name") == "dynamic" else config.max_length
    return {"rope_parameters": defaults | rope_back(position), "max_position_embeddings": length}


def options(choice: Choice) -> Mapping:
    """A name, or a mapping with a name, as the mapping."""
    return {"name": choice} if isinstance(choice, str) else choice


def rope(
    given: Mapping, family: str, length: int, theta: float, fraction: float = 1.0,
    partial: bool = False, inside: str = "rope_parameters.",
) -> dict:  # fmt: skip
    """Our position of one `rope_parameters` object. `theta` and `fraction` hold where it does not
    say them; `partial`: whether heads may be turned in part."""
    given = {
        k: v for k, v in given.items() if v is not None or k in ("rope_type", "type", "factor")
    }
    old = given.pop("type", "default")
    given.setdefault("rope_type", old)
    kind = Fields(given, family, {"rope_type": ""}, inside=inside).one_of("rope_type", _KINDS)
    name, table, spelled = _SCALINGS[kind]
    common = {
        "rope_type": "",
        "rope_theta": positive(theta),
        "partial_rotary_factor": positive(fraction),
    }
    f = Fields(given, f"{family} model's {kind!r} rotary", common | table, inside=inside)
    f.ignore("rope_type", "finetuned")
    out = {"name": "rotary", "theta": float(f.get("rope_theta"))}
    part = f.get("partial_rotary_factor")
    if part != 1.0:
        if not partial:
            raise f.error(
                "partial_rotary_factor",
                "is not supported: Transformers ignores it in this family; only 1.0 is",
                part,
            )
        out["fraction"] = float(part)
    scaling = {"name": name}
    for theirs, ours in spelled.items():
        value = f.get(theirs)
        if value is not None:
            scaling[ours] = value if isinstance(value, bool) else float(value)
    if kind in ("yarn", "llama3"):
        scaling["original_length"] = f.get("original_max_position_embeddings") or length
    if (
        kind == "dynamic"
    ):  # it stretches what is beyond max_position_embeddings, whatever else is said
        f.must("original_max_position_embeddings", length, "max_position_embeddings is what counts")
        scaling["original_length"] = length
    f.refuse_rest()
    unscaled = scaling.get("factor") == 1.0 and not scaling.get("attention_factor")
    return out if name == "none" or unscaled else out | {"scaling": scaling}


def rope_back(position: Choice) -> dict:
    """Their `rope_parameters` of our position."""
    position = options(position)
    scaling = dict(position.get("scaling") or {"name": "none"})
    theirs = {ours: kind for kind, (ours, _, _) in _SCALINGS.items()}
    if scaling["name"] not in theirs:
        raise UserError(
            f"model.position.scaling: {scaling['name']!r} has no counterpart there; "
            f"{', '.join(theirs)} have"
        )
    kind = theirs[scaling["name"]]
    out = {"rope_type": kind, "rope_theta": position.get("theta", 10_000.0)}
    if "fraction" in position:
        out["partial_rotary_factor"] = position["fraction"]
    if "original_length" in scaling and kind != "dynamic":
        out["original_max_position_embeddings"] = scaling["original_length"]
    return out | {t: scaling[o] for t, o in _SCALINGS[kind][2].items() if o in scaling}
