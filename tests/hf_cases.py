"""Models of Transformers that the tests convert."""

import hf_seq2seq_cases
import pytest

VOCAB = 61


ENCODERS_AND_DECODERS = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}


_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODERN = ENCODERS_AND_DECODERS | _TOKENS | {"cls_token_id": 1, "sep_token_id": 2}


LLAMA = ENCODERS_AND_DECODERS | _TOKENS | {"num_key_value_heads": 2}


ROPE = {"rope_theta": 5000.0, "original_max_position_embeddings": 16}


LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 1.5, 3.0, 8.0],
}  # fmt: skip


GPT2 = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
ROBERTA = {"max_position_embeddings": 42, "type_vocab_size": 1}
DISTILBERT = {
    "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40,
}  # fmt: skip


def roberta(prefix: str) -> list:
    options = ENCODERS_AND_DECODERS | ROBERTA
    return [
        (f"{prefix}ForMaskedLM", options),
        (f"{prefix}ForMaskedLM", options | {
            "tie_word_embeddings": False, "type_vocab_size": 3, "layer_norm_eps": 1e-3,
            "pad_token_id": 3,
        }),
        (f"{prefix}Model", options | {"hidden_act": "relu"}),
        (f"{prefix}Model", options | {"add_pooling_layer": False, "pad_token_id": 0}),
        (f"{prefix}ForSequenceClassification", options | {"num_labels": 5}),
        (f"{prefix}ForSequenceClassification", options | {"hidden_act": "gelu_new"}),
        (f"{prefix}ForTokenClassification", options | {"num_labels": 5}),
        (f"{prefix}ForQuestionAnswering", options),
    ]  # fmt: skip


REQUIRED = {
    "deberta-v2": {
        "relative_attention": True, "position_biased_input": False, "share_att_key": True,
        "pos_att_type": "p2c|c2p",
    },
}  # fmt: skip
"""Fields whose defaults in Transformers are not supported."""
DEBERTA = ENCODERS_AND_DECODERS | REQUIRED["deberta-v2"] | {
    "norm_rel_ebd": "layer_norm", "position_buckets": 4, "max_relative_positions": 5,
    "pooler_hidden_size": 32,
}  # fmt: skip


def classifier(name: str, options: dict) -> tuple:
    """Returns the case of a decoder that classifies sequences. One is shorter, with padding."""
    return f"{name}ForSequenceClassification", options | {"num_labels": 3, "pad_token_id": 0}


CASES = {
    "roberta": roberta("Roberta"),
    "xlm-roberta": roberta("XLMRoberta"),
    "camembert": roberta("Camembert"),
    "distilbert": [
        ("DistilBertForMaskedLM", DISTILBERT),
        ("DistilBertForMaskedLM", DISTILBERT | {
            "tie_word_embeddings": False, "activation": "relu", "sinusoidal_pos_embds": True,
        }),
        ("DistilBertModel", DISTILBERT),
        ("DistilBertForTokenClassification", DISTILBERT | {"num_labels": 5}),
        ("DistilBertForQuestionAnswering", DISTILBERT),
    ],
    "deberta-v2": [
        ("DebertaV2ForMaskedLM", DEBERTA),
        ("DebertaV2ForMaskedLM", DEBERTA | {
            "position_buckets": -1, "max_relative_positions": -1, "norm_rel_ebd": "none",
            "type_vocab_size": 3, "layer_norm_eps": 1e-3, "hidden_act": "relu",
            "pos_att_type": ["c2p", "p2c"],
        }),
        ("DebertaV2ForMaskedLM", DEBERTA | {"tie_word_embeddings": False}),
        ("DebertaV2Model", DEBERTA | {"layer_norm_eps": 0.1}),
        ("DebertaV2ForSequenceClassification", DEBERTA | {"num_labels": 5}),
        ("DebertaV2ForSequenceClassification", DEBERTA | {"pooler_hidden_act": "tanh"}),
        ("DebertaV2ForTokenClassification", DEBERTA | {"num_labels": 5}),
        ("DebertaV2ForQuestionAnswering", DEBERTA),
    ],
    "bert": [
        ("BertForPreTraining", ENCODERS_AND_DECODERS),
        ("BertForMaskedLM", ENCODERS_AND_DECODERS | {
            "hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-3,
        }),
        ("BertForMaskedLM", ENCODERS_AND_DECODERS | {
            "tie_word_embeddings": False, "hidden_act": "gelu_new",
        }),
        ("BertForSequenceClassification", ENCODERS_AND_DECODERS | {"num_labels": 5}),
        ("BertForSequenceClassification", ENCODERS_AND_DECODERS),  # config.json omits 2 labels
        ("BertForTokenClassification", ENCODERS_AND_DECODERS | {"num_labels": 5}),
        ("BertForQuestionAnswering", ENCODERS_AND_DECODERS),
        ("BertModel", ENCODERS_AND_DECODERS),
        ("BertModel", ENCODERS_AND_DECODERS | {"tie_word_embeddings": False}),
        ("BertForTokenClassification", ENCODERS_AND_DECODERS | {"tie_word_embeddings": False}),
        ("BertModel", ENCODERS_AND_DECODERS | {"add_pooling_layer": False}),
    ],
    "modernbert": [
        ("ModernBertForMaskedLM", MODERN | {"local_attention": 6, "num_hidden_layers": 7}),
        ("ModernBertForMaskedLM", MODERN | {
            "local_attention": 4, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
            "classifier_bias": True, "hidden_activation": "silu", "classifier_activation": "silu",
            "tie_word_embeddings": False, "norm_eps": 1e-3,
            "layer_types": [
                "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
            ],
        }),
    ],
    "gpt2": [
        ("GPT2LMHeadModel", GPT2),
        ("GPT2LMHeadModel", GPT2 | {
            "n_inner": 40, "activation_function": "relu", "scale_attn_weights": False,
            "layer_norm_epsilon": 1e-3, "scale_attn_by_inverse_layer_idx": True,
        }),
        ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu"}),
        classifier("GPT2", GPT2),
    ],
    "bloom": [
        ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "pad_token_id": 3}),
        ("BloomForCausalLM", {
            "hidden_size": 36, "n_layer": 2, "n_head": 6, "pad_token_id": 3,
            "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False,
        }),
        classifier("Bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4}),
    ],
    "opt": [
        ("OPTForCausalLM", {
            "hidden_size": 32, "num_hidden_layers": 3, "ffn_dim": 48, "num_attention_heads": 4,
            "max_position_embeddings": 40, "word_embed_proj_dim": 32,
        }),
        ("OPTForCausalLM", {
            "hidden_size": 32, "num_hidden_layers": 3, "ffn_dim": 48, "num_attention_heads": 4,
            "max_position_embeddings": 40, "word_embed_proj_dim": 20,
            "do_layer_norm_before": False,
        }),
        ("OPTForCausalLM", {
            "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48, "num_attention_heads": 2,
            "max_position_embeddings": 40, "word_embed_proj_dim": 32, "enable_bias": False,
            "layer_norm_elementwise_affine": False, "activation_function": "gelu",
        }),
        ("OPTForCausalLM", {
            "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48, "num_attention_heads": 2,
            "max_position_embeddings": 40, "word_embed_proj_dim": 32,
            "_remove_final_layer_norm": True,
        }),
    ],
    "gpt_neox": [
        ("GPTNeoXForCausalLM", ENCODERS_AND_DECODERS),
        ("GPTNeoXForCausalLM", ENCODERS_AND_DECODERS | {
            "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new",
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5,
            },
        }),
        ("GPTNeoXForCausalLM", ENCODERS_AND_DECODERS | {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "linear", "factor": 3.0, "rope_theta": 300.0,
                "partial_rotary_factor": 1.0,
            },
        }),
        classifier("GPTNeoX", ENCODERS_AND_DECODERS),
    ],
    "llama": [
        ("LlamaForCausalLM", LLAMA),
        ("LlamaForCausalLM", LLAMA | {
            "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1,
            "head_dim": 12, "hidden_act": "gelu",
        }),
        ("LlamaForCausalLM", LLAMA | {
            "mlp_bias": True, "rms_norm_eps": 1e-3,
            "rope_parameters": ROPE | {
                "rope_type": "llama3", "factor": 4.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            },
        }),
        ("LlamaForCausalLM", LLAMA | {"rope_parameters": ROPE | {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0,
        }}),
        ("LlamaForCausalLM", LLAMA | {"rope_parameters": ROPE | {
            "rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0,
            "attention_factor": 1.3, "truncate": False, "rope_theta": 50.0,
        }}),
        ("LlamaForCausalLM", LLAMA | {"rope_parameters": ROPE | {
            "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 2.0,
        }}),
        ("LlamaForCausalLM", LLAMA | {"rope_parameters": {
            "rope_theta": 5000.0, "rope_type": "linear", "factor": 2.5,
        }}),
        ("LlamaForCausalLM", LLAMA | {"max_position_embeddings": 12, "rope_parameters": {
            "rope_theta": 100.0, "rope_type": "dynamic", "factor": 2.0,
        }}),
        classifier("Llama", LLAMA),
    ],
    "mistral": [
        ("MistralForCausalLM", LLAMA | {"sliding_window": 5, "head_dim": 10}),
        ("MistralForCausalLM", LLAMA | {"sliding_window": None}),
    ],
    "qwen2": [
        ("Qwen2ForCausalLM", LLAMA),
        ("Qwen2ForCausalLM", LLAMA | {
            "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3,
            "tie_word_embeddings": True,
        }),
    ],
    "qwen3": [
        ("Qwen3ForCausalLM", LLAMA | {"head_dim": 12}),
        ("Qwen3ForCausalLM", LLAMA | {
            "attention_bias": True, "use_sliding_window": True, "sliding_window": 4,
            "max_window_layers": 2,
        }),
        classifier("Qwen3", LLAMA | {"head_dim": 12}),
    ],
    "smollm3": [
        ("SmolLM3ForCausalLM", LLAMA),
        ("SmolLM3ForCausalLM", LLAMA | {
            "no_rope_layers": [1, 1, 0, 0], "use_sliding_window": True, "sliding_window": 5,
            "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        }),
    ],
    "phi3": [
        ("Phi3ForCausalLM", LLAMA),
        ("Phi3ForCausalLM", LLAMA | {
            "sliding_window": 6, "tie_word_embeddings": True, "rms_norm_eps": 1e-3,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5,
            },
        }),
        ("Phi3ForCausalLM", LLAMA | {
            "original_max_position_embeddings": 30, "rope_parameters": LONG_ROPE,
        }),
        ("Phi3ForCausalLM", LLAMA | {
            "original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE,
        }),
    ],
    "gemma": [
        ("GemmaForCausalLM", LLAMA | {"head_dim": 12}),
        ("GemmaForCausalLM", LLAMA | {
            "head_dim": 8, "num_key_value_heads": 1, "hidden_act": "gelu", "attention_bias": True,
        }),
    ],
    "gemma3_text": [
        ("Gemma3ForCausalLM", LLAMA | {
            "head_dim": 12, "sliding_window": 5, "num_hidden_layers": 7,
        }),
        ("Gemma3ForCausalLM", LLAMA | {
            "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 30,
            "final_logit_softcapping": 1.5,
            "layer_types": [
                "full_attention", "sliding_attention", "sliding_attention", "full_attention",
            ],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        }),
        classifier("Gemma3Text", LLAMA | {"head_dim": 12, "sliding_window": 5}),
    ],
    "olmo2": [
        ("Olmo2ForCausalLM", LLAMA),
        ("Olmo2ForCausalLM", LLAMA | {
            "attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True,
        }),
    ],
    "olmo3": [
        ("Olmo3ForCausalLM", LLAMA | {"sliding_window": 5}),
        ("Olmo3ForCausalLM", LLAMA | {
            "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": ROPE | {"rope_type": "yarn", "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        }),
    ],
    "mixtral": [
        ("MixtralForCausalLM", LLAMA | {"num_local_experts": 4}),
        ("MixtralForCausalLM", LLAMA | {
            "num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 5, "head_dim": 12,
        }),
    ],
    "qwen3_moe": [
        ("Qwen3MoeForCausalLM", LLAMA | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        }),
        ("Qwen3MoeForCausalLM", LLAMA | {
            "num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 24,
            "norm_topk_prob": True, "attention_bias": True, "use_sliding_window": True,
            "sliding_window": 6,
        }),
    ],
    "gpt_oss": [
        ("GptOssForCausalLM", LLAMA | {
            "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5,
            "swiglu_limit": 0.05,
        }),
        ("GptOssForCausalLM", LLAMA | {
            "num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 12, "swiglu_alpha": 1.0,
            "swiglu_limit": 0.1, "attention_bias": False, "rope_parameters": ROPE | {
                "rope_type": "yarn", "factor": 4.0, "truncate": True,
            },
            "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 4,
        }),
        ("GptOssForCausalLM", LLAMA | {
            "num_local_experts": 2, "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        }),
    ],
    "gemma2": [
        ("Gemma2ForCausalLM", LLAMA | {"head_dim": 12, "sliding_window": 5}),
        ("Gemma2ForCausalLM", LLAMA | {
            "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 30,
            "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5,
            "layer_types": [
                "full_attention", "sliding_attention", "sliding_attention", "full_attention",
            ],
        }),
        ("Gemma2ForCausalLM", LLAMA | {
            "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True,
        }),
        classifier("Gemma2", LLAMA | {"head_dim": 12, "sliding_window": 5}),
    ],
    **hf_seq2seq_cases.CASES,
}  # fmt: skip
"""Family -> (class, options that differ from its defaults)."""


FLAT = [
    pytest.param(family, *case, id=f"{family}-{i}")
    for family, cases in CASES.items()
    for i, case in enumerate(cases)
]
