"""Bytes of a resharding plan: the least that ranks can receive, what an all-gather moves, and Eq. 3 of the paper."""

from __future__ import annotations

from spmdrl.dataflow.resharding.planning.plan import ReshardPlan


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
        total = 0
        for bucket in block.buckets:
            segments = dict.fromkeys(block.ranks, 0)
            for piece in bucket.pieces:
                if piece.is_missing:
                    segments[piece.contributor] += plan.num_bytes(piece.box)
            total += (len(segments) - 1) * max(segments.values())
        received.update(dict.fromkeys(block.ranks, total))
    return received


def redundant_bytes(
    tensor_weight_bytes: float,
    expert_weight_bytes: float,
    *,
    update_tensor_size: int,
    generation_data_size: int,
    generation_expert_size: int,
) -> float:
    """Bytes that naive resharding leaves unused: R = GDP x (TW / UTP + EW / GEP).

    That is on all devices where generation isn't tensor-parallel, and a replica's share where it is.

    Source: MindSpeed RL (arXiv:2507.19017), Eq. 3. TW and EW are the sizes of the tensor- and expert-parallel weights.
    """
    per_replica = tensor_weight_bytes / update_tensor_size + expert_weight_bytes / generation_expert_size
    return generation_data_size * per_replica
