"""Ranks that work on the same rows: one of them takes, and shares with the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spmdrl.dataflow.samples.store.frame import pack, read_frame
from spmdrl.resources.collectives import broadcast_ragged
from spmdrl.resources.mesh import Axis, GenerationMesh, UpdateMesh
from spmdrl.types import Batch, WorkerState


@dataclass(frozen=True)
class RowGroups:
    """How ranks are grouped by the rows that they work on."""

    leaders: tuple[int, ...]
    """the rank of each group that takes rows and puts columns"""
    members: Axis
    """this rank's group, its leader first"""
    device: torch.device = torch.device("cpu")
    """where shared rows travel: between accelerators, by their own links"""

    @property
    def is_leader(self) -> bool:
        return self.members.rank == 0

    @property
    def leader(self) -> int:
        """The rank that takes rows for this rank."""
        return self.members.ranks[0]

    def share(self, batch: Batch | None) -> Batch:
        """The leader's batch, on every rank of the group. Collective over the group."""
        if self.members.size == 1:
            assert batch is not None, "the one rank of a group is its leader"
            return batch
        frame = None if batch is None else pack(batch)
        shared = broadcast_ragged(frame, self.leader, self.members.group, self.device)
        return read_frame(shared) if batch is None else batch


def groups_of_training(mesh: UpdateMesh, device: torch.device) -> dict[WorkerState, RowGroups]:
    """The groups of an update layout, for every state that uses a training engine."""
    groups = RowGroups(mesh.leaders, mesh.model, device)
    return {state: groups for state in WorkerState if state.uses_training_engine}


def groups_of_generation(mesh: GenerationMesh, device: torch.device) -> dict[WorkerState, RowGroups]:
    """The replicas of a generation layout, whose ranks answer the same prompts."""
    return {WorkerState.GENERATION: RowGroups(mesh.leaders, mesh.tensor, device)}
