"""Tiny Transformers models of every family, saved as directories."""

from pathlib import Path

import torch
import transformers

VOCAB = 23
_SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 20,
}  # fmt: skip
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = _SIZES | _IDS | {"num_key_value_heads": 2}
_BART = _IDS | {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 20,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}

MODELS: dict[str, tuple[str, dict]] = {
    "bert": ("BertForMaskedLM", _SIZES),
    "bert-untied": ("BertForMaskedLM", _SIZES | {"tie_word_embeddings": False}),
    "bert-labels": ("BertForSequenceClassification", _SIZES),
    "modernbert": (
        "ModernBertForMaskedLM",
        _SIZES | _IDS | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 20}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
    ),
    "bart": ("BartForConditionalGeneration", _BART),
    "marian": ("MarianMTModel", _BART),
    "opt": (
        "OPTForCausalLM",
        {"hidden_size": 16, "num_hidden_layers": 2, "ffn_dim": 24, "num_attention_heads": 4,
         "max_position_embeddings": 20},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        _SIZES | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": ("MistralForCausalLM", _LLAMA | {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA | {"head_dim": 6}),
    "gemma2": ("Gemma2ForCausalLM", _LLAMA | {"head_dim": 6, "sliding_window": 5}),
}  # fmt: skip
"""Name -> (Transformers class, options of a tiny model), for every family."""


def save(name: str, directory: Path, seed: int = 0) -> Path:
    """Saves the named model with noise added to its initial parameters. Returns the directory."""
    cls, options = getattr(transformers, MODELS[name][0]), MODELS[name][1]
    torch.manual_seed(seed)
    model = cls(cls.config_class(vocab_size=VOCAB, **options)).eval().float()
    noise = 0.1 if name == "t5" else 0.3  # T5 does not scale its attention
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory
