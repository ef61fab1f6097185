"""Encoder-decoders of Transformers that the tests convert."""

BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 40,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}  # fmt: skip

T5 = {
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}

GEMMA = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 48, "sliding_window": 5,
    "max_position_embeddings": 40, "query_pre_attn_scalar": 24, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def t5gemma(**changes) -> tuple[str, dict]:
    """Returns a case of T5Gemma. `changes` are those of `encoder`, `decoder` and other fields."""
    stacks = {side: GEMMA | changes.pop(side, {}) for side in ("encoder", "decoder")}
    return "T5GemmaForConditionalGeneration", stacks | {"pad_token_id": 0} | changes


CASES = {
    "t5": [
        ("T5ForConditionalGeneration", T5),
        ("T5EncoderModel", T5 | {"feed_forward_proj": "gated-gelu"}),
        ("T5ForConditionalGeneration", T5 | {
            "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
        }),
        ("T5ForConditionalGeneration", T5 | {
            "feed_forward_proj": "gated-silu", "num_decoder_layers": 2,
            "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
            "layer_norm_epsilon": 1e-3,
        }),
    ],
    "mt5": [
        ("MT5ForConditionalGeneration", T5),
        ("MT5ForConditionalGeneration", T5 | {
            "feed_forward_proj": "relu", "num_decoder_layers": 2, "layer_norm_epsilon": 1e-3,
            "relative_attention_num_buckets": 7, "relative_attention_max_distance": 12,
        }),
    ],
    "bart": [
        ("BartForConditionalGeneration", BART),
        ("BartForConditionalGeneration", BART | {
            "scale_embedding": True, "activation_function": "relu",
        }),
        ("BartForConditionalGeneration", BART | {
            "tie_word_embeddings": False, "decoder_ffn_dim": 40, "decoder_attention_heads": 2}),
    ],
    "marian": [
        ("MarianMTModel", BART | {
            "activation_function": "swish", "scale_embedding": True, "pad_token_id": 60,
            "decoder_start_token_id": 60,
        }),
        ("MarianMTModel", BART | {
            "activation_function": "relu", "decoder_layers": 1, "encoder_ffn_dim": 20}),
        ("MarianMTModel", BART | {"tie_word_embeddings": False}),
    ],
    "mbart": [
        ("MBartForConditionalGeneration", BART),
        ("MBartForConditionalGeneration", BART | {
            "scale_embedding": True, "activation_function": "relu", "tie_word_embeddings": False,
        }),
    ],
    "m2m_100": [
        ("M2M100ForConditionalGeneration", BART),
        ("M2M100ForConditionalGeneration", BART | {
            "scale_embedding": False, "activation_function": "gelu", "tie_word_embeddings": False,
            "pad_token_id": 3, "d_model": 28,
        }),
    ],
    "t5gemma": [
        t5gemma(encoder={
            "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10,
            "intermediate_size": 56, "num_hidden_layers": 2, "sliding_window": 3,
        }),
        t5gemma(
            tie_word_embeddings=False,
            encoder={"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            decoder={"final_logit_softcapping": None},
        ),
        t5gemma(
            encoder={"layer_types": 3 * ["full_attention"], "attention_bias": True},
            decoder={"layer_types": 3 * ["full_attention"], "attention_bias": True},
        ),
        t5gemma(),
    ],
}  # fmt: skip
"""Family -> (class, options that differ from its defaults)."""
