"""Reading an outside config.json: every field is taken, known not to matter, or refused by name."""

from collections.abc import Mapping
from typing import Any

from transformer.errors import UserError
from transformer.model.config import Choice, ModelConfig

HARMLESS = frozenset(
    """_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attn_implementation auto_map
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward classif_dropout classifier_dropout cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty extra_pos_embeddings finetuning_task force_bos_token_to_be_generated forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label initializer_factor initializer_range initializer_cutoff_factor init_std
    is_encoder_decoder label2id length_penalty max_length min_length model_type n_ctx no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences offset_alibi onnx_export output_attentions output_hidden_states output_past
    output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate sep_token_id cls_token_id skip_bias_add skip_bias_add_qkv slow_but_exact static_position_embeddings
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unk_index use_bfloat16 use_cache xla_device n_special predict_special_tokens summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj reorder_and_upcast_attn layerdrop encoder_layerdrop
    decoder_layerdrop classifier_activation classifier_bias classifier_pooling deterministic_flash_attn sparse_prediction
    sparse_pred_ignore_index reference_compile repad_logits_with_grad embedding_dropout mlp_dropout""".split()  # noqa: SIM905
)
"""Fields that say nothing of what the network computes when it is used: how to generate, what was logged, how it was trained."""


class Fields:
    """The fields of one config.json. `default`: what the family's code assumes when a field is not there."""

    def __init__(self, given: Mapping[str, Any], family: str):
        self._given, self._family, self._seen = given, family, set()

    def get(self, name: str, default=None):
        """The field's value; None counts as not there."""
        self._seen.add(name)
        value = self._given.get(name)
        return default if value is None else value

    def need(self, name: str):
        """A field that must be there."""
        value = self.get(name)
        if value is None:
            raise UserError(f"config.json: no {name!r}, which a {self._family} model needs")
        return value

    def one_of(self, name: str, default, table: Mapping):
        """The field's value in our words."""
        value = self.get(name, default)
        if value not in table:
            raise UserError(
                f"config.json: {name} = {value!r} is nothing we can build; we know {', '.join(map(repr, table))}"
            )
        return table[value]

    def must(self, name: str, wanted, why: str = "") -> None:
        """A field that we can express in one value alone."""
        value = self.get(name, wanted)
        if value != wanted:
            raise UserError(
                f"config.json: {name} = {value!r} cannot be expressed{why and ': ' + why}; {wanted!r} can"
            )

    def ignore(self, *names: str) -> None:
        """Fields that do not change what is computed."""
        self._seen.update(names)

    def rest(self) -> list[str]:
        """Fields that are set, that nobody has asked for and that are not known to be harmless."""
        return sorted(
            name for name in self._given.keys() - self._seen - HARMLESS if self._given[name]
        )


ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "silu": "silu", "swish": "silu",
}  # fmt: skip
"""Their name of a nonlinearity -> ours."""

ACTIVATIONS_BACK = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}


def rotary(f: Fields, max_length: int, theta: float = 10_000.0, fraction: float = 1.0) -> dict:
    """Our position and max_length of their rotary fields, in the spelling of Transformers 5 (`rope_parameters`) or before."""
    given = dict(f.get("rope_parameters") or f.get("rope_scaling") or {})
    f.ignore(
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
        "rotary_pct",
        "rotary_emb_base",
    )
    theta = f.get("rope_theta") or f.get("rotary_emb_base") or theta
    fraction = f.get("partial_rotary_factor") or f.get("rotary_pct") or fraction
    length = f.get("max_position_embeddings", max_length)
    position = rope(given, length, theta, fraction)
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


def rope(given: Mapping, max_length: int, theta: float = 10_000.0, fraction: float = 1.0) -> dict:
    """Our position of one `rope_parameters` table."""
    given = dict(given)
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    out = {"name": "rotary", "theta": float(given.pop("rope_theta", theta))}
    part = given.pop("partial_rotary_factor", fraction)
    if part != 1.0:
        out["fraction"] = float(part)
    length = given.pop("original_max_position_embeddings", None) or max_length
    if kind not in _SCALINGS:
        raise UserError(
            f"config.json: rope_type = {kind!r} cannot be expressed; we know {', '.join(_SCALINGS)}"
        )
    name, spelled = _SCALINGS[kind]
    scaling = {"name": name} | {
        ours: given.pop(theirs) for theirs, ours in spelled.items() if given.get(theirs) is not None
    }
    if kind in ("dynamic", "yarn", "llama3"):
        scaling["original_length"] = int(length)
    left = sorted(
        k
        for k, v in given.items()
        if v is not None and k in ("mscale", "mscale_all_dim", "long_factor", "short_factor")
    )
    if left:
        raise UserError(
            f"config.json: rope_parameters.{left[0]} = {given[left[0]]!r} cannot be expressed"
        )
    if name != "none":
        out["scaling"] = {k: v if isinstance(v, (str, bool, int)) and k in ("name", "truncate", "original_length") else float(v)
                          for k, v in scaling.items()}  # fmt: skip
    return out


def rope_back(position: Choice) -> dict:
    """Their `rope_parameters` of our position."""
    position = options(position)
    scaling = dict(position.get("scaling") or {"name": "none"})
    theirs = {ours: kind for kind, (ours, _) in _SCALINGS.items()}
    if scaling["name"] not in theirs:
        raise UserError(
            f"model.position.scaling: {scaling['name']!r} has no counterpart there; {', '.join(theirs)} have"
        )
    kind = theirs[scaling["name"]]
    out = {"rope_type": kind, "rope_theta": position.get("theta", 10_000.0)}
    if "fraction" in position:
        out["partial_rotary_factor"] = position["fraction"]
    if "original_length" in scaling and kind != "dynamic":
        out["original_max_position_embeddings"] = scaling["original_length"]
    return out | {t: scaling[o] for t, o in _SCALINGS[kind][1].items() if o in scaling}


_SCALINGS: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "dynamic": ("dynamic", {"factor": "factor"}),
    "yarn": (
        "yarn",
        {
            "factor": "factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "attention_factor": "attention_factor",
            "truncate": "truncate",
        },
    ),
    "llama3": (
        "llama3",
        {
            "factor": "factor",
            "low_freq_factor": "low_frequency_factor",
            "high_freq_factor": "high_frequency_factor",
        },
    ),
}
"""Their rope_type -> our scaling, and their fields -> ours."""
