"""The experts of a sparse layer as packed products: gate and up of each expert as one, experts without rows left out.

Shape letters: `M` rows sorted by expert, `D` model width, `E` experts, `I` width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.onednn import BlockedLinear
from spmdrl.engines.models.moe import Experts

# With smaller projections, calling a packed product takes longer than it saves.
_LEAST_WEIGHT = {torch.float32: 256 * 256, torch.bfloat16: 128 * 64}
# A product gives a row the same bits from so many rows on.
_LEAST_ROWS = 2


@dataclass(frozen=True)
class _PackedExpert:
    gate_up: BlockedLinear
    down: BlockedLinear


class ExpertsProduct:
    """The experts of one layer: products of each expert where they are packed, else as the layer has them.

    Packed, a row gets the same bits whatever is beside it. A layer lies in memory twice while it is being packed.
    """

    def __init__(self, experts: Experts):
        self.weights = [experts.gate_proj, experts.up_proj, experts.down_proj]
        self._packed: list[_PackedExpert] = []
        self._compute_plainly = experts.compute
        experts.compute = self  # type: ignore[method-assign]

    def __call__(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        if not self.is_packed:
            return self._compute_plainly(rows_MD, counts_E)
        if not len(rows_MD):
            return rows_MD
        counts = counts_E.tolist()
        experts = [expert for expert, count in zip(self._packed, counts, strict=True) if count]
        counts = [count for count in counts if count]
        if min(counts) >= _LEAST_ROWS:
            return _outputs(experts, rows_MD, counts)
        taken, kept = _repeated(counts)
        outputs_ND = _outputs(experts, rows_MD.index_select(0, taken), [max(count, _LEAST_ROWS) for count in counts])
        return outputs_ND.index_select(0, kept)

    @property
    def is_packed(self) -> bool:
        return bool(self._packed)

    @property
    def num_bytes(self) -> int:
        return sum(expert.gate_up.num_bytes + expert.down.num_bytes for expert in self._packed)

    def pack(self) -> None:
        gate_EID = self.weights[0]
        if gate_EID[0].numel() < _LEAST_WEIGHT.get(gate_EID.dtype, 0):
            return
        packed = []
        for gate_ID, up_ID, down_DI in zip(*self.weights, strict=True):
            gate_up = ops.blocked_linear(torch.cat((gate_ID, up_ID)), None)
            down = ops.blocked_linear(down_DI, None)
            if gate_up is None or down is None:
                return
            packed.append(_PackedExpert(gate_up, down))
        self._packed = packed

    def unpacked(self) -> Iterator[Tensor]:
        """What the weights held when they were packed, one stack after the other, or nothing if they aren't."""
        if self.is_packed:
            width = self.weights[0].shape[1]
            yield torch.stack([expert.gate_up.weight()[:width] for expert in self._packed])
            yield torch.stack([expert.gate_up.weight()[width:] for expert in self._packed])
            yield torch.stack([expert.down.weight() for expert in self._packed])

    def drop(self) -> None:
        self._packed = []


def _outputs(experts: list[_PackedExpert], rows_MD: Tensor, counts: list[int]) -> Tensor:
    """What each expert gives for its `counts` of the rows."""
    pieces = zip(experts, rows_MD.split_with_sizes(counts), strict=True)
    gates_ups = torch.cat([expert.gate_up(rows) for expert, rows in pieces])
    hidden_MI = ops.swiglu(*gates_ups.chunk(2, dim=-1))
    pieces = zip(experts, hidden_MI.split_with_sizes(counts), strict=True)
    return torch.cat([expert.down(hidden) for expert, hidden in pieces])


def _repeated(counts: list[int]) -> tuple[Tensor, Tensor]:
    """Rows to take, so that an expert's only one is taken twice, and the places of what to keep of the outputs."""
    taken: list[int] = []
    kept: list[int] = []
    start = 0
    for count in counts:
        kept += range(len(taken), len(taken) + count)
        taken += range(start, start + count) if count >= _LEAST_ROWS else [start] * _LEAST_ROWS
        start += count
    return torch.tensor(taken), torch.tensor(kept)
