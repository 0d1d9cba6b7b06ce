"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; in V3 unchanged).

Keys and values of all heads are computed from one small vector per token, and so are queries if `query_rank` is given.
A part of each key is rotated, which is the same in all heads.

Shape letters: `T` packed tokens, `D` model width, `H` heads, `K` head size of queries and keys, `U` head size of
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from spmdrl.engines.models.layers import Attend, Linear, RMSNorm, Rotation
from spmdrl.engines.models.mixers import INPUTS, OUTPUTS, HeadCut, KeyBlocks, Rope, Rotations
from spmdrl.nouns.settings.model_sizes import IndexerSizes, LatentConfig

# Constant in transformers' DeepSeek norms of the compressed vectors, whatever rms_norm_eps is.
_LATENT_EPS = 1e-6


@dataclass(frozen=True)
class LatentMixer:
    """Sizes of one layer's latent attention; a `Mixer`."""

    name: ClassVar[str] = "self_attn"

    sizes: LatentConfig
    hidden_size: int
    num_heads: int
    rope: Rope
    bias: bool
    """True if the compressing and the output projections have biases."""

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def cuts(self) -> Mapping[str, HeadCut]:
        by_heads = HeadCut(OUTPUTS, self.num_heads)
        return {
            "q_proj": by_heads,
            "q_b_proj": by_heads,
            "kv_b_proj": by_heads,
            "o_proj": HeadCut(INPUTS, self.num_heads),
        }

    @property
    def num_weights(self) -> int:
        sizes = self.sizes
        query_size = self.num_heads * sizes.head_size
        if sizes.query_rank is None:
            queries = self.hidden_size * query_size
        else:
            queries = sizes.query_rank * (self.hidden_size + query_size)
        compressed = self.hidden_size * (sizes.key_value_rank + sizes.rotary_size)
        expanded = sizes.key_value_rank * self.num_heads * (sizes.plain_size + sizes.value_size)
        return queries + compressed + expanded + self.num_heads * sizes.value_size * self.hidden_size

    @property
    def attended_size(self) -> int:
        return self.num_heads * (self.sizes.head_size + self.sizes.value_size)

    def state(self, num_ranks: int) -> KeyBlocks:
        return KeyBlocks(self.num_heads // num_ranks, self.sizes.head_size, self.sizes.value_size)

    def build(self, layer: int) -> nn.Module:
        return LatentAttention(self, layer)


class LatentAttention(nn.Module):
    """Compression, expansion and rotation around the caller's attention, with transformers' names."""

    def __init__(self, mixer: LatentMixer, layer: int):
        super().__init__()
        self.config, self.rope = mixer.sizes, mixer.rope
        self.layer = layer
        config, hidden_size, num_heads, bias = mixer.sizes, mixer.hidden_size, mixer.num_heads, mixer.bias
        query_size = num_heads * config.head_size
        if config.query_rank is None:
            self.q_proj = Linear(hidden_size, query_size, bias=False)
        else:
            self.q_a_proj = Linear(hidden_size, config.query_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.query_rank, _LATENT_EPS)
            self.q_b_proj = Linear(config.query_rank, query_size, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden_size, config.key_value_rank + config.rotary_size, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.key_value_rank, _LATENT_EPS)
        expanded_size = num_heads * (config.plain_size + config.value_size)
        self.kv_b_proj = Linear(config.key_value_rank, expanded_size, bias=False)
        self.o_proj = Linear(num_heads * config.value_size, hidden_size, bias=bias)
        if config.indexer is not None and layer not in config.indexer.shared_layers:
            self.indexer = Indexer(config, config.indexer, hidden_size)

    def forward(self, hidden_TD: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        rotation = rotations.of(self.rope)
        q_THK = self._queries(hidden_TD, rotation)
        k_THK, v_THU = self._keys_and_values(hidden_TD, rotation)
        return self.o_proj(attend(self.layer, q_THK, k_THK, v_THU).flatten(-2))

    def _queries(self, hidden_TD: Tensor, rotation: Rotation) -> Tensor:
        if self.config.query_rank is None:
            queries = self.q_proj(hidden_TD)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_TD)))
        sizes = [self.config.plain_size, self.config.rotary_size]
        plain, rotary = queries.unflatten(-1, (-1, self.config.head_size)).split(sizes, dim=-1)
        q_THK = torch.cat((plain, self._rotate(rotary, rotation)), dim=-1)
        factor = rotation.latent_softmax_factor
        return q_THK if factor == 1 else q_THK * factor

    def _keys_and_values(self, hidden_TD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        sizes = [self.config.key_value_rank, self.config.rotary_size]
        compressed, rotary = self.kv_a_proj_with_mqa(hidden_TD).split(sizes, dim=-1)
        sizes = [self.config.plain_size, self.config.value_size]
        expanded = self.kv_b_proj(self.kv_a_layernorm(compressed)).unflatten(-1, (-1, sum(sizes)))
        plain, v_THU = expanded.split(sizes, dim=-1)
        turned = self._rotate(rotary[:, None], rotation).expand(-1, plain.shape[1], -1)
        return torch.cat((plain, turned), dim=-1), v_THU

    def _rotate(self, heads: Tensor, rotation: Rotation) -> Tensor:
        return rotation.apply_to_pairs(heads) if self.config.rotates_neighbours else rotation.apply(heads)


class Indexer(nn.Module):
    """Weights that choose among longer rows' tokens, with transformers' names: carried along, without gradients."""

    def __init__(self, latent: LatentConfig, sizes: IndexerSizes, hidden_size: int):
        super().__init__()
        assert latent.query_rank is not None, "an indexer's queries are computed from the compressed ones"
        self.wq_b = nn.Linear(latent.query_rank, sizes.num_heads * sizes.head_size, bias=False)
        self.wk = nn.Linear(hidden_size, sizes.head_size, bias=False)
        self.k_norm = nn.LayerNorm(sizes.head_size)
        self.weights_proj = nn.Linear(hidden_size, sizes.num_heads, bias=False)
