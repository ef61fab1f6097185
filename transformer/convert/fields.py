"""Reading an outside config.json: every field is read with its type, known not to matter, or
refused by name.

A family names the fields that it reads, with the defaults of its config class in Transformers. A
field that is not there has that default. `null` is a value of its own: `"final_logit_softcapping":
null` turns capping off, while leaving the field out means 30.
"""

import dataclasses
import reprlib
import types
from collections.abc import Mapping
from typing import Any

from transformer.checks import LARGEST
from transformer.errors import UserError
from transformer.model.config_checks import MOST_LAYERS

HARMLESS = frozenset(
    """_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward classif_dropout classifier_dropout cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty extra_pos_embeddings
    finetuning_task force_bos_token_to_be_generated forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initializer_factor initializer_range initializer_cutoff_factor
    init_std is_encoder_decoder label2id length_penalty max_length min_length model_type n_ctx
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences offset_alibi
    onnx_export output_attentions output_hidden_states output_past output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id cls_token_id skip_bias_add skip_bias_add_qkv slow_but_exact
    static_position_embeddings suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unk_index use_bfloat16 use_cache xla_device n_special predict_special_tokens
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    reorder_and_upcast_attn layerdrop encoder_layerdrop decoder_layerdrop classifier_activation
    classifier_bias classifier_pooling deterministic_flash_attn sparse_prediction
    sparse_pred_ignore_index reference_compile repad_logits_with_grad embedding_dropout
    mlp_dropout""".split()  # noqa: SIM905
)
"""Fields that say nothing of what the network computes when it is used: how to generate, what was logged, how it was trained."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a config.json: what it may hold, and what Transformers assumes where it is not
    there."""

    default: Any
    kind: type
    nullable: bool = False  # null is a value that the family's code understands
    above: float | None = None  # a number must be more than this
    most: float = LARGEST

    def problem(self, value: Any) -> str | None:
        """What `value` must be, in words, if it is not that."""
        if value is None:
            return None if self.nullable else f"must be {self._kind}"
        accepted = (int, float) if self.kind is float else self.kind
        if not isinstance(value, accepted) or isinstance(value, bool) != (self.kind is bool):
            return f"must be {self._kind}"
        if self.kind in (int, float):
            if not abs(value) <= self.most:  # a NaN is not
                return f"is out of bounds; at most {self.most:,}"
            if self.above is not None and value <= self.above:
                return f"is too small; it must be more than {self.above:g}"
        return None

    @property
    def _kind(self) -> str:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string",
                 dict: "an object", list: "a list"}  # fmt: skip
        return names[self.kind] + (" or null" if self.nullable else "")


def field(default: Any) -> Field:
    """The field whose default says what it may hold: 12 a size of at least 1, 0.1 a number, True,
    "gelu"."""
    if isinstance(default, Field):
        return default
    if isinstance(default, int) and not isinstance(default, bool):
        return Field(default, int, above=0)
    return Field(default, type(default))


def optional(kind: type, default: Any = None) -> Field:
    """A field that may be null: a size, a number of more than 0, or anything of that kind."""
    return Field(default, kind, nullable=True, above=0 if kind in (int, float) else None)


def count(default: int) -> Field:
    """A whole number of at least 0."""
    return Field(default, int, above=-1)


def layer_count(default: int | None) -> Field:
    """A number of layers, which may be null if that is its default."""
    return Field(default, int, nullable=default is None, above=0, most=MOST_LAYERS)


def positive(default: float) -> Field:
    """A number of more than 0."""
    return Field(default, float, above=0)


def needed(kind: type) -> Field:
    """A field without a default. A number must be more than 0."""
    return Field(_MISSING, kind, above=0 if kind in (int, float) else None)


_MISSING = object()


def shown(value: Any) -> str:
    """A value from outside, in one short line."""
    return reprlib.repr(value)


class Fields:
    """The fields of one config.json, or of the object `inside` it.

    `table` has the fields that the family reads and their defaults. `aliases` are other names of
    some of them (the `attribute_map` of a config class). Raises UserError for two names of a field
    that contradict each other.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        family: str,
        table: Mapping[str, Any],
        aliases: Mapping[str, str] = types.MappingProxyType({}),
        inside: str = "",
    ):
        given = dict(given)
        self.family, self._inside, self._seen = family, inside, set()
        self._table = {name: field(default) for name, default in table.items()}
        for alias, name in aliases.items():
            if alias in given:
                value = given.pop(alias)
                if given.setdefault(name, value) != value:
                    raise self.error(
                        name, f"contradicts {alias} = {shown(value)}; leave one out", given[name]
                    )
        self._given = given
        for name, value in given.items():
            if name.endswith("_token_id") and not is_token(value, several="eos" in name):
                raise self.error(name, "must be the id of a token or null")

    def error(self, name: str, problem: str, value: Any = _MISSING, note: str = "") -> UserError:
        """One line about a field and its value."""
        value = self._given.get(name) if value is _MISSING else value
        return UserError(f"config.json: {self._inside}{name} = {shown(value)}{note} {problem}")

    def get(self, name: str, default: Any = _MISSING):
        """The field's value, which is of its type, or its default where it is not there."""
        self._seen.add(name)
        if name.endswith("_token_id"):
            value = self._given.get(name)
            return default if value is None else value
        of = self._table[name]
        default = of.default if default is _MISSING else default
        if name not in self._given:
            if default is _MISSING:
                raise UserError(
                    f"config.json: no {self._inside}{name}, which a {self.family} model needs"
                )
            return default
        if problem := of.problem(self._given[name]):
            raise self.error(name, problem)
        return self._given[name]

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._given.get(name) is not None

    def one_of(self, name: str, table: Mapping):
        """The field's value in our words."""
        value = self.get(name)
        if value not in table:
            raise UserError(
                f"config.json: {self._inside}{name} = {shown(value)} is not supported; supported "
                f"are {', '.join(map(repr, table))}"
            )
        return table[value]

    def same(self, name: str, wanted, why: str) -> None:
        """A field that we can express if it is what another one is, be it given or its default."""
        value = self.get(name)
        if value != wanted:
            where = "" if self.has(name) else ", its default,"
            raise self.error(name, f"is not supported: {why}; only {wanted!r} is", value, where)

    def must(self, name: str, wanted, why: str = "") -> None:
        """A field that we can express in one value alone. null is False here, as it is in Python's
        `if`."""
        self._seen.add(name)
        value = self._given.get(name, wanted)
        if value != wanted and (value is not None or wanted):
            raise self.error(
                name, f"is not supported{why and ': ' + why}; only {wanted!r} is", value
            )

    def ignore(self, *names: str) -> None:
        """Fields that do not change what is computed."""
        self._seen.update(names)

    def rest(self) -> list[str]:
        """Fields that are set, that nobody has asked for and that are not known to be harmless."""
        return sorted(
            name for name in self._given.keys() - self._seen - HARMLESS if self._given[name]
        )

    def refuse_rest(self) -> None:
        """Raises UserError, with their names, if fields are left."""
        if rest := self.rest():
            others = ", ".join(map(printable, rest[1:6]))
            raise UserError(
                f"config.json: {self._inside}{printable(rest[0])} = "
                f"{shown(self._given[rest[0]])} is no field of a {self.family} model that we know"
                + (f" (nor {others})" if others else "")
            )


def layer_kinds(f: Fields, layers: int) -> list[str] | None:
    """What `layer_types` says of each layer, or None where it is not there."""
    kinds = f.get("layer_types")
    if kinds is None:
        return None
    if unknown := [k for k in kinds if k not in ("sliding_attention", "full_attention")]:
        raise f.error("layer_types", f"has {shown(unknown[0])}, which is not supported")
    if len(kinds) != layers:
        raise f.error("layer_types", f"has {len(kinds)} entries for {layers} layers")
    return kinds


def one_period(layers: list) -> list:
    """The shortest beginning of a list that, said again and again, gives the list."""
    period = next(p for p in range(1, len(layers) + 1) if layers[:-p] == layers[p:])
    return layers[:period]


def printable(name: str, most: int = 100) -> str:
    """A name from outside, in one line."""
    text = name.encode("unicode_escape").decode("ascii") if not name.isprintable() else name
    return text if len(text) <= most else text[:most] + "..."


def is_token(value: Any, several: bool) -> bool:
    """Whether a value is the id of a token, null or, where `several` may stand, a list of ids."""
    if isinstance(value, list) and several:
        return all(is_token(x, False) and x is not None for x in value)
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "silu": "silu", "swish": "silu",
}  # fmt: skip
"""Their name of a nonlinearity -> ours."""

ACTIVATIONS_BACK = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
