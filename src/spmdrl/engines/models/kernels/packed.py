"""Packed rows as attention kernels take them; each form is made on first use and serves all layers."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from spmdrl.engines.models.kernels.padded import PaddedPlan, plan_blocks


class PackedRows:
    """The rows of a micro-batch that hold tokens, laid end to end."""

    def __init__(self, offsets: Tensor):
        """Rows with these offsets [B + 1]; give them on the CPU to avoid waiting for the device."""
        # Rows without tokens say nothing about attention, and some kernels refuse them.
        self.offsets = list(dict.fromkeys(offsets.tolist()))
        """Strictly ascending."""
        self._cumulative: dict[torch.device, Tensor] = {}
        self._padded: dict[torch.device, PaddedPlan] = {}

    @cached_property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True)]

    @cached_property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def cumulative(self, device: torch.device) -> Tensor:
        """The offsets as int32 on a device."""
        if device not in self._cumulative:
            self._cumulative[device] = torch.tensor(self.offsets, dtype=torch.int32).to(device)
        return self._cumulative[device]

    def padded(self, device: torch.device) -> PaddedPlan:
        """Padded blocks of rows of similar length, with their indexes on a device."""
        if device not in self._padded:
            self._padded[device] = plan_blocks(self.offsets).to(device)
        return self._padded[device]
