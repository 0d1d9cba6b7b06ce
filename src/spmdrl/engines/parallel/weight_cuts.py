"""How each weight of a decoder is cut over ranks: one table, for the cuts of modules and for plans on paper.

A new projection is a line of `_TENSOR_CUTS`, by the name that its module has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.lora import is_adapter
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.resources.mesh import Axis

_OUTPUTS, _INPUTS = 0, 1
"""The dims of a projection's weight."""
_TENSOR_CUTS = {
    "embed_tokens": (_OUTPUTS, "vocabulary"),
    "lm_head": (_OUTPUTS, "vocabulary"),
    "q_proj": (_OUTPUTS, "heads"),
    "q_b_proj": (_OUTPUTS, "heads"),
    "kv_b_proj": (_OUTPUTS, "heads"),
    "k_proj": (_OUTPUTS, "key heads"),
    "v_proj": (_OUTPUTS, "key heads"),
    "gate_proj": (_OUTPUTS, "columns"),
    "up_proj": (_OUTPUTS, "columns"),
    # Their inputs are the cut outputs of others, so the ranks' results add up.
    "o_proj": (_INPUTS, "heads"),
    "down_proj": (_INPUTS, "columns"),
}
"""What the tensor axis deals out of a projection, and along which dim. The rest stays whole: norms, routers, value
heads, and MLA's down projections, which all heads share."""
_ADAPTER_OF_SIDE = {_OUTPUTS: "lora_B", _INPUTS: "lora_A"}
"""The matrix of an adapter that is cut with its projection; every rank has the other one."""


@dataclass(frozen=True)
class TensorCut:
    """How the tensor axis cuts a weight: by heads, columns or tokens of the vocabulary, each share rounded up."""

    dim: int
    num_units: int
    """What is dealt out: heads are query heads, also for keys and values."""
    units_per_slot: int = 1
    """Units that share a slot of the dim, as query heads share a key head; a rank with any of them holds the slot."""

    def interval(self, length: int, num_ranks: int, rank: int) -> tuple[int, int]:
        """The part of a dim of this length that a rank holds."""
        first, stop = chunk_of(self.num_units, num_ranks, rank)
        slot = length * self.units_per_slot // self.num_units
        return first // self.units_per_slot * slot, -(-stop // self.units_per_slot) * slot

    def num_distinct(self, num_ranks: int) -> int:
        """Different parts over so many ranks, each held by as many neighbours."""
        return min(num_ranks, self.num_units // self.units_per_slot)


def tensor_cut(config: DecoderConfig, name: str, shape: Sequence[int]) -> TensorCut | None:
    """How a weight or bias of this name and whole shape is cut over the tensor axis; None where every rank has it."""
    *_, module, kind = name.split(".")
    # An experts' stack has experts in front, and is named like a module's parameter.
    projection, first = (kind, 1) if is_of_experts(name) else (module, 0)
    if is_adapter(name):
        projection = name.split(".")[-3]
    if projection not in _TENSOR_CUTS or (is_summed(projection) and kind == "bias"):
        return None
    side, units = _TENSOR_CUTS[projection]
    if is_adapter(name) and module != _ADAPTER_OF_SIDE[side]:
        return None
    dim = first + side
    if units == "heads":
        return TensorCut(dim, config.num_heads)
    if units == "key heads":
        return TensorCut(dim, config.num_heads, config.num_heads // config.num_kv_heads)
    return TensorCut(dim, shape[dim])


def is_summed(projection: str) -> bool:
    """Whether the outputs of a projection are parts of sums over the tensor axis, as it is cut by inputs."""
    return projection in _TENSOR_CUTS and _TENSOR_CUTS[projection][0] == _INPUTS


def is_of_experts(name: str) -> bool:
    """Whether a weight is a stack of experts, which are its dim 0."""
    return name.split(".")[-2] == "experts"


def expert_shard_dim(shape: Sequence[int], num_ranks: int) -> int:
    """The dim along which FSDP2 spreads a stack of experts that an expert axis has cut.

    By experts where each rank gets as many, else by the next dim where that divides.
    """
    return next((dim for dim in (0, 1) if shape[dim] % num_ranks == 0), 0)


def chunk_of(length: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """The half-open interval of a rank: chunks rounded up, as FSDP2 cuts rows; the last may be short or empty."""
    chunk = -(-length // num_ranks)
    return min(rank * chunk, length), min((rank + 1) * chunk, length)


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens whose rows of the embedding and of the head this rank holds."""

    start: int
    stop: int
    widest: int
    """Tokens of the largest part; the last one may be smaller."""
    size: int
    """Tokens of the whole vocabulary."""
    axis: Axis
    """The ranks that hold the parts."""

    @classmethod
    def of(cls, vocab_size: int, axis: Axis) -> VocabularyPart:
        """The part of a rank of the tensor axis."""
        start, stop = chunk_of(vocab_size, axis.size, axis.rank)
        return cls(start, stop, -(-vocab_size // axis.size), vocab_size, axis)

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's place in this part, and whether it is in it at all; other parts' tokens are put at place 0."""
        here = (tokens >= self.start) & (tokens < self.stop)
        return torch.where(here, tokens - self.start, 0), here


@dataclass(frozen=True)
class TensorCopies:
    """How a weight is spread over the tensor axis.

    Neighbouring ranks hold the same slice, `size / distinct` of them each: 1 distinct slice is a replicated weight,
    `size` of them a weight cut everywhere, and key heads fewer than ranks lie in between.
    """

    distinct: int = 1
    """Different slices over the axis."""
    index: int = 0
    """Which of them this rank holds."""


class Parts:
    """The slices that a rank's decoder holds of its weights, by name; cutting keeps them and the module in step."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes = shapes
        """Shape of each whole weight."""
        self.slices: dict[str, WeightSlice] = {name: whole_slice(name, shape) for name, shape in shapes.items()}
        """Which box of the whole weight this rank's decoder holds."""
        self.tensor_copies: dict[str, TensorCopies] = dict.fromkeys(shapes, TensorCopies())

    @classmethod
    def of(cls, decoder: nn.Module) -> Parts:
        """Everything that a decoder holds, whole: its parameters and the buffers that belong to its weights."""
        return cls({name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()})

    def cut(self, decoder: nn.Module, name: str, dim: int, start: int, stop: int) -> None:
        """Keep elements start to stop of `dim`, counted within what is held already.

        The parameter is replaced by an empty one on the meta device: cut before there are values.
        """
        held = self.slices[name]
        assert 0 <= start < stop <= held.shape[dim], (held, dim, start, stop)
        self.slices[name] = held.narrowed(dim, start, stop)
        module_name, _, attribute = name.rpartition(".")
        module = decoder.get_submodule(module_name)
        whole = module.get_parameter(attribute)
        assert whole.is_meta, f"{name} is cut after it got values"
        part = torch.empty(self.slices[name].shape, dtype=whole.dtype, device=whole.device)
        setattr(module, attribute, nn.Parameter(part, requires_grad=whole.requires_grad))
