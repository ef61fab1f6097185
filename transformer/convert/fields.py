"""Reads an outside config.json: every field is read with its type, harmless, or rejected by name. A
family lists the fields that it reads, with the defaults of its config class in Transformers, and
may pair each with a field of ModelConfig. A missing field has its default. `null` is a separate
value: `"final_logit_softcapping": null` turns capping off, while a missing field means 30."""

import dataclasses
import reprlib
import types
from collections.abc import Mapping
from typing import Any

from transformer.errors import UserError
from transformer.limits import LARGEST
from transformer.model.config_checks import MAX_LAYERS

_MISSING = object()
HARMLESS = frozenset(
    """_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
    attention_softmax_in_fp32 attn_implementation auto_map bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward classif_dropout classifier_activation classifier_bias
    classifier_dropout classifier_pooling cls_dropout cls_token_id cross_attention_hidden_size
    decoder_layerdrop decoder_start_token_id deterministic_flash_attn diversity_penalty do_sample
    dtype early_stopping embd_pdrop embedding_dropout encoder_layerdrop
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty extra_pos_embeddings
    finetuning_task force_bos_token_to_be_generated forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label init_std initializer_cutoff_factor initializer_factor
    initializer_range is_encoder_decoder label2id layerdrop length_penalty masked_softmax_fusion
    max_length min_length mlp_dropout model_type n_ctx n_special no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences offset_alibi onnx_export
    output_attentions output_hidden_states output_past output_router_logits output_scores
    pad_token_id pooler_dropout predict_special_tokens prefix pretraining_tp problem_type
    pruned_heads qa_dropout reference_compile remove_invalid_values reorder_and_upcast_attn
    repad_logits_with_grad repetition_penalty return_dict return_dict_in_generate
    router_jitter_noise sep_token_id seq_classif_dropout sinusoidal_pos_embds skip_bias_add
    skip_bias_add_qkv slow_but_exact sparse_pred_ignore_index sparse_prediction
    static_position_embeddings summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unk_index use_bfloat16 use_cache xla_device""".split()
)
"""Fields of generation, training and metadata, which do not affect what the network computes."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a config.json: its permitted values, and the default of Transformers."""

    default: Any
    kind: type | types.UnionType
    ours: str = ""  # the paired field of ModelConfig: same value, but for the names of activations
    nullable: bool = False  # null is our default, or the family's code handles it
    above: float | None = None  # numbers must be greater than this

    def problem(self, value: Any) -> str | None:
        """Returns what is wrong with `value`, in words, or None."""
        if value is None:
            return None if self.nullable else f"must be {self._kind}"
        accepted = (int, float) if self.kind is float else self.kind
        if not isinstance(value, accepted) or isinstance(value, bool) != (self.kind is bool):
            return f"must be {self._kind}"
        if self.kind in (int, float):
            counts_layers = self.ours in ("num_encoder_layers", "num_decoder_layers")
            largest = MAX_LAYERS if counts_layers else LARGEST
            if not abs(value) <= largest:  # true for NaN, too
                return f"is out of bounds; at most {largest:,}"
            if self.above is not None and value <= self.above:
                return f"is too small; it must be more than {self.above:g}"
        return None

    @property
    def _kind(self) -> str:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string",
                 dict: "an object", list: "a list", str | list: "a string or a list"}  # fmt: skip
        return names[self.kind] + (" or null" if self.nullable else "")


def field(default: Any, ours: str = "") -> Field:
    """Returns a Field of the default's type; whole numbers from 1. A Field stays unchanged."""
    if isinstance(default, Field):
        return default
    above = 0 if isinstance(default, int) and not isinstance(default, bool) else None
    return Field(default, type(default), ours, above=above)


def optional(kind: type, default: Any = None, ours: str = "") -> Field:
    """Returns a Field that may be null. Numbers must be greater than 0."""
    return Field(default, kind, ours, nullable=True, above=0 if kind in (int, float) else None)


def count(default: int) -> Field:
    """Returns a Field for a whole number of at least 0."""
    return Field(default, int, above=-1)


def positive(default: float, ours: str = "") -> Field:
    """Returns a Field for a number greater than 0."""
    return Field(default, float, ours, above=0)


def needed(kind: type, ours: str = "") -> Field:
    """Returns a Field without a default. Numbers must be greater than 0."""
    return Field(_MISSING, kind, ours, above=0 if kind in (int, float) else None)


def changed(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Field]:
    """Returns a table with fields added or replaced. A replaced field keeps its `ours`."""
    ours = {name: field(x).ours for name, x in table.items()}
    paired = lambda name, x: dataclasses.replace(x, ours=x.ours or ours.get(name, ""))
    return {name: paired(name, field(x)) for name, x in (table | changes).items()}


shown = reprlib.repr  # a value from outside, as one short line

LABELS = {"num_labels": optional(int), "id2label": optional(dict)}
"""Fields of every config class, which name the classes of a classifier."""


def write_labels(number: int) -> dict:
    """Returns the fields of config.json for a classifier."""
    names = {str(i): f"LABEL_{i}" for i in range(number)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


class Fields:
    """The fields of one config.json, or of an object inside it. `table` maps the fields that the
    family reads to their defaults. `aliases` maps other names of these to the names in `table` (the
    `attribute_map` of a config class). `inside` precedes field names in errors: `rope_parameters.`.
    Raises UserError if a field and its alias differ, or if a `*_token_id` is not a token ID."""

    def __init__(
        self, values: Mapping[str, Any], family: str, table: Mapping[str, Any],
        aliases: Mapping[str, str] = types.MappingProxyType({}), inside: str = "",
    ):  # fmt: skip
        values = self._values = dict(values)
        self.family, self._inside, self._seen = family, inside, set()
        self.table = {name: field(default) for name, default in (LABELS | table).items()}
        for alias, name in aliases.items():
            if alias in values:
                value = values.pop(alias)
                if values.setdefault(name, value) != value:
                    raise self.error(name, f"contradicts {alias} = {shown(value)}; leave one out")
        for name, value in values.items():
            if name.endswith("_token_id") and not is_token(value, several="eos" in name):
                raise self.error(name, "must be a token ID or null")

    def error(self, name: str, problem: str, value: Any = _MISSING, note: str = "") -> UserError:
        """Returns a UserError about a field and its value. `note` follows the value."""
        value = self._values.get(name) if value is _MISSING else value
        path = self._inside + printable(name)
        return UserError(f"config.json: {path} = {shown(value)}{note} {problem}")

    def get(self, name: str, default: Any = _MISSING):
        """Returns the field's value, or its default if it is missing. Numbers are of its kind.
        Raises UserError for a wrong type or range, and for a missing field without a default."""
        self._seen.add(name)
        spec = self.table[name]
        default = spec.default if default is _MISSING else default
        if name not in self._values:
            if default is _MISSING:
                path = self._inside + name
                raise UserError(f"config.json: no {path}; a {self.family} model requires it")
            return default
        if problem := spec.problem(self._values[name]):
            raise self.error(name, problem)
        value = self._values[name]
        return float(value) if spec.kind is float and value is not None else value

    def paired(self) -> dict:
        """Returns our fields paired with fields that are not null. A paired list holds numbers."""
        values = {}
        for name, x in self.table.items():
            if x.ours == "activation":
                values[x.ours] = self.one_of(name, ACTIVATIONS)
            elif x.ours and (value := self.get(name)) is not None:
                values[x.ours] = self.numbers(name) if x.kind is list else value
        return values

    def numbers(self, name: str) -> tuple[float, ...]:
        """Returns a field that holds a list of numbers greater than 0."""
        values = self.get(name)
        if wrong := [x for x in values if positive(1.0).problem(x)]:
            raise self.error(name, f"has {shown(wrong[0])}; its entries are numbers over 0")
        return tuple(map(float, values))

    def words(self, name: str) -> set[str]:
        """Returns the words of a field: a list, or a string with `|` between them."""
        words = self.get(name) or ""
        texts = [x.strip() for x in words.lower().split("|")] if isinstance(words, str) else words
        return set(map(str, texts))

    def layer_kinds(self, layers: int) -> list[str] | None:
        """Returns `layer_types`, which has one entry per layer, or None if missing or null."""
        kinds = self.get("layer_types")
        if unknown := [k for k in kinds or () if k not in ("sliding_attention", "full_attention")]:
            raise self.error("layer_types", f"has {shown(unknown[0])}, which is not supported")
        if kinds is not None and len(kinds) != layers:
            raise self.error("layer_types", f"has {len(kinds)} entries for {layers} layers")
        return kinds

    def num_labels(self) -> int:
        """Returns the number of classes of a classifier. Files omit the default, two."""
        names = self.get("id2label")
        return self.get("num_labels") or 2 if names is None else len(names)

    def has(self, name: str) -> bool:
        """Returns whether the field is present and not null."""
        return self._values.get(name) is not None

    def one_of(self, name: str, table: Mapping):
        """Returns the entry of `table` for the field's value. Raises UserError without an entry."""
        value = self.get(name)
        if value not in table:
            problem = f"is not supported; use one of {', '.join(map(repr, table))}"
            raise self.error(name, problem, value)
        return table[value]

    def must(self, name: str, target, why: str = "") -> None:
        """Raises UserError unless the field, or its default, is `target`, the only supported value.
        Without a default, a missing field is supported. null is False."""
        self._seen.add(name)
        default = self.table[name].default if name in self.table else target
        value = self._values.get(name, default)
        if value != target and (value is not None or target):
            problem = f"is not supported{why and ': ' + why}; it must be {target!r}"
            raise self.error(name, problem, value, "" if self.has(name) else " (the default)")

    def ignore(self, *names: str) -> None:
        """Marks fields as read that do not change what is computed."""
        self._seen.update(names)

    def check_all_read(self) -> None:
        """Raises UserError if a field that is set was neither read nor known to be harmless."""
        rest = self._values.keys() - self._seen - HARMLESS
        if unknown := sorted(name for name in rest if self._values[name]):
            others = ", ".join(map(printable, unknown[1:6]))
            more = f" (nor is any of {others})" if others else ""
            raise self.error(unknown[0], f"is not a known field of a {self.family} model{more}")


def printable(name: str, max_length: int = 100) -> str:
    """Returns a name from outside as one printable line of at most `max_length` characters."""
    text = name.encode("unicode_escape").decode("ascii") if not name.isprintable() else name
    return text if len(text) <= max_length else text[:max_length] + "..."


def is_token(value: Any, several: bool) -> bool:
    """Returns whether a value is a token ID, null or, with `several`, a list of token IDs."""
    if isinstance(value, list) and several:
        return all(is_token(x, False) and x is not None for x in value)
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu2": "relu_squared", "linear": "linear", "silu": "silu",
    "swish": "silu", "quick_gelu": "quick_gelu",
}  # fmt: skip
"""Activation in Transformers -> ours."""

ACTIVATIONS_BACK = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""Our activation -> the first of its names in Transformers."""
