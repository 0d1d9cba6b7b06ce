"""Ranks that work on the same rows: one of them takes, and shares with the others."""

from __future__ import annotations

from dataclasses import dataclass

from safetensors.torch import load, save

from spmdrl.dataflow.samples.wire import flatten, unflatten
from spmdrl.resources.collectives import broadcast_bytes
from spmdrl.resources.mesh import Axis, UpdateMesh
from spmdrl.types import Batch, WorkerState

SHARED_STATES = frozenset({WorkerState.REFERENCE, WorkerState.OLD_LOGPROBS, WorkerState.UPDATE})
"""What training engines work on: all ranks that share one copy's layers, tokens or matrices need the same rows."""


@dataclass(frozen=True)
class RowGroups:
    """How the ranks of the update layout are grouped by the rows that they work on."""

    leaders: tuple[int, ...]
    """the rank of each group that takes rows and puts columns"""
    members: Axis
    """this rank's group, its leader first"""

    @classmethod
    def of(cls, mesh: UpdateMesh) -> RowGroups:
        return cls(mesh.leaders, mesh.model)

    @property
    def is_leader(self) -> bool:
        return self.members.rank == 0

    def share(self, batch: Batch) -> Batch:
        """The leader's batch, on every rank of the group. Collective over the group."""
        if self.members.size == 1:
            return batch
        payload = (
            save({f"{place:03}": tensor for place, tensor in enumerate(flatten(batch))}) if self.is_leader else None
        )
        tensors = load(broadcast_bytes(payload, self.members.ranks[0], self.members.group))
        return unflatten([tensors[key] for key in sorted(tensors)])
