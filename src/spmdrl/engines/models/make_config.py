"""Sizes of a small model that is made by code, with random weights and a char-level tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

PRINTABLE_CHARS = "".join(map(chr, range(32, 127))) + "\n"


@dataclass(frozen=True)
class MakeConfig:
    """A Qwen3 decoder over single characters; the defaults give about 0.8M parameters."""

    hidden_size: int = 128
    """Model width."""
    num_layers: int = 4
    """Decoder layers."""
    num_heads: int = 4
    """Query heads; their size is hidden_size / num_heads."""
    num_kv_heads: int = 2
    """Key and value heads; each serves num_heads / num_kv_heads query heads."""
    intermediate_size: int = 384
    """Width of the gated feed-forward layer."""
    max_positions: int = 1024
    """Longest row, prompt and response together, in tokens."""
    tied_head: bool = True
    """Whether the head shares the embedding's weights."""
    chars: str = PRINTABLE_CHARS
    """The tokenizer's characters, one token each; any other becomes <unk>."""

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size", "max_positions")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"model.make.{name} is {getattr(self, name)}, but must be >= 1")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"model.make.hidden_size {self.hidden_size} must be a multiple of 2 x model.make.num_heads = "
                f"{2 * self.num_heads}, so that every head has an even size; change one of them"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.make.num_heads {self.num_heads} must be a multiple of model.make.num_kv_heads "
                f"{self.num_kv_heads}; change one of them"
            )
        repeated = sorted({char for char in self.chars if self.chars.count(char) > 1})
        if not self.chars or repeated:
            raise ValueError(f"model.make.chars must hold each character once, but repeats {repeated} or is empty")
