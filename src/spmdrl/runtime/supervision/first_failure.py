"""The first failure of a job: errors that others then meet, such as closed connections, are its consequences."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping

import torch.distributed as dist

from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.runtime.supervision.ending import FirstFailure, cause_of, death, is_consequence, stop_cause
from spmdrl.runtime.supervision.launcher import namespace, process_state
from spmdrl.runtime.supervision.stop_request import Stopped, request

_COUNT = "failures"
FIRST = "first failure"
"""key of the first failure's rank and cause"""
# Time in which a rank that lost its connections looks for another rank's failure.
_CONSEQUENCE_SECONDS = 5.0
# Time in which rank 0 may be the first to publish a failure that all ranks find.
_ALIKE_SECONDS = 2.0
_STORE_SECONDS = 3.0


def publish_process(store: dist.Store, launch: LaunchEnvironment) -> None:
    """Record this rank's process, for `peers_of`."""
    store.set(f"process/{launch.rank}", f"{namespace()} {os.getpid()}")


def peers_of(store: dist.Store, launch: LaunchEnvironment) -> dict[int, int]:
    """Return the visible processes, by rank, of this node's other ranks; all have published theirs."""
    first = launch.first_rank_of(launch.node_rank)
    ranks = [rank for rank in range(first, first + launch.local_world_size) if rank != launch.rank]
    found = [(rank, store.get(f"process/{rank}").decode().rpartition(" ")) for rank in ranks]
    # Containers have their own process numbers, and only Linux shows them.
    is_seen = process_state(os.getpid()) != "X"
    return {rank: int(pid) for rank, (where, _, pid) in found if is_seen and where == namespace()}


def find_first(
    store: dist.Store, rank: int, failure: BaseException, peers: Mapping[int, int] | None = None
) -> FirstFailure:
    """Return the first failure of any rank: this one, the one already in the store, or a peer's death.

    A failure that may be a consequence waits some seconds for its cause to be published, or for one of `peers`,
    processes by rank, to be gone. So does a request: a launcher sends SIGTERM too when a rank has ended.
    """
    own, peers = FirstFailure(rank, cause_of(failure)), peers or {}
    if (dead := gone({0: peers[0]} if 0 in peers else {})) is not None:
        # The store that it kept is gone with it, and may be slow to fail.
        return dead
    patience = 0.0
    if is_consequence(failure):
        patience = _CONSEQUENCE_SECONDS
    elif rank != 0 and isinstance(failure, (ValueError, KeyboardInterrupt, Stopped)):
        patience = _ALIKE_SECONDS
    found = [own]
    # On a thread of its own, since the store may be gone or unresponsive.
    search = threading.Thread(target=_search, args=(store, own, patience, found, peers), daemon=True)
    search.start()
    search.join(patience + _STORE_SECONDS)
    return found[-1]


def publish(store: dist.Store, failure: FirstFailure) -> bool:
    """Record a rank's failure as the first one; returns True if it was."""
    is_first = not store.check([FIRST]) and store.add(_COUNT, 1) == 1
    if is_first:
        store.set(FIRST, json.dumps([failure.rank, failure.cause]))
    return is_first


def wait_for_all(store: dist.Store, size: int, state: str, timeout_seconds: float) -> None:
    """Return once every rank has arrived. `state`: their common state, used once in a job.

    Raises RuntimeError if a rank has failed, or if some are missing after `timeout_seconds`.
    """
    store.add(state, 1)
    deadline, pause = time.monotonic() + timeout_seconds, 0.001
    while store.add(state, 0) < size:
        if store.check([FIRST]):
            raise RuntimeError("Interrupted by another rank's failure")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{store.add(state, 0)} of {size} ranks are {state} after {timeout_seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _search(
    store: dist.Store, own: FirstFailure, patience: float, found: list[FirstFailure], peers: Mapping[int, int]
) -> None:
    suspect = None
    try:
        deadline = time.monotonic() + patience
        while not store.check([FIRST]):
            suspect = gone(peers) if patience > 0 or own.is_stop else None
            if suspect is not None or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if publish(store, suspect or own):
            found.append(suspect or own)
            return
        deadline = time.monotonic() + _STORE_SECONDS
        while time.monotonic() < deadline:
            if store.check([FIRST]):
                found.append(FirstFailure(*json.loads(store.get(FIRST))))
                return
            time.sleep(0.02)
    except (RuntimeError, ValueError, TypeError):
        # Rank 0, which keeps the store, has ended; the reason is in its own output, or was found before.
        if (dead := gone(peers)) is not None:
            found.append(dead)
        elif own.rank != 0:
            is_asked = own.is_interruption or own.is_stop
            cause = own.cause if is_asked else "it ended first; its output says why"
            found.append(FirstFailure(0, stop_cause(request.reason or "") if request.is_leaving else cause))


def gone(peers: Mapping[int, int]) -> FirstFailure | None:
    """Return the death of one of these processes, by rank, that has ended."""
    # If another rank was asked to stop, by its key in the store, a gone process ended by that.
    if (request.reason or "").endswith(")"):
        return None
    return next((death(rank, pid) for rank, pid in peers.items() if process_state(pid) in "ZX"), None)
