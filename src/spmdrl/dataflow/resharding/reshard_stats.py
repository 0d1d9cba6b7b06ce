"""What a switch between update and generation cost a rank."""

from __future__ import annotations

from dataclasses import dataclass

from spmdrl.dataflow.resharding.swapping.swap_space import CopyTimes


@dataclass(frozen=True)
class ReshardStats:
    """What one switch of the flow cost this rank."""

    seconds: float
    received_bytes: int = 0
    planned_bytes: int = 0
    """what all ranks receive together, as planned"""
    cross_node_bytes: int = 0
    """of the bytes received: what came from other nodes"""
    move_seconds: float = 0.0
    """of the seconds: those in which weights were moved, and left the device once they were"""
    swapped_bytes: int = 0
    """freed on the device, or brought back to it"""
    copied_bytes: int = 0
    """of the bytes freed: those that the host had no copy of yet"""
    returned: CopyTimes | None = None
    """when the training state was copied back; set by the switch that waited for it"""
    hidden_share: float = 0.0
    """the share of that copy's time that had passed before the switch was called"""
