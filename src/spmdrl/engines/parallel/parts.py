"""What one rank holds of each weight once tensor and expert parallelism have cut a decoder, before FSDP2 shards it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from spmdrl.nouns.batch import WeightSlice, whole_slice


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
