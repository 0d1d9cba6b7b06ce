"""Exchange at a stage boundary: rows go point to point from their home nodes to the ranks that took them.

Every rank's metadata has all shares and row lengths, so sender and receiver derive the same messages and sizes, and
nothing is requested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.dataflow.samples.store.frame import frame_bytes, pack, read_frame
from spmdrl.nouns.batch import Batch, Integers
from spmdrl.runtime.launch import LaunchEnvironment


@dataclass(frozen=True)
class Transfer:
    """Rows that one rank sends to another."""

    sender: int
    receiver: int
    rows: Integers


def transfers(shares: Mapping[int, Integers], homes: Integers, launch: LaunchEnvironment) -> list[Transfer]:
    """Return the transfers between nodes that bring each rank of `shares` its rows; `homes` is by row.

    Any rank of the home node can read the rows, so a node's messages are spread over its ranks.
    """
    out = []
    for receiver, rows in shares.items():
        row_homes = homes[rows]
        for home in np.unique(row_homes[row_homes != launch.node_of(receiver)]).tolist():
            sender = launch.first_rank_of(home) + receiver % launch.local_world_size
            out.append(Transfer(sender, receiver, rows[row_homes == home]))
    return out


class Exchange:
    """This rank's part in exchanges. `names` and `num_values` must be the same on sender and receiver."""

    def __init__(self, rank: int, timeout_seconds: float):
        self._rank = rank
        self._timeout_seconds = timeout_seconds

    def run(
        self,
        moves: Sequence[Transfer],
        read: Callable[[Integers], Batch],
        num_values: Callable[[Integers], Mapping[str, int]],
    ) -> list[Batch]:
        """Send and receive; returns received batches in the order of `moves`. Collective over the ranks of `moves`.

        `read` returns columns of this node's rows, `num_values` their numbers of values by column. Raises TimeoutError
        for a message that misses the deadline, ConnectionError for a lost rank; both name the rows.
        """
        pending, frames, kept = [], [], []
        for move in moves:
            if move.receiver == self._rank:
                frame = torch.empty(frame_bytes(move.rows.size, num_values(move.rows)), dtype=torch.uint8)
                frames.append((move, frame))
                pending.append((move, dist.irecv(frame, src=move.sender)))
        for move in moves:
            if move.sender == self._rank:
                frame = pack(read(move.rows))
                # The memory must live until the message is sent.
                kept.append(frame)
                pending.append((move, dist.isend(frame, dst=move.receiver)))
        deadline = time.monotonic() + self._timeout_seconds
        for move, work in pending:
            self._wait(move, work, deadline)
        return [_read(move, frame) for move, frame in frames]

    def _wait(self, move: Transfer, work: dist.Work | None, deadline: float) -> None:
        assert work is not None, "every rank of the job is in the world's group"
        left = max(deadline - time.monotonic(), 0.001)
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            other = move.sender if move.receiver == self._rank else move.receiver
            what = (
                f"rank {self._rank} exchanges {move.rows.size} rows ({move.rows[0]}..{move.rows[-1]}) with rank {other}"
            )
            raise failure_of(what, error, self._timeout_seconds) from error


def failure_of(who: str, error: RuntimeError, timeout_seconds: float) -> OSError:
    """Return the error of a message or request to another rank that failed or came too late."""
    if "Timed out" in str(error) or "RPCErr:1:" in str(error):
        return TimeoutError(
            f"{who}, which didn't answer within dock.timeout_seconds = {timeout_seconds:g}; that rank hangs or is "
            "overloaded: look at its log, or raise the limit"
        )
    return ConnectionError(f"{who}, but the connection failed ({error}); that rank has probably died: look at its log")


def _read(move: Transfer, frame: Tensor) -> Batch:
    batch = read_frame(frame)
    if not np.array_equal(batch.rows.numpy(), move.rows):
        raise ValueError(
            f"rank {move.sender} sent rows {batch.rows[:4].tolist()}..., but {move.rows[:4].tolist()}... are due"
        )
    return batch
