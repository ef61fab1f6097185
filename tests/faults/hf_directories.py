"""Damaged and altered Hugging Face directories.

`mutate` writes a copy of a directory with one or two faults in config.json, the tensors or the
files, drawn from a seed. `judge` asserts that `load_hf` either refuses the directory with a
`UserError` of one line, or returns a model whose logits equal those of Transformers. It compares
the logits only if Transformers loads every tensor of the directory.

    sources = {name: save(name, root / name) for name in MODELS}
    for seed in range(500):
        name, fault = mutate_any(sources, root / str(seed), seed)
        print(name, fault, judge(name, root / str(seed)))
"""

import functools
import itertools
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from faults.hf_models import MODELS, VOCAB, save

from transformer import build_model, load_hf
from transformer.errors import UserError

__all__ = ["MODELS", "judge", "mutate", "mutate_any", "save"]

LENGTH = 9


@functools.cache
def _sources() -> dict[str, Path]:
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    return {name: save(name, root / name) for name in MODELS}


def cases(seed: int) -> Iterator[int]:
    """Yields the seeds of mutations without end."""
    return itertools.count(1_000_000 * seed)


def check(case: int) -> str:
    """Raises AssertionError unless `judge` accepts the directory with the faults of this seed."""
    with tempfile.TemporaryDirectory() as folder:
        name, fault = mutate_any(_sources(), Path(folder) / "model", case)
        try:
            return judge(name, Path(folder) / "model")
        except Exception as e:
            raise AssertionError(f"seed {case}: {name}, {fault}: {type(e).__name__}: {e}") from e


def mutate_any(sources: Mapping[str, Path], target: Path, seed: int) -> tuple[str, str]:
    """Writes a faulty copy of one of `sources`. Returns its name and describes the faults."""
    names = sorted(sources)
    name = names[seed % len(names)]
    return name, mutate(sources[name], target, seed)


def mutate(source: Path, target: Path, seed: int) -> str:
    """Copies `source` with one or two faults drawn from `seed`. Returns their description."""
    rng = np.random.default_rng(seed)
    shutil.copytree(source, target)
    descriptions = []
    for _ in range(rng.choice([1, 1, 2])):
        fault = FAULTS[rng.choice(len(FAULTS), p=WEIGHTS)]
        descriptions.append(f"{fault.__name__.strip('_')}: {fault(target, rng)}")
        if not _intact(target):
            break
    return "; ".join(descriptions)


def _intact(target: Path) -> bool:
    """Returns whether config.json and the tensors have what another fault may change."""
    try:
        tensors = safetensors.torch.load_file(target / "model.safetensors")
        return bool(tensors) and "model_type" in json.loads((target / "config.json").read_text())
    except Exception:
        return False


# Faults of config.json.

ODD: list[Any] = [
    None, "x", "", True, False, -1, 0, 1, 2, 3, 5, 0.5, 1.0, 2.5, -0.25, float("nan"), float("inf"),
    [], {}, [1], ["full_attention"],
    {"a": 1}, 10**6, 2**31 - 1, 2**31, 10**30, "a\nb", "x" * 5000,
]  # fmt: skip
_LINEAR = {"rope_type": "linear", "factor": 2.0}
ADDED: list[tuple[str, Any]] = [
    ("is_causal", False), ("is_causal", None), ("partial_rotary_factor", 0.5),
    ("rope_scaling", _LINEAR), ("rope_theta", 50.0),
    ("rope_parameters", _LINEAR),
    ("rope_parameters", _LINEAR | {"rope_type": "dynamic", "original_max_position_embeddings": 4}),
    ("rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
    ("rope_parameters", {"rope_type": "yarn"}),
    ("rope_parameters", {"rope_type": "llama3", "factor": 2.0}),
    ("rope_parameters", {"rope_theta": 9.0, "partial_rotary_factor": 0.5}),
    ("rope_parameters", _LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 5}),
    ("rope_parameters", {"full_attention": {"rope_theta": 7.0}}),
    ("rope_parameters", {"rope_type": ["linear"]}),
    ("rotary_pct", 0.25), ("rotary_emb_base", 70.0), ("sliding_window", 3),
    ("use_sliding_window", True), ("use_sliding_window", False),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("layer_types", ["full_attention"] * 2), ("hidden_act", "relu"),
    ("hidden_activation", "relu"), ("activation_function", "relu"),
    ("classifier_activation", "relu"), ("head_dim", 8), ("head_dim", None),
    ("attention_bias", True), ("mlp_bias", True), ("num_labels", 3), ("id2label", {"0": "a"}),
    ("n_embed", 32), ("num_attention_heads", 2),
    ("hidden_size", 32), ("num_hidden_layers", 1), ("eos_token_id", "x"), ("eos_token_id", [1, 2]),
    ("pad_token_id", -1),
    ("bos_token_id", 1.5), ("tie_word_embeddings", True), ("tie_word_embeddings", False),
    ("scale_decoder_outputs", False),
    ("dense_act_fn", "gelu"), ("is_gated_act", True), ("dtype", "float16"),
    ("per_layer_config", {"0": {"rms_norm_eps": 1.0}}),
    ("max_window_layers", 1), ("sliding_window", None), ("final_logit_softcapping", None),
    ("global_attn_every_n_layers", 2),
    ("quantization_config", {"quant_method": "fp8"}), ("attn_logit_softcapping", 1.0),
    ("use_bidirectional_attention", True),
]  # fmt: skip


def _config(target: Path, change: Callable[[dict], None]) -> None:
    file = target / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def _pick(rng, items):
    items = list(items)
    return items[rng.integers(len(items))]


def _drop_field(target, rng):
    name = _pick(rng, json.loads((target / "config.json").read_text()))
    _config(target, lambda config: config.pop(name))
    return name


def _odd_value(target, rng):
    name, value = _pick(rng, json.loads((target / "config.json").read_text())), _pick(rng, ODD)
    _config(target, lambda config: config.update({name: value}))
    return f"{name}={str(value)[:40]!r}"


def _default_value(target, rng):
    """Sets a field, present or not, to the default of the config class."""
    config = json.loads((target / "config.json").read_text())
    cls = transformers.CONFIG_MAPPING[config["model_type"]]
    name = _pick(rng, [n for n in cls.__dataclass_fields__ if not n.endswith("_token_id")])
    value = cls.__dataclass_fields__[name].default
    value = value if isinstance(value, bool | int | float | str | list | None) else None
    _config(target, lambda config: config.update({name: value}))
    return f"{name}={value!r}"


def _added_field(target, rng):
    name, value = _pick(rng, ADDED)
    _config(target, lambda config: config.update({name: value}))
    return f"{name}={value!r}"


def _broken_config(target, rng):
    file = target / "config.json"
    text = file.read_text()
    contents = ["", "[]", "null", "3", '"x"', "{", "[" * 50_000, "{}", text[: len(text) // 2],
                "\x00\xff",
                '{"model_type": null}',
                '{"model_type": {"a": [1]}}', '{"model_type": "gpt2"}', text + "}"]  # fmt: skip
    content = _pick(rng, contents)
    file.write_text(content, encoding="latin-1")
    return repr(content[:30])


# Faults of tensors.


def _tensors(target: Path, rng, change: Callable[[dict, str], str]) -> str:
    file = target / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = _pick(rng, sorted(tensors))
    description = change(tensors, name)
    tensors = {key: x.contiguous().clone() for key, x in tensors.items()}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return f"{name} {description}"


def _reshaped(target, rng):
    def change(tensors, name):
        x = tensors[name]
        kinds = [
            x.T if x.ndim == 2 else x[None],
            x.reshape(-1),
            x[None],
            x[..., None],
            x[:-1],
            torch.cat([x, x]),
        ]
        tensors[name] = _pick(rng, kinds)
        return f"{tuple(x.shape)} -> {tuple(tensors[name].shape)}"

    return _tensors(target, rng, change)


def _typed(target, rng):
    def change(tensors, name):
        kinds = "int64 int8 bool float16 bfloat16 float64 float8_e4m3fn complex64"
        kind = getattr(torch, _pick(rng, kinds.split()))
        tensors[name] = tensors[name].to(kind)
        return str(kind)

    return _tensors(target, rng, change)


def _odd_number(target, rng):
    def change(tensors, name):
        value = _pick(rng, [float("nan"), float("inf"), -float("inf")])
        tensors[name].reshape(-1)[0] = value
        return str(value)

    return _tensors(target, rng, change)


def _dropped(target, rng):
    return _tensors(target, rng, lambda tensors, name: str(tensors.pop(name).shape))


def _renamed(target, rng):
    def change(tensors, name):
        new = _pick(rng, [name + "x", name.split(".", 1)[-1], "a\nb", "model." + name, "x" * 3000])
        tensors[new] = tensors.pop(name)
        return new[:60]

    return _tensors(target, rng, change)


DROPPED: dict[str, list[str]] = {
    "bert": ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
             "bert.embeddings.position_ids"],
    "modernbert": ["decoder.weight"],
    "gpt2": ["lm_head.weight", "transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"],
    "bloom": ["lm_head.weight"],
    "t5": ["lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
    "bart": ["lm_head.weight", "model.encoder.embed_tokens.weight",
             "model.decoder.embed_tokens.weight"],
    "marian": ["lm_head.weight", "model.encoder.embed_tokens.weight",
               "model.encoder.embed_positions.weight"],
    "opt": ["lm_head.weight"],
    "gpt_neox": ["embed_out.weight", "lm_head.weight", "gpt_neox.layers.0.attention.bias"],
}  # fmt: skip
"""Family -> tensors that it may drop. `_LIKE_LLAMA` applies to all other families."""
_LIKE_LLAMA = ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]


def _added_tensor(target, rng):
    """Adds a tensor that the family may drop: a copy of the embedding, or other values."""
    kind = json.loads((target / "config.json").read_text()).get("model_type", "")

    def change(tensors, name):
        new = _pick(rng, DROPPED.get(str(kind), _LIKE_LLAMA))
        table = next(
            (x for x in tensors.values() if x.ndim == 2 and len(x) == VOCAB), torch.ones(2, 2)
        )
        kinds = [
            table,
            table + 0.5,
            table.T,
            torch.ones(3),
            torch.ones(20, 16),
            torch.ones(VOCAB),
            table.int(),
        ]
        tensors[new] = _pick(rng, kinds)
        return f"and {new} {tuple(tensors[new].shape)}"

    return _tensors(target, rng, change)


# Faults of files.


def _cut_file(target, rng):
    file = target / _pick(rng, ["model.safetensors", "model.safetensors", "config.json"])
    data = file.read_bytes()
    size = int(_pick(rng, [0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1]))
    file.write_bytes(data[:size])
    return f"{file.name} to {size} bytes"


def _flipped(target, rng):
    file = target / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    position = int(rng.integers(0, header if rng.random() < 0.7 else len(data)))
    data[position] ^= int(1 << rng.integers(8))
    file.write_bytes(bytes(data))
    return f"byte {position} of {len(data)}"


def _sharded(target, rng):
    tensors = safetensors.torch.load_file(target / "model.safetensors")
    names, index = sorted(tensors), target / "model.safetensors.index.json"
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in shards.items():
        safetensors.torch.save_file(
            {key: tensors[key] for key in keys}, target / file, metadata={"format": "pt"}
        )
    table: dict[str, Any] = {key: file for file, keys in shards.items() for key in keys}
    odd = ["../a.safetensors", str(target / "a.safetensors"), "c.safetensors", "", ".", "..",
           "b.safetensors", 3, None, "a\nb",
           "sub/../../x", "C:\\a", "\\a.safetensors", "a.safetensors\x00"]  # fmt: skip
    if rng.random() < 0.8:
        table[names[0]] = _pick(rng, odd)
    if rng.random() < 0.8:
        (target / "model.safetensors").unlink()
    malformed = ["{}", "[]", "{", '{"weight_map": {}}', '{"weight_map": []}']
    contents = [json.dumps({"weight_map": table})] * 6 + malformed
    index.write_text(_pick(rng, contents))
    return f"{index.read_text()[:40]} {table[names[0]]!r}"


_CHANCES = {
    _drop_field: 3, _odd_value: 6, _default_value: 3, _added_field: 6, _broken_config: 1,
    _reshaped: 3, _typed: 2, _odd_number: 1,
    _dropped: 1, _renamed: 1, _added_tensor: 4, _cut_file: 1, _flipped: 2, _sharded: 3,
}  # fmt: skip
FAULTS = list(_CHANCES)
WEIGHTS = np.array(list(_CHANCES.values())) / sum(_CHANCES.values())


# The property.


def judge(name: str, directory: Path, compare: bool = True) -> str:
    """Loads a directory with `load_hf` and compares its logits with those of Transformers.

    Returns "refused: ...", "equal", or "unjudged". A directory is unjudged if Transformers does not
    load every tensor, or if `compare` is False (a comparison takes seconds). Raises AssertionError
    if the message is not one line or the logits differ. All other errors propagate.
    """
    try:
        config, params = load_hf(directory)
    except UserError as error:
        text = str(error)
        assert text and "\n" not in text and len(text) < 2000, f"not one line: {text!r}"
        return f"refused: {text}"
    reference = _reference_model(name, directory) if compare else None
    if reference is None or config.max_length < LENGTH:
        return "unjudged"
    ids = np.random.default_rng(0).integers(4, VOCAB, (2, LENGTH))
    tensor, mask = torch.tensor(ids), np.ones_like(ids, bool)
    tokens, masks = (ids,), {"padding_mask": mask}
    if config.is_encoder_decoder:
        tokens, masks = (ids, ids), masks | {"source_padding_mask": mask}
    decoder_ids = {"decoder_input_ids": tensor} if config.is_encoder_decoder else {}
    try:
        with torch.no_grad():
            expected = reference(
                tensor, attention_mask=torch.ones_like(tensor), **decoder_ids
            ).logits.numpy()
    except Exception as error:
        return f"unjudged: {type(error).__name__}"
    if not np.isfinite(expected).all():
        return "unjudged"
    logits = np.asarray(build_model(config).apply(params, *tokens, **masks))
    assert logits.shape == expected.shape
    difference = np.abs(logits - expected).max()
    assert difference < 1e-4 * (1 + np.abs(expected).max()), f"logits differ by {difference}"
    return "equal"


def _reference_model(name: str, directory: Path):
    """Returns the Transformers model of a directory, or None if it does not load every tensor."""
    config = json.loads((directory / "config.json").read_text())
    numbers = [x for x in config.values() if isinstance(x, int | float)]
    if any(abs(x) >= 10**6 for x in numbers):
        return None  # a model may allocate tables of this size
    logging.disable(logging.WARNING)
    try:
        cls = getattr(transformers, MODELS[name][0])
        model, info = cls.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    except Exception:
        return None
    finally:
        logging.disable(logging.NOTSET)
    complete = not info["missing_keys"] and not info["mismatched_keys"]
    return model.eval() if complete and not info.get("error_msgs") else None
