"""Each family in the sizes of a published model, but with two layers: on fake tensors, size costs nothing."""

from __future__ import annotations

from dataclasses import replace

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.rope_scaling import Llama3Scaling, ProportionalScaling, YarnScaling
from spmdrl.nouns.settings.model_sizes import (
    ClampedGate,
    DeltaSizes,
    IndexerSizes,
    KeySizes,
    LatentConfig,
    MoeConfig,
    WindowConfig,
)

LLAMA = DecoderConfig(
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    rms_eps=1e-5,
    rope_theta=500000.0,
    qk_norm=False,
    attention_bias=False,
    tied_head=False,
    max_positions=131072,
    rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192),
)
QWEN3 = replace(
    LLAMA, model_type="qwen3", vocab_size=151936, intermediate_size=12288, qk_norm=True, rope_scaling=None, rms_eps=1e-6
)
QWEN3_5 = replace(
    QWEN3, model_type="qwen3_5_text", vocab_size=248320, hidden_size=2560, intermediate_size=9216, num_heads=16,
    num_kv_heads=4, head_size=256, rotary_size=64, rope_theta=1e7, attention_gate=True, norm_offset=1.0,
    delta=DeltaSizes(
        layers=(0,), num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, conv_width=4
    ),
)  # fmt: skip
SHARED = MoeConfig(
    num_experts=256, experts_per_token=8, intermediate_size=512, normalize=True, shared_size=512, shared_gate=True
)
PUBLISHED: dict[str, DecoderConfig] = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, model_type="mistral", vocab_size=32768, rope_scaling=None),
    "smollm3": replace(
        LLAMA, model_type="smollm3", hidden_size=2048, intermediate_size=11008, num_heads=16, num_kv_heads=4,
        tied_head=True, rope_scaling=None, unrotated_layers=(1,),
    ),
    "seed_oss": replace(
        LLAMA, model_type="seed_oss", vocab_size=155136, hidden_size=5120, intermediate_size=27648, num_heads=80,
        attention_bias=True, rope_scaling=None,
    ),
    "qwen2": replace(
        LLAMA, model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_heads=14,
        num_kv_heads=2, head_size=64, attention_bias=True, tied_head=True, rope_scaling=None,
    ),
    "qwen3": QWEN3,
    "qwen3_moe": replace(
        QWEN3, model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_kv_heads=4,
        moe=MoeConfig(num_experts=128, experts_per_token=8, intermediate_size=768, normalize=True),
    ),
    "deepseek_v3": replace(
        LLAMA, model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_heads=128,
        num_kv_heads=128, head_size=192, rms_eps=1e-6, rope_theta=10000.0, max_positions=163840,
        rope_scaling=YarnScaling(
            factor=40.0, original_positions=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
        ),
        latent=LatentConfig(query_rank=1536, key_value_rank=512, plain_size=128, rotary_size=64, value_size=128),
        moe=MoeConfig(
            num_experts=256, experts_per_token=8, intermediate_size=2048, scoring="sigmoid", normalize=True,
            weight_scale=2.5, num_groups=8, groups_per_token=4, num_shared_experts=1, dense_layers=(0,),
        ),
    ),
    "glm4_moe": replace(
        LLAMA, model_type="glm4_moe", vocab_size=151552, intermediate_size=10944, num_heads=96, attention_bias=True,
        rotary_size=64, rope_theta=1e6, rope_scaling=None,
        moe=MoeConfig(
            num_experts=128, experts_per_token=8, intermediate_size=1408, scoring="sigmoid", normalize=True,
            num_shared_experts=1, dense_layers=(0,),
        ),
    ),
    "glm_moe_dsa": replace(
        LLAMA, model_type="glm_moe_dsa", vocab_size=154880, hidden_size=6144, intermediate_size=12288, num_heads=64,
        num_kv_heads=64, head_size=256, rope_theta=1e6, max_positions=2048, rope_scaling=None,
        latent=LatentConfig(
            query_rank=2048, key_value_rank=512, plain_size=192, rotary_size=64, value_size=256,
            indexer=IndexerSizes(
                num_heads=32, head_size=128, num_chosen=2048, shared_layers=(), max_positions=202752
            ),
        ),
        moe=MoeConfig(
            num_experts=256, experts_per_token=8, intermediate_size=2048, scoring="sigmoid", normalize=True,
            weight_scale=2.5, num_shared_experts=1, dense_layers=(0,),
        ),
    ),
    "gpt_oss": replace(
        LLAMA, model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_heads=64,
        head_size=64, attention_bias=True, rope_theta=150000.0, attention_sinks=True, window=WindowConfig(128, (0,)),
        rope_scaling=YarnScaling(factor=32.0, original_positions=4096, truncate=False),
        moe=MoeConfig(
            num_experts=32, experts_per_token=4, intermediate_size=2880, normalize=True, bias=True,
            clamp=ClampedGate(7.0, 1.702),
        ),
    ),
    "gemma3_text": replace(
        LLAMA, model_type="gemma3_text", vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_heads=8,
        num_kv_heads=4, head_size=256, rms_eps=1e-6, rope_theta=1e6, qk_norm=True, tied_head=True, rope_scaling=None,
        window=WindowConfig(1024, (0,), rope_theta=10000.0), attention_scale=256**-0.5, norm_offset=1.0,
        output_norms=True, scales_embedding=True, gelu=True,
    ),
    "gemma4_text": replace(
        LLAMA, model_type="gemma4_text", vocab_size=262144, hidden_size=5376, intermediate_size=21504, num_heads=32,
        num_kv_heads=16, head_size=256, rms_eps=1e-6, rope_theta=1e6, qk_norm=True, v_norm=True, tied_head=True,
        window=WindowConfig(1024, (0,), rope_theta=10000.0), full=KeySizes(512, 4, are_values=True),
        rope_scaling=ProportionalScaling(0.25), attention_scale=1.0, norm_offset=0.0, output_norms=True,
        scales_layers=True, scales_embedding=True, gelu=True, logit_softcap=30.0,
    ),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(QWEN3_5, model_type="qwen3_5_moe_text", hidden_size=2048, moe=SHARED),
    "qwen3_next": replace(QWEN3_5, model_type="qwen3_next", vocab_size=151936, hidden_size=2048, moe=SHARED),
}  # fmt: skip
