"""The engine's own copy of a module's weights: one storage that can be freed and taken back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Each weight starts at a multiple of this many bytes, as if it had been allocated alone.
_ALIGNMENT_BYTES = 256


class FreeableWeights:
    """All parameters of a module built on the meta device, in one storage on `device` while awake.

    The Parameter objects stay the same over sleeps. A module whose weights sleep must not run: that is a segmentation
    fault, not an exception.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype):
        self.shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self._module = module.requires_grad_(False)
        self._device = device
        self._dtype = dtype
        self._flat: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on the device now."""
        return 0 if self._flat is None else self._flat.untyped_storage().nbytes()

    def wake(self) -> dict[str, Tensor]:
        """Allocate the storage, uninitialised, unless it is there; returns the parameters by name."""
        if self._flat is None:
            self._flat = self._bind()
        elif not self.num_bytes:
            self._flat.untyped_storage().resize_(self._flat.numel() * self._flat.itemsize)
        return {name: parameter.detach() for name, parameter in self._module.named_parameters()}

    def sleep(self) -> None:
        """Free the storage, whoever still refers to it."""
        if self._flat is not None:
            self._flat.untyped_storage().resize_(0)

    def _bind(self) -> Tensor:
        step = _ALIGNMENT_BYTES // self._dtype.itemsize
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        padded = [-(-size // step) * step for size in sizes]
        flat = torch.empty(sum(padded), dtype=self._dtype, device=self._device)
        chunks = zip(self.shapes.items(), torch.split(flat, padded), sizes, strict=True)
        views = {name: chunk[:size].view(shape) for (name, shape), chunk, size in chunks}
        self._module.load_state_dict(views, assign=True)
        return flat
