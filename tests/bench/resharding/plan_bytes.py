"""Bytes of a resharding plan: the least that ranks can receive, and what an all-gather moves."""

from __future__ import annotations

from spmdrl.dataflow.resharding.planning.plan import ReshardPlan
from spmdrl.plan.resharding_bytes import segment_bytes


def least_bytes(plan: ReshardPlan) -> dict[int, int]:
    """By rank, the bytes that it wants and doesn't hold: no executor can receive less."""
    received = {rank: 0 for block in plan.blocks for rank in block.ranks}
    for block in plan.blocks:
        for bucket in block.buckets:
            for transfer in plan.transfers(bucket):
                received[transfer.receiver] += plan.num_bytes(transfer.box)
    return received


def allgather_bytes(plan: ReshardPlan) -> dict[int, int]:
    """By rank, the bytes that it receives where each bucket is all-gathered in segments as long as the longest."""
    received = {}
    for block in plan.blocks:
        total = sum(segment_bytes(plan, bucket) for bucket in block.buckets)
        received.update(dict.fromkeys(block.ranks, (len(block.ranks) - 1) * total))
    return received
