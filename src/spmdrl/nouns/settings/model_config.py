"""Settings of the policy: its folder or the sizes of a new model, and its adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from spmdrl.nouns.settings.model_sizes import ClampedGate, DeltaSizes, KeySizes, LatentConfig, MoeConfig, WindowConfig

PRINTABLE_CHARS = "".join(map(chr, range(32, 127))) + "\n"
_SPARSE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace")
_GEMMA = ("gemma3_text", "gemma4_text")
_DENSE = ("qwen3", "qwen3_5_text", *_GEMMA)
_LIKE_DEEPSEEK = ("deepseek_v3", "glm4_moe")


@dataclass(frozen=True)
class MakeConfig:
    """A character-level decoder; the defaults give a Qwen3 of about 0.8M parameters.

    Sizes that a family lacks are None; for other families None takes the default named below.
    """

    model_type: Literal[
        "qwen3",
        "qwen3_moe",
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "gemma3_text",
        "gemma4_text",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
    ] = "qwen3"
    """family; qwen3: dense; qwen3_moe: sparse layers; deepseek_v3: sparse layers and latent attention; glm4_moe: sparse
    layers and partial rotation; gpt_oss: sparse layers, windows and sinks; gemma3_text: dense, windows; gemma4_text:
    the same, and larger heads in layers without a window; qwen3_5_text: dense, gated delta networks; qwen3_5_moe_text,
    qwen3_next: the same with sparse layers"""
    hidden_size: Annotated[int, Ge(1)] = 128
    """width of the model"""
    num_hidden_layers: Annotated[int, Ge(1)] = 4
    """number of decoder layers"""
    num_attention_heads: Annotated[int, Ge(1)] = 4
    """query heads; each has hidden_size / num_attention_heads dimensions, in deepseek_v3 before the rotated part"""
    num_key_value_heads: Annotated[int, Ge(1)] = 2
    """key and value heads, each shared by num_attention_heads / num_key_value_heads query heads; in deepseek_v3 every
    head has its own"""
    intermediate_size: Annotated[int, Ge(1)] = 384
    """width of the gated feed-forward of dense layers"""
    max_position_embeddings: Annotated[int, Ge(1)] = 1024
    """longest row, prompt and response together, in tokens"""
    tie_word_embeddings: bool = True
    """share the embedding's weights with the output head"""
    chars: str = PRINTABLE_CHARS
    """the tokenizer's characters, one token each; any other becomes <unk>"""
    num_experts: Annotated[int, Ge(1)] | None = None
    """experts of each sparse layer; null: 8"""
    num_experts_per_tok: Annotated[int, Ge(1)] | None = None
    """experts that each token is routed to; null: 2"""
    moe_intermediate_size: Annotated[int, Ge(1)] | None = None
    """width of one expert; null: intermediate_size / num_experts_per_tok"""
    first_k_dense_replace: Annotated[int, Ge(0)] | None = None
    """number of first layers that are dense; null: 1 in deepseek_v3 and glm4_moe, else 0, as always in gpt_oss and
    qwen3_5_moe_text"""
    sliding_window: Annotated[int, Ge(1)] | None = None
    """tokens that windowed layers see, in gpt_oss, gemma3_text and gemma4_text; null: 16"""

    def __post_init__(self) -> None:
        self._refuse_sizes_of_sparse_layers()
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"model.make.hidden_size {self.hidden_size} must be a multiple of 2 x model.make.num_attention_heads = "
                f"{2 * self.num_attention_heads}, so that every head has an even size; change one of them"
            )
        if self.num_attention_heads % self.num_key_value_heads and self.model_type != "deepseek_v3":
            raise ValueError(
                f"model.make.num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"model.make.num_key_value_heads {self.num_key_value_heads}; change one of them"
            )
        try:
            moe, _ = self.moe, self.latent
        except ValueError as error:
            raise ValueError(f"the sizes of model.make don't fit together: {error}") from None
        if moe is not None and len(moe.dense_layers) >= self.num_hidden_layers:
            raise ValueError(
                f"model.make.first_k_dense_replace {len(moe.dense_layers)} leaves none of model.make.num_hidden_layers "
                f"{self.num_hidden_layers} sparse; change one of them, or set model.make.model_type to qwen3"
            )
        repeated = sorted({char for char in self.chars if self.chars.count(char) > 1})
        if not self.chars or repeated:
            raise ValueError(f"model.make.chars must hold each character once, but repeats {repeated} or is empty")

    @property
    def head_size(self) -> int:
        """Head size; in deepseek_v3, size of the part that isn't rotated."""
        return self.hidden_size // self.num_attention_heads

    @property
    def moe(self) -> MoeConfig | None:
        """Sparse layers; None if the model_type has none."""
        if self.model_type in _DENSE:
            return None
        is_deepseek, is_qwen = self.model_type in _LIKE_DEEPSEEK, self.model_type in ("qwen3_5_moe_text", "qwen3_next")
        experts_per_token = self.num_experts_per_tok or 2
        num_dense = int(is_deepseek) if self.first_k_dense_replace is None else self.first_k_dense_replace
        width = self.moe_intermediate_size or max(1, self.intermediate_size // experts_per_token)
        return MoeConfig(
            num_experts=self.num_experts or 8,
            experts_per_token=experts_per_token,
            intermediate_size=width,
            scoring="sigmoid" if is_deepseek else "softmax",
            normalize=True,
            num_shared_experts=int(is_deepseek),
            shared_size=width if is_qwen else None,
            shared_gate=is_qwen,
            bias=self.model_type == "gpt_oss",
            clamp=ClampedGate(limit=7.0, alpha=1.702) if self.model_type == "gpt_oss" else None,
            dense_layers=tuple(range(num_dense)),
        )

    @property
    def latent(self) -> LatentConfig | None:
        """Latent attention; None if the family has none."""
        if self.model_type != "deepseek_v3":
            return None
        return LatentConfig(
            query_rank=None,
            key_value_rank=max(1, self.hidden_size // 2),
            plain_size=self.head_size,
            rotary_size=max(2, self.head_size // 4 * 2),
            value_size=self.head_size,
        )

    @property
    def window(self) -> WindowConfig | None:
        """Layers with a window; None if the family has none, or a window is never shorter than a row."""
        size, last = self.sliding_window or 16, self.num_hidden_layers - 1
        if self.model_type in _GEMMA:
            # Five of six layers, and all but the last one of a shallow model.
            layers = tuple(layer for layer in range(last + 1) if layer % 6 != 5 and layer != last)
            return WindowConfig(size, layers, rope_theta=10000.0) if layers else None
        if self.model_type == "gpt_oss" and size < self.max_position_embeddings:
            return WindowConfig(size, tuple(range(0, last + 1, 2)))
        return None

    @property
    def full(self) -> KeySizes | None:
        """Keys of layers without a window; None if they are as in the others."""
        if self.model_type != "gemma4_text":
            return None
        num_kv_heads = self.num_key_value_heads
        return KeySizes(2 * self.head_size, num_kv_heads if num_kv_heads % 2 else num_kv_heads // 2, are_values=True)

    @property
    def delta(self) -> DeltaSizes | None:
        """Layers with a gated delta network: three of four, and all but the last one of a shallow model."""
        last = self.num_hidden_layers - 1
        layers = tuple(layer for layer in range(last + 1) if layer % 4 != 3 and layer != last)
        if self.model_type not in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next") or not layers:
            return None
        heads = (self.num_key_value_heads, self.num_attention_heads)
        return DeltaSizes(layers, *heads, key_size=self.head_size, value_size=self.head_size, conv_width=4)

    def _refuse_sizes_of_sparse_layers(self) -> None:
        name = next((name for name in _SPARSE_SIZES if getattr(self, name) is not None), None)
        if self.model_type in _DENSE and name is not None:
            raise ValueError(
                f"model.make.{name} is {getattr(self, name)}, but a {self.model_type} has no such size; remove it "
                "or set model.make.model_type to qwen3_moe"
            )
        if self.model_type in ("gpt_oss", "qwen3_5_moe_text") and self.first_k_dense_replace:
            raise ValueError(
                f"model.make.first_k_dense_replace is {self.first_k_dense_replace}, but all layers of a "
                f"{self.model_type} are sparse; remove it"
            )
        if self.model_type not in ("gpt_oss", *_GEMMA) and self.sliding_window is not None:
            raise ValueError(
                f"model.make.sliding_window is {self.sliding_window}, but a {self.model_type} made here has no "
                "windows; remove it or set model.make.model_type to gemma3_text"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The model to train: a Hugging Face folder, or a small one made with random weights."""

    path: str | None = None
    """folder of a Hugging Face model, or a hub name such as Qwen/Qwen2.5-0.5B-Instruct; or folder of adapters by PEFT,
    whose base the model then is (to train them, set lora)"""
    make: MakeConfig | None = None
    """sizes of a model made here with random weights and a char-level tokenizer, in place of path"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the computation; auto: bfloat16 on accelerators, float32 on CPU"""

    def __post_init__(self) -> None:
        if self.path is None and self.make is None:
            raise ValueError(
                "neither model.path nor model.make is given; set model.path to a Hugging Face folder or hub name, "
                "or model.make to the sizes of a small random model (`make: {}` takes the defaults)"
            )
        if self.path is not None and self.make is not None:
            raise ValueError(f"model.path ({self.path}) and model.make are both given; remove one of them")
        if self.path is not None and not self.path.strip():
            raise ValueError("model.path is empty; give a Hugging Face folder or hub name")


PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
)  # fmt: skip


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of the policy (arXiv:2106.09685); only they are trained."""

    rank: Annotated[int, Ge(1)] = 32
    """rank of each adapter: rows of its A and columns of its B"""
    alpha: Annotated[float, Interval(gt=0, lt=math.inf)] = 32.0
    """scale of an adapter's output times its rank: the output is multiplied by alpha / rank"""
    targets: tuple[str, ...] = ()
    """projections that get an adapter in every layer, as in [q_proj, v_proj]; []: all but those of experts"""

    merge: bool = False
    """generate with merged weights, all of which move at each switch; false: generate with adapters, which alone move;
    vLLM always merges"""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.targets if name not in PROJECTIONS]:
            raise ValueError(
                f"lora.targets has {unknown[0]}, which is no projection; choose among {', '.join(PROJECTIONS)}, or "
                "leave it out for all that the model has"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank
