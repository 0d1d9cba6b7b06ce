"""The engine's own copy of a module's weights: one storage that can be freed and taken back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Each weight starts at a multiple of this many bytes, as if it had been allocated alone.
_ALIGNMENT_BYTES = 256


class FreeableWeights:
    """All parameters and buffers of a module built on the meta device, in one storage on `device` while awake.

    The Parameter objects stay the same over sleeps. A module whose weights sleep must not run: that is a segmentation
    fault, not an exception.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype):
        """Hold parameters in `dtype`; buffers keep their own, which they were given for a reason."""
        self._module = module.requires_grad_(False)
        self._device = device
        parameters = dict(module.named_parameters())
        weights = module.state_dict()
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self._dtypes = {name: dtype if name in parameters else weight.dtype for name, weight in weights.items()}
        self._flat: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on the device now."""
        return 0 if self._flat is None else self._flat.untyped_storage().nbytes()

    def wake(self) -> dict[str, Tensor]:
        """Allocate the storage, uninitialised, unless it is there; returns the weights by name."""
        if self._flat is None:
            self._flat = self._bind()
        elif not self.num_bytes:
            self._flat.untyped_storage().resize_(self._flat.numel())
        return self._module.state_dict()

    def sleep(self) -> None:
        """Free the storage, whoever still refers to it."""
        if self._flat is not None:
            self._flat.untyped_storage().resize_(0)

    def _bind(self) -> Tensor:
        nbytes = [torch.Size(shape).numel() * self._dtypes[name].itemsize for name, shape in self.shapes.items()]
        padded = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in nbytes]
        flat = torch.empty(sum(padded), dtype=torch.uint8, device=self._device)
        chunks = zip(self.shapes.items(), flat.split(padded), nbytes, strict=True)
        views = {name: chunk[:size].view(self._dtypes[name]).view(shape) for (name, shape), chunk, size in chunks}
        self._module.load_state_dict(views, assign=True)
        return flat
