"""The engine's own copy of a module's weights: storages that can be freed and taken back one by one, or borrowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class FreeableWeights:
    """All parameters and buffers of a module built on the meta device, each in a storage of its own while it is awake.

    The Parameter objects stay the same over sleeps. A module whose weights sleep must not run: that is a segmentation
    fault, not an exception.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype):
        """Hold parameters in `dtype`; buffers keep their own, which they were given for a reason."""
        self._module = module.requires_grad_(False)
        parameters = dict(module.named_parameters())
        weights = module.state_dict()
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        dtypes = {name: dtype if name in parameters else weight.dtype for name, weight in weights.items()}
        self._own: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            self._own[name] = torch.empty(shape, dtype=dtypes[name], device=device)
            self._own[name].untyped_storage().resize_(0)
        self._borrowed: dict[str, Tensor] = {}
        self._asleep = set(self.shapes)
        # Detached: buffers become these very tensors, which borrowing points elsewhere.
        module.load_state_dict({name: weight.detach() for name, weight in self._own.items()}, assign=True)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device now, without what is borrowed."""
        return sum(weight.untyped_storage().nbytes() for weight in self._own.values())

    @property
    def are_awake(self) -> bool:
        """Whether every weight has its storage."""
        return not self._asleep

    def wake(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Allocate these weights, or all, uninitialised, where they aren't there; returns all weights by name."""
        for name in self._asleep.intersection(self._own if names is None else names):
            self._own[name].untyped_storage().resize_(self._own[name].nbytes)
            self._asleep.remove(name)
        return self._own | self._borrowed

    def borrow(self, weights: Mapping[str, Tensor]) -> None:
        """Use these tensors in place of own storage until the next sleep; they are only read."""
        for name, weight in weights.items():
            own = self._own[name]
            assert (weight.shape, weight.dtype) == (own.shape, own.dtype), (name, weight.shape, weight.dtype)
            own.untyped_storage().resize_(0)
            self._borrowed[name] = weight.detach()
            self._asleep.discard(name)
        self._point(self._borrowed)

    def sleep(self) -> None:
        """Free the storages, even if they are still referenced, and give back what was borrowed."""
        self._point({name: self._own[name] for name in self._borrowed})
        self._borrowed = {}
        for weight in self._own.values():
            weight.untyped_storage().resize_(0)
        self._asleep = set(self._own)

    def _point(self, weights: Mapping[str, Tensor]) -> None:
        """Have the module's parameters and buffers read from these tensors."""
        held = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        for name, weight in weights.items():
            held[name].data = weight
