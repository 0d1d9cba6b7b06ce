"""Decoders of families beyond the sizes that `model.make` has, and a small one of each family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import decoder_config
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.nouns.settings.model_sizes import IndexerSizes, WindowConfig

# Widths that no vector register divides, and heads of 10 dims.
SPARSE = {"num_experts_per_tok": 3, "moe_intermediate_size": 25}
ODD = {"hidden_size": 40, "num_hidden_layers": 3, "intermediate_size": 50, "max_position_embeddings": 256}
WINDOW = 9


def latent_decoder(*, value_size: int, query_rank: int, **sizes: Any) -> DecoderConfig:
    """A deepseek_v3 whose values and queries have other sizes than its keys."""
    made = decoder_config(MakeConfig(model_type="deepseek_v3", **sizes))
    assert made.latent is not None
    return replace(made, latent=replace(made.latent, value_size=value_size, query_rank=query_rank))


def small_decoders() -> dict[str, DecoderConfig]:
    """A decoder of each family, with whatever only that family has."""
    qwen3 = decoder_config(MakeConfig(**ODD))
    plain = replace(qwen3, qk_norm=False)
    latent = latent_decoder(value_size=6, query_rank=7, **SPARSE, **ODD)
    assert latent.latent is not None
    indexer = IndexerSizes(
        num_heads=2, head_size=4, num_chosen=latent.max_positions, shared_layers=(1,), max_positions=2048
    )
    made: dict[str, dict[str, Any]] = {
        "qwen3_moe": SPARSE,
        "glm4_moe": SPARSE,
        "gpt_oss": {**SPARSE, "sliding_window": WINDOW},
        "gemma3_text": {"sliding_window": WINDOW},
        "gemma4_text": {"sliding_window": WINDOW},
        "qwen3_5_text": {},
        "qwen3_5_moe_text": SPARSE,
        "qwen3_next": {**SPARSE, "first_k_dense_replace": 1},
    }
    return {
        "llama": replace(plain, model_type="llama", attention_bias=True, mlp_bias=True),
        "mistral": replace(plain, model_type="mistral", window=WindowConfig(WINDOW, layers=(0, 1, 2))),
        "smollm3": replace(
            plain, model_type="smollm3", unrotated_layers=(1,), window=WindowConfig(WINDOW, layers=(1,))
        ),
        "seed_oss": replace(plain, model_type="seed_oss", attention_bias=True, mlp_bias=True),
        "qwen2": replace(plain, model_type="qwen2", attention_bias=True, window=WindowConfig(WINDOW, layers=(1, 2))),
        "qwen3": replace(qwen3, tied_head=False),
        "deepseek_v3": latent,
        "glm_moe_dsa": replace(latent, model_type="glm_moe_dsa", latent=replace(latent.latent, indexer=indexer)),
        **{family: decoder_config(MakeConfig(model_type=family, **ODD, **sizes)) for family, sizes in made.items()},
    }
