"""Sizes of models that other trainers measured, as their config.json has them."""

from __future__ import annotations

from collections.abc import Mapping

_QWEN3 = {
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "attention_bias": False, "vocab_size": 151936,
    "max_position_embeddings": 262144, "head_dim": 128, "num_key_value_heads": 8,
}  # fmt: skip
_EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False, "num_key_value_heads": 4,
}  # fmt: skip
_LLAMA = {
    "model_type": "qwen3", "vocab_size": 128256, "tie_word_embeddings": False, "rope_theta": 5e5,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, object]] = {
    "Qwen3-0.6B": _QWEN3 | {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "intermediate_size": 3072, "tie_word_embeddings": True,
    },
    "Qwen3-4B": _QWEN3 | {
        "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "intermediate_size": 9728, "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": _QWEN3 | _EXPERTS | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "Qwen3-235B-A22B": _QWEN3 | _EXPERTS | {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_qk_norm": False,
        "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "vocab_size": 151552, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    # As a Qwen3 of Llama's sizes, which norms queries and keys besides.
    "Llama-3.1-8B": _QWEN3 | _LLAMA | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336,
    },
    "Llama-3.1-70B": _QWEN3 | _LLAMA | {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
    },
}  # fmt: skip
