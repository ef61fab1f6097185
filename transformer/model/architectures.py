"""Published architectures as ModelConfigs: `architecture("gpt2_medium")`.

The sizes are those of the papers and textbooks. A family is a dictionary of shared fields and a
table of sizes: layers, d_model, heads and whatever else differs. Keyword arguments override fields:
`architecture("gpt2", num_decoder_layers=6, vocab_size=8192)`."""

from transformer.errors import look_up
from transformer.model.config import ModelConfig


def architecture(name: str, **fields) -> ModelConfig:
    """Returns the config of a published architecture, with `fields` overriding its values.

    Special tokens are None: they belong to a vocabulary, and a run takes those of its tokenizer.

    Values that depend on d_model and num_heads (d_ff, which is 4 d_model in most architectures;
    T5's logit_scale) are those of the published size. If you change d_model, change them too.

    Raises UserError for an unknown name or field."""
    return ModelConfig(**look_up(ARCHITECTURES, name, "architecture") | fields)


def _sizes(name: str, shared: dict, columns: tuple[str, ...], rows: dict) -> dict[str, dict]:
    """Returns members NAME_SIZE (NAME if SIZE is ""): `shared` plus each row of `columns`."""
    return {
        f"{name}_{size}" if size else name: shared | dict(zip(columns, values, strict=True))
        for size, values in rows.items()
    }


_DECODER = ("num_decoder_layers", "d_model", "num_heads", "d_ff")
_ENCODER = ("num_encoder_layers", "d_model", "num_heads", "d_ff")
_GROUPED = (*_DECODER, "num_kv_heads")
_BOTH = ("num_encoder_layers", "num_decoder_layers", "d_model", "num_heads", "d_ff")
_NORMAL = {"initializer": "normal", "embedding_init_std": 0.02}

_VASWANI = {  # Vaswani et al. 2017, table 3
    "family": "encoder_decoder", "vocab_size": 37_000, "max_length": 1024, "embedding_scale": True,
    "position": "sinusoidal", "norm_placement": "post", "activation": "relu",
}  # fmt: skip
_TRANSFORMER = _sizes("transformer", _VASWANI, (*_BOTH, "dropout"), {
    "base": (6, 6, 512, 8, 2048, 0.1), "big": (6, 6, 1024, 16, 4096, 0.3),
})  # fmt: skip

_TEXTBOOK = {
    "family": "decoder", "vocab_size": 8192, "d_model": 512, "position": "learned",
    "num_heads": 8, "activation": "relu",
}  # fmt: skip
_TEXTBOOKS = {
    # Hewitt's notes, section 2: attention (eqs. 7-8: one head, no scale, no biases, no W_O),
    # positions, a nonlinearity and the causal mask. No norms or residuals; d_ff = 5 d_model.
    "minimal": _TEXTBOOK | {
        "num_decoder_layers": 2, "d_ff": 2560, "num_heads": 1, "attention_scale": 1.0,
        "attention_bias": False, "attention_out": False,
        "norm_placement": {"name": "none", "residual_scale": 0.0},
    },
    # MIT 6.390, eqs. 9.9-9.12: heads summed through W_c, no feed-forward biases, post-norm.
    "mit_6390": _TEXTBOOK | {
        "num_decoder_layers": 6, "d_ff": 2048, "norm_placement": "post", "use_bias": False,
    },
    # Jurafsky & Martin, eqs. 9.10-9.46: pre-norm, attention projections without biases, a
    # feed-forward with biases, a final norm, and E^T as the unembedding.
    "jurafsky_martin": _TEXTBOOK | {
        "num_decoder_layers": 6, "d_ff": 2048, "norm_placement": "pre", "attention_bias": False,
    },
}  # fmt: skip

_BERT = _sizes("bert", _NORMAL | {  # Devlin et al. 2019, with both pre-training heads
    "family": "encoder", "vocab_size": 30_522, "max_length": 512, "token_types": 2,
    "position": "learned", "norm_placement": "post", "norm_epsilon": 1e-12, "embedding_norm": True,
    "activation": "gelu", "head_transform": True, "logit_bias": True, "pooling": "cls",
    "pooler": True, "num_labels": 2, "dropout": 0.1, "attention_dropout": 0.1,
}, _ENCODER, {"base": (12, 768, 12, 3072), "large": (24, 1024, 16, 4096)})  # fmt: skip

# Warner et al. 2024: one global layer, then two that attend to 64 tokens on either side.
_GLOBAL = {"window": 0, "position": {"name": "rotary", "theta": 160_000.0}}
_LOCAL = {"window": 65, "position": {"name": "rotary", "theta": 10_000.0}}
_MODERNBERT = _sizes("modernbert", _NORMAL | {
    "family": "encoder", "vocab_size": 50_368, "max_length": 8192,
    "layer_pattern": (_GLOBAL, _LOCAL, _LOCAL), "norm_placement": "pre", "norm_epsilon": 1e-5,
    "norm_offset": False, "embedding_norm": True, "first_norm": False, "activation": "gelu",
    "glu": True, "use_bias": False, "head_transform": True, "logit_bias": True,
}, _ENCODER, {"base": (22, 768, 12, 1152), "large": (28, 1024, 16, 2624)})  # fmt: skip

_GPT = _NORMAL | {  # Radford et al. 2019
    "family": "decoder", "vocab_size": 50_257, "position": "learned", "norm_placement": "pre",
    "norm_epsilon": 1e-5, "activation": "gelu_tanh", "residual_init_scale": True,
}  # fmt: skip
_GPT2 = _sizes("gpt2", _GPT | {
    "max_length": 1024, "dropout": 0.1, "attention_dropout": 0.1,
}, _DECODER, {
    "": (12, 768, 12, 3072), "medium": (24, 1024, 16, 4096),
    "large": (36, 1280, 20, 5120), "xl": (48, 1600, 25, 6400),
})  # fmt: skip

# Brown et al. 2020, table 2.1, all layers dense. The banded pattern of the paper is not published.
_GPT3 = _sizes("gpt3", _GPT | {"max_length": 2048}, (*_DECODER, "d_head"), {
    "small": (12, 768, 12, 3072, 64), "medium": (24, 1024, 16, 4096, 64),
    "large": (24, 1536, 16, 6144, 96), "xl": (24, 2048, 24, 8192, 128),
    "2.7b": (32, 2560, 32, 10_240, 80), "6.7b": (32, 4096, 32, 16_384, 128),
    "13b": (40, 5140, 40, 20_560, 128), "175b": (96, 12_288, 96, 49_152, 128),
})  # fmt: skip

_BLOOM = _sizes("bloom", _NORMAL | {  # Scao et al. 2022, table 3
    "family": "decoder", "vocab_size": 250_880, "max_length": 2048, "activation": "gelu_tanh",
    "position": "alibi", "norm_placement": "pre", "norm_epsilon": 1e-5, "embedding_norm": True,
}, _DECODER, {
    "560m": (24, 1024, 16, 4096), "1b1": (24, 1536, 16, 6144),
    "1b7": (24, 2048, 16, 8192), "3b": (30, 2560, 32, 10_240),
    "7b1": (30, 4096, 32, 16_384), "176b": (70, 14_336, 112, 57_344),
})  # fmt: skip

# Raffel et al. 2020. Version 1.1 has a gated feed-forward, untied embeddings and no logit_scale.
_T5_SHARED = {
    "family": "encoder_decoder", "vocab_size": 32_128, "max_length": 512, "position": "t5",
    "norm_placement": "pre", "norm": "rmsnorm", "use_bias": False, "attention_scale": 1.0,
    "embedding_init_std": 1.0, "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1,
}  # fmt: skip
_T5 = _sizes("t5", _T5_SHARED | {"activation": "relu"}, (*_BOTH, "d_head", "logit_scale"), {
    "small": (6, 6, 512, 8, 2048, 64, 512**-0.5), "base": (12, 12, 768, 12, 3072, 64, 768**-0.5),
    "large": (24, 24, 1024, 16, 4096, 64, 1024**-0.5),
    "3b": (24, 24, 1024, 32, 16_384, 128, 1024**-0.5),
    "11b": (24, 24, 1024, 128, 65_536, 128, 1024**-0.5),
}) | _sizes("t5_v1_1", _T5_SHARED | {
    "activation": "gelu_tanh", "glu": True, "tie_embeddings": False,
}, (*_BOTH, "d_head"), {
    "small": (8, 8, 512, 6, 1024, 64), "base": (12, 12, 768, 12, 2048, 64),
    "large": (24, 24, 1024, 16, 2816, 64), "xl": (24, 24, 2048, 32, 5120, 64),
    "xxl": (24, 24, 4096, 64, 10_240, 64),
})  # fmt: skip

_POST = _NORMAL | {  # Lewis et al. 2020; the Marian models of OPUS-MT (Tiedemann & Thottingal 2020)
    "family": "encoder_decoder", "norm_placement": "post", "norm_epsilon": 1e-5,
    "logit_bias": True, "dropout": 0.1,
}  # fmt: skip
_BART = _sizes("bart", _POST | {
    "vocab_size": 50_265, "max_length": 1024, "position": {"name": "learned", "offset": 2},
    "embedding_norm": True, "activation": "gelu",
}, _BOTH, {
    "base": (6, 6, 768, 12, 3072), "large": (12, 12, 1024, 16, 4096),
}) | _sizes("marian", _POST | {
    "vocab_size": 58_101, "max_length": 512, "embedding_scale": True, "activation": "silu",
    "position": {"name": "sinusoidal", "layout": "halves"},
}, _BOTH, {"": (6, 6, 512, 8, 2048)})  # fmt: skip

_OPT_SHARED = _NORMAL | {  # Zhang et al. 2022
    "family": "decoder", "vocab_size": 50_272, "max_length": 2048,
    "position": {"name": "learned", "offset": 2}, "norm_placement": "pre", "norm_epsilon": 1e-5,
    "activation": "relu", "dropout": 0.1,
}  # fmt: skip
_OPT = _sizes("opt", _OPT_SHARED, _DECODER, {
    "125m": (12, 768, 12, 3072), "1.3b": (24, 2048, 32, 8192),
    "2.7b": (32, 2560, 32, 10_240), "6.7b": (32, 4096, 32, 16_384),
    "13b": (40, 5120, 40, 20_480), "30b": (48, 7168, 56, 28_672),
    "66b": (64, 9216, 72, 36_864), "175b": (96, 12_288, 96, 49_152),
}) | _sizes("opt", _OPT_SHARED | {"norm_placement": "post", "d_embedding": 512}, _DECODER, {
    "350m": (24, 1024, 16, 4096),
})  # fmt: skip

_NEOX_SHARED = _NORMAL | {  # Black et al. 2022; Biderman et al. 2023
    "family": "decoder", "max_length": 2048, "position": {"name": "rotary", "fraction": 0.25},
    "norm_placement": "pre", "norm_epsilon": 1e-5, "parallel": True, "activation": "gelu",
    "tie_embeddings": False,
}  # fmt: skip
_NEOX = _sizes("gpt_neox", _NEOX_SHARED | {"activation": "gelu_tanh"}, (*_DECODER, "vocab_size"), {
    "20b": (44, 6144, 64, 24_576, 50_432),
}) | _sizes("pythia", _NEOX_SHARED, (*_DECODER, "vocab_size"), {
    "70m": (6, 512, 8, 2048, 50_304), "160m": (12, 768, 12, 3072, 50_304),
    "410m": (24, 1024, 16, 4096, 50_304), "1b": (16, 2048, 8, 8192, 50_304),
    "1.4b": (24, 2048, 16, 8192, 50_304), "2.8b": (32, 2560, 32, 10_240, 50_304),
    "6.9b": (32, 4096, 32, 16_384, 50_432), "12b": (36, 5120, 40, 20_480, 50_688),
})  # fmt: skip

_LLAMA_SHARED = _NORMAL | {  # Touvron et al. 2023; Dubey et al. 2024
    "family": "decoder", "position": "rotary", "norm_placement": "pre", "tie_embeddings": False,
    "norm": "rmsnorm", "norm_epsilon": 1e-5, "activation": "silu", "glu": True, "use_bias": False,
}  # fmt: skip
_LLAMA_3 = {"8b": (32, 4096, 32, 14_336, 8), "70b": (80, 8192, 64, 28_672, 8)}
_LLAMA_3_1 = {"name": "rotary", "theta": 500_000.0, "scaling": {
    "name": "llama3", "factor": 8.0, "original_length": 8192,
    "low_frequency_factor": 1.0, "high_frequency_factor": 4.0,
}}  # fmt: skip
_LLAMA = _sizes("llama2", _LLAMA_SHARED | {"vocab_size": 32_000, "max_length": 4096}, _GROUPED, {
    "7b": (32, 4096, 32, 11_008, 32), "13b": (40, 5120, 40, 13_824, 40),
    "70b": (80, 8192, 64, 28_672, 8),
}) | _sizes("llama3", _LLAMA_SHARED | {
    "vocab_size": 128_256, "max_length": 8192, "position": {"name": "rotary", "theta": 500_000.0},
}, _GROUPED, _LLAMA_3) | _sizes("llama3.1", _LLAMA_SHARED | {
    "vocab_size": 128_256, "max_length": 131_072, "position": _LLAMA_3_1,
}, _GROUPED, _LLAMA_3 | {"405b": (126, 16_384, 128, 53_248, 8)})  # fmt: skip

_MISTRAL = _sizes("mistral", _LLAMA_SHARED | {  # Jiang et al. 2023
    "vocab_size": 32_000, "max_length": 32_768, "window": 4096,
}, _GROUPED, {"7b": (32, 4096, 32, 14_336, 8)})  # fmt: skip

_QWEN_SHARED = _LLAMA_SHARED | {  # Yang et al. 2024, 2025
    "vocab_size": 151_936, "position": {"name": "rotary", "theta": 1_000_000.0},
    "norm_epsilon": 1e-6,
}  # fmt: skip
_QWEN_3 = _QWEN_SHARED | {"max_length": 40_960, "d_head": 128, "qk_norm": True}
_QWEN = _sizes("qwen2", _QWEN_SHARED | {
    "max_length": 131_072, "qkv_bias": True,
}, (*_GROUPED, "vocab_size", "tie_embeddings"), {
    "0.5b": (24, 896, 14, 4864, 2, 151_936, True), "1.5b": (28, 1536, 12, 8960, 2, 151_936, True),
    "7b": (28, 3584, 28, 18_944, 4, 152_064, False),
    "72b": (80, 8192, 64, 29_568, 8, 152_064, False),
}) | _sizes("qwen3", _QWEN_3, (*_GROUPED, "tie_embeddings"), {
    "0.6b": (28, 1024, 16, 3072, 8, True), "1.7b": (28, 2048, 16, 6144, 8, True),
    "4b": (36, 2560, 32, 9728, 8, True), "8b": (36, 4096, 32, 12_288, 8, False),
    "14b": (40, 5120, 40, 17_408, 8, False), "32b": (64, 5120, 64, 25_600, 8, False),
})  # fmt: skip

# Gemma team 2024: every other layer attends within a window.
_GEMMA2 = _sizes("gemma2", _LLAMA_SHARED | {
    "vocab_size": 256_000, "max_length": 8192, "norm_placement": "peri", "norm_epsilon": 1e-6,
    "norm_zero_centered": True, "activation": "gelu_tanh", "embedding_scale": True,
    "attention_soft_cap": 50.0, "logit_soft_cap": 30.0, "tie_embeddings": True,
    "layer_pattern": ({"window": 4096}, {"window": 0}),
}, (*_GROUPED, "d_head", "attention_scale"), {
    "2b": (26, 2304, 8, 9216, 4, 256, 256**-0.5), "9b": (42, 3584, 16, 14_336, 8, 256, 256**-0.5),
    "27b": (46, 4608, 32, 36_864, 16, 128, 144**-0.5),
})  # fmt: skip


# Gemma team 2025: in five of six layers, attention within a window and another rotary base.
def _gemma3(window: int, **scaling) -> tuple[dict, ...]:
    local = {"window": window, "position": {"name": "rotary", "theta": 10_000.0}}
    whole = {"name": "rotary", "theta": 1_000_000.0} | scaling
    return (*[local] * 5, {"window": 0, "position": whole})


_GEMMA3_LARGE = _gemma3(1024, scaling={"name": "linear", "factor": 8.0})
_GEMMA3 = _sizes("gemma3", {k: x for k, x in _LLAMA_SHARED.items() if k != "position"} | {
    "norm_placement": "peri", "norm_epsilon": 1e-6, "norm_zero_centered": True, "qk_norm": True,
    "activation": "gelu_tanh", "embedding_scale": True, "tie_embeddings": True,
}, (*_GROUPED, "d_head", "attention_scale", "vocab_size", "max_length", "layer_pattern"), {
    "1b": (26, 1152, 4, 6912, 1, 256, 256**-0.5, 262_144, 32_768, _gemma3(512)),
    "4b": (34, 2560, 8, 10_240, 4, 256, 256**-0.5, 262_208, 131_072, _GEMMA3_LARGE),
    "12b": (48, 3840, 16, 15_360, 8, 256, 256**-0.5, 262_208, 131_072, _GEMMA3_LARGE),
    "27b": (62, 5376, 32, 21_504, 16, 128, 168**-0.5, 262_208, 131_072, _GEMMA3_LARGE),
})  # fmt: skip

_OLMO2 = _sizes("olmo2", _LLAMA_SHARED | {  # OLMo team 2025
    "vocab_size": 100_352, "max_length": 4096, "position": {"name": "rotary", "theta": 500_000.0},
    "norm_placement": "res_post", "norm_epsilon": 1e-6, "qk_norm": True, "qk_norm_joint": True,
}, _GROUPED, {
    "1b": (16, 2048, 16, 8192, 16), "7b": (32, 4096, 32, 11_008, 32),
    "13b": (40, 5120, 40, 13_824, 40), "32b": (64, 5120, 40, 27_648, 8),
})  # fmt: skip

# Jiang et al. 2024; Yang et al. 2025. d_ff is the width of one expert.
_EXPERTS = _sizes("mixtral", _LLAMA_SHARED | {
    "vocab_size": 32_000, "max_length": 32_768,
    "position": {"name": "rotary", "theta": 1_000_000.0},
    "feed_forward": {"name": "experts", "num_experts": 8, "top_k": 2},
}, _GROUPED, {"8x7b": (32, 4096, 32, 14_336, 8)}) | _sizes("qwen3", _QWEN_3 | {
    "feed_forward": {"name": "experts", "num_experts": 128, "top_k": 8},
}, _GROUPED, {"30b_a3b": (48, 2048, 32, 768, 4)})  # fmt: skip

# OpenAI 2025: attention within a window in every other layer, sinks, and clipped units.
_GPT_OSS_EXPERTS = {"name": "experts", "top_k": 4, "router_use_bias": True}
_GPT_OSS = _sizes("gpt_oss", _LLAMA_SHARED | {
    "vocab_size": 201_088, "max_length": 131_072, "d_head": 64, "use_bias": True,
    "activation": "quick_gelu", "glu_limit": 7.0, "attention_sink": True,
    "layer_pattern": ({"window": 128}, {"window": 0}),
    "position": {"name": "rotary", "theta": 150_000.0, "scaling": {
        "name": "yarn", "factor": 32.0, "original_length": 4096, "truncate": False,
    }},
}, (*_GROUPED, "feed_forward"), {
    "20b": (24, 2880, 64, 2880, 8, _GPT_OSS_EXPERTS | {"num_experts": 32}),
    "120b": (36, 2880, 64, 2880, 8, _GPT_OSS_EXPERTS | {"num_experts": 128}),
})  # fmt: skip

ARCHITECTURES: dict[str, dict] = (
    _TRANSFORMER | _TEXTBOOKS | _BERT | _MODERNBERT | _GPT2 | _GPT3 | _BLOOM | _T5 | _BART
    | _OPT | _NEOX | _LLAMA | _MISTRAL | _QWEN | _GEMMA2 | _GEMMA3 | _OLMO2 | _EXPERTS
    | _GPT_OSS
)  # fmt: skip
