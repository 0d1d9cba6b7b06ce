"""Cuts of a decoder's weights over ranks: one table, for modules and for resharding plans.

A mixer has its own cuts (`Mixer.cuts`); those of all other projections are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.lora import is_adapter
from spmdrl.engines.models.mixers import INPUTS, OUTPUTS, HeadCut
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.resources.mesh import Axis

_SIDES = {"embed_tokens": OUTPUTS, "lm_head": OUTPUTS, "gate_proj": OUTPUTS, "up_proj": OUTPUTS, "down_proj": INPUTS}
"""Dim by which the tensor axis cuts the tokens of the vocabulary, or a feed-forward's columns. The rest stays whole:
norms, routers, value heads, and MLA's down projections, which all heads share."""
_ADAPTER_OF_SIDE = {OUTPUTS: "lora_B", INPUTS: "lora_A"}
"""Matrix of an adapter that is cut with its projection; the other one is replicated."""


@dataclass(frozen=True)
class TensorCut:
    """Cut of a weight over the tensor axis: by heads, columns or tokens of the vocabulary, each share rounded up."""

    dim: int
    num_units: int
    """Number of units to divide; heads are query heads, also for keys and values."""
    units_per_slot: int = 1
    """Units that share a slot of the dim, as query heads share a key head; a rank with any of them holds the slot."""

    def interval(self, length: int, num_ranks: int, rank: int) -> tuple[int, int]:
        """Return a rank's interval of a dim of this length."""
        first, stop = chunk_of(self.num_units, num_ranks, rank)
        slot = length * self.units_per_slot // self.num_units
        return first // self.units_per_slot * slot, -(-stop // self.units_per_slot) * slot

    def num_distinct(self, num_ranks: int) -> int:
        """Return the number of distinct parts over this many ranks, each held by equally many neighbours."""
        return min(num_ranks, self.num_units // self.units_per_slot)


def tensor_cut(config: DecoderConfig, name: str, shape: Sequence[int]) -> TensorCut | None:
    """Return the tensor axis's cut of a weight or bias by its name and whole shape; None if it is replicated."""
    *_, module, kind = name.split(".")
    projection, by_heads = _projection(name), _head_cut(config, name)
    side = _SIDES.get(projection) if by_heads is None else by_heads.side
    if side is None or (side == INPUTS and kind.endswith("bias")):
        return None
    if is_adapter(name) and module != _ADAPTER_OF_SIDE[side]:
        return None
    # Stacked expert weights have the experts in front.
    dim = side + is_of_experts(name)
    if by_heads is not None:
        return TensorCut(dim, by_heads.num_heads, by_heads.heads_per_slot)
    return TensorCut(dim, shape[dim])


def _projection(name: str) -> str:
    """Return the name of the projection that a weight belongs to, or of a parameter that is one by itself."""
    parts = name.split(".")
    if is_adapter(name):
        return parts[-3]
    if is_of_experts(name):
        return parts[-1].removesuffix("_bias")
    return parts[-2] if parts[-1] in ("weight", "bias") else parts[-1]


def _head_cut(config: DecoderConfig, name: str) -> HeadCut | None:
    """Return the cut of a mixer's weight; None for another one."""
    _, _, layer, block, *_ = (*name.split("."), "", "", "")
    mixer = config.mixers[int(layer)] if layer.isdigit() else None
    return mixer.cuts.get(_projection(name)) if mixer is not None and mixer.name == block else None


def is_summed(config: DecoderConfig, name: str) -> bool:
    """Return True if the outputs of a weight's projection are partial sums over the tensor axis: its inputs are cut."""
    by_heads = _head_cut(config, name)
    return (_SIDES.get(_projection(name)) if by_heads is None else by_heads.side) == INPUTS


def is_of_experts(name: str) -> bool:
    """Return True if a weight is a stack of experts along dim 0."""
    return name.split(".")[-2] == "experts"


def expert_shard_dim(shape: Sequence[int], num_ranks: int) -> int:
    """Return the dim along which FSDP2 spreads a stack of experts that an expert axis has cut.

    By experts if every rank gets equally many, else by the next dim if the ranks divide it.
    """
    return next((dim for dim in (0, 1) if shape[dim] % num_ranks == 0), 0)


def chunk_of(length: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return a rank's half-open interval: chunks rounded up, like FSDP2's; the last may be short or empty."""
    chunk = -(-length // num_ranks)
    return min(rank * chunk, length), min((rank + 1) * chunk, length)


@dataclass(frozen=True)
class VocabularyPart:
    """Part of the vocabulary whose embedding and head rows this rank holds."""

    start: int
    stop: int
    widest: int
    """Size of the largest part; the last one may be smaller."""
    size: int
    """Size of the whole vocabulary."""
    axis: Axis
    """Axis of the ranks that hold the parts."""

    @classmethod
    def of(cls, vocab_size: int, axis: Axis) -> VocabularyPart:
        """Return this rank's part of the vocabulary on the tensor axis."""
        start, stop = chunk_of(vocab_size, axis.size, axis.rank)
        return cls(start, stop, -(-vocab_size // axis.size), vocab_size, axis)

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's index in this part, 0 if it isn't in the part, and whether it is."""
        here = (tokens >= self.start) & (tokens < self.stop)
        return torch.where(here, tokens - self.start, 0), here


@dataclass(frozen=True)
class TensorCopies:
    """Spread of a weight over the tensor axis.

    Each slice is on `size / distinct` neighbouring ranks: 1 distinct slice is a replicated weight, `size` of them a
    fully cut weight, and key heads fewer than ranks lie in between.
    """

    distinct: int = 1
    """Number of different slices over the axis."""
    index: int = 0
    """Index of this rank's slice."""


class Parts:
    """Slices of weights in a rank's decoder, by name; cutting keeps them consistent with the module."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes = shapes
        """Whole shape of each weight."""
        self.slices: dict[str, WeightSlice] = {name: whole_slice(name, shape) for name, shape in shapes.items()}
        """Box of the whole weight that this rank's decoder holds."""
        self.tensor_copies: dict[str, TensorCopies] = dict.fromkeys(shapes, TensorCopies())

    @classmethod
    def of(cls, decoder: nn.Module) -> Parts:
        """Return a decoder's parameters, and buffers that belong to its weights, all whole."""
        return cls({name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()})

    def cut(self, decoder: nn.Module, name: str, dim: int, start: int, stop: int) -> None:
        """Keep elements start to stop of `dim`, counted within the held slice.

        The parameter is replaced by an empty one on the meta device, so cut before loading values.
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
