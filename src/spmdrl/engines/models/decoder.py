"""The dense decoder family (Qwen3, Qwen2, Llama) on packed tokens, as plain modules with transformers' names.

The caller supplies attention (`Attend`) and what is done with the head (`head`), so one definition serves training,
where rows are packed, and generation, where keys and values live in a paged cache.

Shape letters: `T` packed tokens, `D` model width, `H` query heads, `J` key and value heads, `K` head size,
`V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

R = TypeVar("R")


@dataclass(frozen=True)
class DecoderConfig:
    """What the decoder needs of a Hugging Face config.json."""

    model_type: str
    """qwen3, qwen2 or llama."""
    vocab_size: int
    """Rows of the embedding and of the head."""
    hidden_size: int
    """Model width D."""
    intermediate_size: int
    """Width of the gated feed-forward layer."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads H."""
    num_kv_heads: int
    """Key and value heads J; each serves H / J query heads."""
    head_size: int
    """Head size K; H x K need not be D."""
    rms_eps: float
    """Added to the mean square inside each RMSNorm."""
    rope_theta: float
    """Base of the rotary frequencies."""
    qk_norm: bool
    """Whether queries and keys are normalized per head before the rotation (Qwen3)."""
    attention_bias: bool
    """Whether the query, key and value projections have biases; see `output_bias` for the fourth."""
    tied_head: bool
    """Whether the head is the embedding; then there is no lm_head.weight."""
    max_positions: int
    """Longest row that the model was made for."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}; "
                "each key head serves the same number of query heads"
            )
        if self.head_size % 2:
            raise ValueError(f"head_dim {self.head_size} is odd, but the rotary embedding turns pairs; make it even")

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output projection has a bias: in Qwen2 it never does."""
        return self.attention_bias and self.model_type != "qwen2"


class Attend(Protocol):
    """Causal attention of one layer's packed queries over whatever keys and values the caller keeps."""

    def __call__(self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor) -> Tensor:
        """Return the attended values [T, H, K]; queries and keys arrive normalized and rotated."""
        ...


# A plain class, because FSDP's mixed precision casts every float tensor that it finds in a layer's arguments to
# bfloat16, also inside tuples and dataclasses, and neighbouring positions would merge.
class Rotation:
    """Rotary embedding of packed positions (RoFormer, arXiv:2104.09864, eq. 34), half-split, in float32."""

    def __init__(self, positions_T: Tensor, head_size: int, theta: float):
        exponents = torch.arange(0, head_size, 2, device=positions_T.device, dtype=torch.float32) / head_size
        angles = positions_T.to(torch.float32)[:, None, None] * (1.0 / theta**exponents)
        self.cos, self.sin = angles.cos(), angles.sin()  # each [T, 1, K / 2]

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate queries [T, H, K] or keys [T, J, K]; computed in float32, returned in their dtype."""
        first, second = heads.to(torch.float32).chunk(2, dim=-1)
        turned = torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)
        return turned.to(heads.dtype)


class RMSNorm(nn.Module):
    """Root mean square normalization over the last dim (arXiv:1910.07467, eq. 4), computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, values: Tensor) -> Tensor:
        normed = F.rms_norm(values.to(torch.float32), values.shape[-1:], eps=self.eps)
        return self.weight * normed.to(values.dtype)


class SelfAttention(nn.Module):
    """Projections, head norms and rotation around the caller's attention."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        query_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        self.layer = layer
        self.head_size = config.head_size
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_size, config.rms_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.rms_eps) if config.qk_norm else None

    def forward(self, hidden_TD: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        heads = (-1, self.head_size)
        q_THK = self.q_proj(hidden_TD).unflatten(-1, heads)
        k_TJK = self.k_proj(hidden_TD).unflatten(-1, heads)
        v_TJK = self.v_proj(hidden_TD).unflatten(-1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_THK, k_TJK = self.q_norm(q_THK), self.k_norm(k_TJK)
        attended_THK = attend(self.layer, rotation.apply(q_THK), rotation.apply(k_TJK), v_TJK)
        return self.o_proj(attended_THK.flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer (arXiv:2002.05202, eq. 6)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_TD)) * self.up_proj(hidden_TD))


class DecoderLayer(nn.Module):
    """One pre-norm block: attention, then feed-forward, each added to its input."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.self_attn = SelfAttention(config, layer)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)

    def forward(self, hidden_TD: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        hidden_TD = hidden_TD + self.self_attn(self.input_layernorm(hidden_TD), rotation, attend)
        return hidden_TD + self.mlp(self.post_attention_layernorm(hidden_TD))


class Backbone(nn.Module):
    """Everything below the head, kept as one module because transformers' names begin with `model.`."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)

    def forward(self, tokens_T: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        hidden_TD = self.embed_tokens(tokens_T)
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, rotation, attend)
        return self.norm(hidden_TD)


class Decoder(nn.Module):
    """A causal language model on packed tokens; parameters are named as transformers names them.

    Build it under `torch.device("meta")` and load weights after: the initial values mean nothing.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = None if config.tied_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, head: Callable[[Tensor, Tensor], R]) -> R:
        """Run the layers and the final norm, then return head(hidden_TD, head_weight_VD).

        The head is called inside forward so that sharding hooks see the use of its weight. Positions count from 0
        in each row.
        """
        rotation = Rotation(positions_T, self.config.head_size, self.config.rope_theta)
        hidden_TD = self.model(tokens_T, rotation, attend)
        head_weight_VD = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return head(hidden_TD, head_weight_VD)
