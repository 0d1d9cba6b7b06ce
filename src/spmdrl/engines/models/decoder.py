"""Decoder families (Llama, Qwen2, Qwen3, dense or sparse, DeepSeek-V3 and kin) on packed tokens, as plain modules.

The caller supplies attention (`Mix`) and the use of the head (`head`), so one definition serves training, where rows
are packed, and generation, where keys and values live in a paged cache.

Shape letters: `T` packed tokens, `D` model width, `H` query heads, `J` key and value heads, `K` head size,
`V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from spmdrl.engines.models.attention import AttentionConfig
from spmdrl.engines.models.delta_net import DeltaConfig
from spmdrl.engines.models.latent import LatentMixer
from spmdrl.engines.models.layers import FeedForward, Mix, RMSNorm
from spmdrl.engines.models.lora import add_adapters, is_adapter
from spmdrl.engines.models.mixers import Mixer, Rope, Rotations
from spmdrl.engines.models.moe import Route, SparseFeedForward
from spmdrl.engines.models.rope_scaling import RopeScaling
from spmdrl.nouns.partition import RowCost
from spmdrl.nouns.settings.model_config import LoraConfig
from spmdrl.nouns.settings.model_sizes import DeltaSizes, KeySizes, LatentConfig, MoeConfig, WindowConfig

R = TypeVar("R")


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder's part of a Hugging Face config.json."""

    model_type: str
    """A family of hf/families.py, such as llama or deepseek_v3."""
    vocab_size: int
    """Rows of the embedding and of the head."""
    hidden_size: int
    """Model width D."""
    intermediate_size: int
    """Width of the gated feed-forward of dense layers."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads H."""
    num_kv_heads: int
    """Key and value heads J; each serves H / J query heads."""
    head_size: int
    """Head size K of queries and keys; H x K need not be D."""
    rms_eps: float
    """Added to the mean square inside each RMSNorm."""
    rope_theta: float
    """Base of the rotary frequencies."""
    qk_norm: bool
    """True if queries and keys are normalized per head before the rotation (Qwen3)."""
    attention_bias: bool
    """True if the query, key and value projections have biases; see `output_bias` for the fourth."""
    tied_head: bool
    """True if the head is the embedding; then there is no lm_head.weight."""
    max_positions: int
    """Longest row that the model was made for."""
    mlp_bias: bool = False
    """True if the projections of dense feed-forward layers have biases."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies to longer rows."""
    moe: MoeConfig | None = None
    """Configuration of the sparse layers, if any."""
    latent: LatentConfig | None = None
    """Multi-head latent attention instead of the usual projections."""
    delta: DeltaSizes | None = None
    """Layers with a gated delta network in place of attention."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers without rotation of queries and keys (SmolLM3)."""
    rotary_size: int | None = None
    """Rotated dims of each head, its first ones; None: all."""
    window: WindowConfig | None = None
    """Layers whose attention sees the newest tokens only."""
    full: KeySizes | None = None
    """Keys and values of layers without a window, where they differ from those of the others (Gemma 4)."""
    attention_sinks: bool = False
    """True if each head's softmax has one more logit, a weight (gpt-oss)."""
    attention_scale: float | None = None
    """Factor of attention's scores; None is 1 / sqrt(K)."""
    attention_gate: bool = False
    """True if the query projection also gives a gate of each head's output."""
    v_norm: bool = False
    """True if values are normalized per head, without a weight (Gemma 4)."""
    norm_offset: float | None = None
    """Number added to norms' weights, which then multiply in float32: 1 in Gemma 3 and Qwen3.5, 0 in Gemma 4."""
    output_norms: bool = False
    """True if attention and feed-forward have norms of their outputs too (Gemma)."""
    scales_layers: bool = False
    """True if a number of each layer, which isn't trained, multiplies its output (Gemma 4)."""
    scales_embedding: bool = False
    """True if embeddings are multiplied by sqrt(D) (Gemma)."""
    gelu: bool = False
    """True if the feed-forward's gate is GELU in its tanh form rather than SiLU."""
    logit_softcap: float | None = None
    """Bound c of a language model's logits, which are c * tanh(product / c), before any temperature (Gemma 4)."""
    head: Literal["vocab", "value"] = "vocab"
    """vocab: a language model's logits, from lm_head or the embedding; value: one number per token, from score."""
    lora: LoraConfig | None = None
    """Adapters of its projections, which no file of the model holds."""

    def __post_init__(self) -> None:
        if self.head == "value" and self.tied_head:
            raise ValueError(
                "head is value, but by tied_head the head is the embedding; make a value model of a language "
                "model's config by with_value_head()"
            )
        for sizes in (self._keys(windowed=True), self._keys(windowed=False)):
            if self.num_heads % sizes.num_kv_heads:
                raise ValueError(
                    f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                    f"{sizes.num_kv_heads}; each key head serves the same number of query heads"
                )
            if self.latent is None and sizes.head_size % 2:
                raise ValueError(
                    f"head_dim {sizes.head_size} is odd, but the rotary embedding rotates pairs; make it even"
                )
        if self.latent is not None and (self.num_kv_heads, self.head_size) != (self.num_heads, self.latent.head_size):
            raise ValueError(
                f"latent attention has keys of its own for each of the {self.num_heads} heads, of size "
                f"{self.latent.head_size}, but num_key_value_heads is {self.num_kv_heads} and the head size "
                f"{self.head_size}"
            )

    def with_value_head(self) -> DecoderConfig:
        """Return the same decoder as a critic or reward model; its embedding isn't tied."""
        return replace(self, head="value", tied_head=False, lora=None)

    def updates(self, weight: str) -> bool:
        """Return True if training changes a weight of this name: with adapters, all others are frozen."""
        return self.lora is None or is_adapter(weight)

    @property
    def position_rule(self) -> str:
        """Rule that makes `max_positions` smaller than in config.json, as errors add it; empty if none does."""
        indexer = None if self.latent is None else self.latent.indexer
        if indexer is None or self.max_positions == indexer.max_positions:
            return ""
        return " (index_topk; beyond them, attention leaves out tokens by a choice that isn't computed here)"

    @property
    def num_outputs(self) -> int:
        """Rows of the head's weight: its outputs per token."""
        return self.vocab_size if self.head == "vocab" else 1

    @property
    def output_bias(self) -> bool:
        """True if the attention's output projection has a bias: never in Qwen2, Seed-OSS and GLM."""
        return self.attention_bias and self.model_type not in ("qwen2", "seed_oss", "glm4_moe")

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """Mixer of each layer."""
        return tuple(self._mixer(layer) for layer in range(self.num_layers))

    @property
    def ropes(self) -> set[Rope]:
        """Kinds of rotary embedding."""
        return {mixer.rope for mixer in self.mixers if mixer.rope is not None}

    def _keys(self, *, windowed: bool) -> KeySizes:
        return KeySizes(self.head_size, self.num_kv_heads) if windowed or self.full is None else self.full

    def _mixer(self, layer: int) -> Mixer:
        if self.delta is not None and layer in self.delta.layers:
            return DeltaConfig(
                hidden_size=self.hidden_size,
                num_heads=self.delta.num_value_heads,
                num_kv_heads=self.delta.num_key_heads,
                key_size=self.delta.key_size,
                value_size=self.delta.value_size,
                conv_width=self.delta.conv_width,
                rms_eps=self.rms_eps,
            )
        if self.latent is not None:
            rope = Rope(self.rope_theta, self.latent.rotary_size, self.rope_scaling)
            return LatentMixer(self.latent, self.hidden_size, self.num_heads, rope, self.attention_bias)
        window = self.window if self.window is not None and layer in self.window.layers else None
        keys = self._keys(windowed=window is not None)
        return AttentionConfig(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=keys.num_kv_heads,
            head_size=keys.head_size,
            rope=None if layer in self.unrotated_layers else self._rope(keys.head_size, window),
            rms_eps=self.rms_eps,
            qk_norm=self.qk_norm,
            bias=self.attention_bias,
            output_bias=self.output_bias,
            norm_offset=self.norm_offset,
            scale=self.attention_scale,
            window=None if window is None else window.size,
            has_sinks=self.attention_sinks,
            has_gate=self.attention_gate,
            v_norm=self.v_norm,
            keys_are_values=keys.are_values,
        )

    def _rope(self, head_size: int, window: WindowConfig | None) -> Rope:
        size = head_size if self.rotary_size is None else self.rotary_size
        if window is not None and window.rope_theta is not None:
            return Rope(window.rope_theta, size)
        return Rope(self.rope_theta, size, self.rope_scaling)


class DecoderLayer(nn.Module):
    """One pre-norm block: attention, then feed-forward, each added to its input."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self._mixer_name = config.mixers[layer].name
        self.add_module(self._mixer_name, config.mixers[layer].build(layer))
        self.mlp = _feed_forward(config, layer)
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)
        # With norms of outputs, `post_attention_layernorm` is one of them.
        self.pre_feedforward_layernorm = _norm(config) if config.output_norms else None
        self.post_feedforward_layernorm = _norm(config) if config.output_norms else None
        self.layer_scalar: Tensor | None
        self.register_buffer("layer_scalar", torch.ones(1) if config.scales_layers else None)

    @property
    def mixer(self) -> nn.Module:
        """Attention, or what the layer has in its place."""
        return self.get_submodule(self._mixer_name)

    def forward(self, hidden_TD: Tensor, rotations: Rotations, attend: Mix, route: Route | None = None) -> Tensor:
        mixed_TD = self.mixer(self.input_layernorm(hidden_TD), rotations, attend)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            hidden_TD = hidden_TD + mixed_TD
            hidden_TD = hidden_TD + self._feed(self.post_attention_layernorm(hidden_TD), route)
        else:
            hidden_TD = hidden_TD + self.post_attention_layernorm(mixed_TD)
            fed_TD = self._feed(self.pre_feedforward_layernorm(hidden_TD), route)
            hidden_TD = hidden_TD + self.post_feedforward_layernorm(fed_TD)
        return hidden_TD if self.layer_scalar is None else hidden_TD * self.layer_scalar.to(hidden_TD.dtype)

    def _feed(self, normed_TD: Tensor, route: Route | None) -> Tensor:
        return self.mlp(normed_TD, route) if isinstance(self.mlp, SparseFeedForward) else self.mlp(normed_TD)


def _norm(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_eps, config.norm_offset)


def _feed_forward(config: DecoderConfig, layer: int) -> FeedForward | SparseFeedForward:
    if config.moe is None or layer in config.moe.dense_layers:
        return FeedForward(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, gelu=config.gelu)
    return SparseFeedForward(config.hidden_size, config.moe, layer)


@dataclass(frozen=True)
class LayerSpan:
    """Part of a decoder in one module: layers [first, stop), and modules before and after them."""

    first: int
    """First layer held."""
    stop: int
    """One past the last layer held."""
    embeds: bool
    """True with the embedding, so that token ids come in rather than hidden states."""
    heads: bool
    """True with the final norm and the head."""


class Backbone(nn.Module):
    """Everything below the head, kept as one module because transformers' names begin with `model.`."""

    def __init__(self, config: DecoderConfig, span: LayerSpan):
        super().__init__()
        # A tied head without the first layers keeps an embedding of its own, under the same name.
        has_embedding = span.embeds or (span.heads and config.tied_head)
        self.embeds = span.embeds
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if has_embedding else None
        # By number rather than in a list, so that a weight's name doesn't depend on the span.
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config, i) for i in range(span.first, span.stop)})
        self.norm = _norm(config) if span.heads else None
        self._embedding_scale = config.hidden_size**0.5 if config.scales_embedding else None

    def forward(self, inputs: Tensor, rotations: Rotations, attend: Mix, route: Route | None) -> Tensor:
        hidden_TD = self.embedding(inputs) if self.embeds else inputs
        if self.embeds and self._embedding_scale is not None:
            # Rounded to the embedding's dtype first, as Gemma was trained.
            hidden_TD = hidden_TD * torch.tensor(self._embedding_scale, dtype=hidden_TD.dtype).item()
        for layer in self.layers.values():
            hidden_TD = layer(hidden_TD, rotations, attend, route)
        return hidden_TD if self.norm is None else self.norm(hidden_TD)

    @property
    def embedding(self) -> nn.Embedding:
        assert self.embed_tokens is not None, "only spans that embed, or have a tied head, hold an embedding"
        return self.embed_tokens


class OwnHead(nn.Linear):
    """A head's weight that is not the embedding's; the caller decides its use."""

    def forward(self, hidden_TD: Tensor, head: Callable[[Tensor, Tensor], R]) -> R:  # type: ignore[override]
        return head(hidden_TD, self.weight)


class Decoder(nn.Module):
    """A decoder on packed tokens, or a span of its layers, under a language model's head or a value head.

    Weights have transformers' names, a value model's those of its ForSequenceClassification classes; only the experts'
    weights are stacked, one tensor for all experts of a layer. Build it under `torch.device("meta")` and load weights
    afterwards: the initial values are undefined.
    """

    def __init__(self, config: DecoderConfig, span: LayerSpan | None = None):
        super().__init__()
        self.config = config
        self.span = span or LayerSpan(0, config.num_layers, embeds=True, heads=True)
        self.model = Backbone(config, self.span)
        own_head = None
        if self.span.heads and not config.tied_head:
            own_head = OwnHead(config.hidden_size, config.num_outputs, bias=False)
        self.lm_head = own_head if config.head == "vocab" else None
        self.score = own_head if config.head == "value" else None
        if config.lora is not None:
            add_adapters(self.model, config.lora)

    @property
    def layers(self) -> list[DecoderLayer]:
        """Layers of the span, in order."""
        return [layer for layer in self.model.layers.values() if isinstance(layer, DecoderLayer)]

    def forward(
        self,
        inputs: Tensor,
        positions_T: Tensor,
        attend: Mix,
        head: Callable[[Tensor, Tensor], R],
        route: Route | None = None,
    ) -> R | Tensor:
        """Run the span's layers; if it ends in the head, return head(hidden_TD, head_weight_VD), else hidden states.

        `inputs` are token ids [T] if the span embeds, else hidden states. Positions count from 0 in each row. The head
        is called inside the forward of the weight's module, so that sharding hooks see the use of the weight.
        """
        hidden_TD = self.model(inputs, Rotations(positions_T, self.config.ropes), attend, route)
        if not self.span.heads:
            return hidden_TD
        own_head = self.lm_head or self.score
        return head(hidden_TD, self.model.embedding.weight) if own_head is None else own_head(hidden_TD, head)


def row_cost_of(config: DecoderConfig) -> RowCost:
    """Count floating-point operations of a forward pass: two per weight that a token uses, and causal attention."""
    num_sparse = 0 if config.moe is None else config.num_layers - len(config.moe.dense_layers)
    weights = sum(mixer.num_weights for mixer in config.mixers) + config.num_outputs * config.hidden_size
    weights += (config.num_layers - num_sparse) * 3 * config.hidden_size * config.intermediate_size
    if config.moe is not None:
        # A token uses the router, its own experts and the shared ones.
        width = config.moe.experts_per_token * config.moe.intermediate_size + config.moe.shared_width
        weights += num_sparse * config.hidden_size * (config.moe.num_experts + 3 * width)
    per_token, per_token_squared = 2 * weights, 0
    for mixer in config.mixers:
        window = mixer.state(1).kind.window
        if window is None:
            # A token attends to half of its row on average.
            per_token_squared += mixer.attended_size
        else:
            per_token += 2 * window * mixer.attended_size
    return RowCost(per_token, per_token_squared)
