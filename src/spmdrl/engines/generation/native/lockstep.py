"""Ranks that generate together agree on how much each of them has to do, so that they run as many forwards."""

from __future__ import annotations

import torch

from spmdrl.engines.parallel.axis_collectives import max_across
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
        return max_across(torch.tensor(counts, device=self._device), self._axis).tolist()
