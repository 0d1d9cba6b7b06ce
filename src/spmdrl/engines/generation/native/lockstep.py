"""Forwards that several replicas run together, because they share experts."""

from __future__ import annotations

import torch

from spmdrl.resources.mesh import Axis


class Lockstep:
    """The replicas that share experts: all must run a forward where one does; alone, it agrees with itself."""

    def __init__(self, axis: Axis, device: torch.device):
        self._axis = axis
        self._device = device

    @property
    def is_alone(self) -> bool:
        return self._axis.size == 1

    def most(self, *counts: int) -> list[int]:
        """The largest of each count over the replicas. Collective over them."""
        if self.is_alone:
            return list(counts)
        return self._axis.max(torch.tensor(counts, device=self._device)).tolist()
