"""What a row costs a decoder."""

from __future__ import annotations

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.nouns.partition import RowCost
from spmdrl.nouns.settings.model_sizes import MoeConfig


def row_cost_of(config: DecoderConfig) -> RowCost:
    """Floating-point operations of a forward pass: two for each weight that a token meets, causal attention."""
    num_sparse = 0 if config.moe is None else config.num_layers - len(config.moe.dense_layers)
    weights = config.num_layers * _attention_weights(config) + config.num_outputs * config.hidden_size
    weights += (config.num_layers - num_sparse) * 3 * config.hidden_size * config.intermediate_size
    if config.moe is not None:
        weights += num_sparse * _sparse_weights(config.hidden_size, config.moe)
    # A token attends to half of its row on average.
    attended = config.num_layers * config.num_heads * (config.head_size + config.value_head_size)
    return RowCost(per_token=2 * weights, per_token_squared=attended)


def _attention_weights(config: DecoderConfig) -> int:
    """Elements of one layer's projections around attention."""
    latent = config.latent
    if latent is None:
        return config.hidden_size * config.head_size * 2 * (config.num_heads + config.num_kv_heads)
    query_size = config.num_heads * config.head_size
    if latent.query_rank is None:
        queries = config.hidden_size * query_size
    else:
        queries = latent.query_rank * (config.hidden_size + query_size)
    compressed = config.hidden_size * (latent.key_value_rank + latent.rotary_size)
    expanded = latent.key_value_rank * config.num_heads * (latent.plain_size + latent.value_size)
    return queries + compressed + expanded + config.num_heads * latent.value_size * config.hidden_size


def _sparse_weights(hidden_size: int, moe: MoeConfig) -> int:
    """Elements that a token meets in one sparse layer: the router, its own experts and the shared ones."""
    num_met = moe.experts_per_token + moe.num_shared_experts
    return hidden_size * (moe.num_experts + 3 * moe.intermediate_size * num_met)
