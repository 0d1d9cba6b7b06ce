"""Report of a hanging job: one line with the rank that holds it up, and the stacks of all threads."""

from __future__ import annotations

import faulthandler
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdrl.runtime.supervision.board import RankState

HUNG = 124
"""exit code of a job that hung, like `timeout`'s"""
FOLDER = "failures"
_MOST_OTHERS = 4
# Share of the limit: ranks lost at the same moment wrote their last lines at different ones.
_ALMOST = 0.8


def stacks_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's stacks, and of its traceback if it fails."""
    return folder / FOLDER / f"rank_{rank:05d}.txt"


def hang_line(
    ranks: Sequence[int],
    states: Sequence[RankState],
    silent: Mapping[int, float],
    limit_seconds: float,
    ranks_per_node: int = 0,
) -> str:
    """Describe the hanging ranks, their place, and the others' waits; nodes whose ranks are all silent are lost.

    `ranks_per_node` is 0 in a job of one node.
    """
    by_rank = {state.rank: state for state in states}
    lost = _lost_nodes(by_rank, silent, limit_seconds, ranks_per_node)
    hanging = [rank for rank in ranks if not any(rank in node for node in lost)]
    if len(lost) > 1 and len(lost) == len(by_rank) // ranks_per_node - 1:
        seconds = min(silent[rank] for node in lost for rank in node)
        return f"this node, {by_rank[0].host}, is cut off: no answer from any other for {seconds:.0f} s"
    named = [_lost(node, ranks_per_node, by_rank, silent) for node in lost]
    named += [_named(rank, by_rank.get(rank), silent.get(rank, 0.0), limit_seconds) for rank in hanging]
    blamed = {*ranks, *(rank for node in lost for rank in node)}
    waits = [state for state in states if state.rank not in blamed and state.collective]
    # A rank per place first: sets of ranks wait in different ones.
    firsts = {(state.collective, state.place): state for state in reversed(waits)}
    waits.sort(key=lambda state: firsts[state.collective, state.place] is not state)
    waiting = [str(state) for state in waits]
    others = waiting[:_MOST_OTHERS] + ([f"{len(waiting) - _MOST_OTHERS} more wait"] if waiting[_MOST_OTHERS:] else [])
    return "; ".join([*named[:_MOST_OTHERS], *others])


def silent_main_line(own: RankState, main: RankState | None, silent_seconds: float, limit_seconds: float) -> str:
    """Describe a rank's own finding if rank 0, which keeps the job's store, is silent."""
    if main is None or main.host == own.host:
        return hang_line([0], [*([main] if main else []), own], {0: silent_seconds}, limit_seconds)
    return (
        f"rank 0 on {main.host} is lost: nothing came from it to rank {own.rank} on {own.host} for "
        f"{silent_seconds:.0f} s, so that one of the two nodes or the link between them is down, or rank 0 is stopped; "
        f"last, {main}; {own}"
    )


def _lost_nodes(
    by_rank: Mapping[int, RankState], silent: Mapping[int, float], limit_seconds: float, ranks_per_node: int
) -> list[range]:
    """Return the ranks of each node that is silent as a whole."""
    if ranks_per_node == 0:
        return []
    limits = {rank: limit_seconds * by_rank[rank].patience for rank in silent}
    mute = {rank for rank, seconds in silent.items() if seconds > _ALMOST * limits[rank]}
    firsts = sorted({rank // ranks_per_node * ranks_per_node for rank in mute})
    nodes = [range(first, first + ranks_per_node) for first in firsts]
    return [node for node in nodes if mute.issuperset(node)]


def _lost(node: range, ranks_per_node: int, by_rank: Mapping[int, RankState], silent: Mapping[int, float]) -> str:
    those = f"ranks {node[0]}-{node[-1]}" if ranks_per_node > 1 else f"rank {node[0]}"
    seconds = min(silent[rank] for rank in node)
    return (
        f"node {node[0] // ranks_per_node} is lost, with {those} on {by_rank[node[0]].host}: no answer for "
        f"{seconds:.0f} s, so that it or its link is down, or its ranks are stopped; last, {by_rank[node[0]]}"
    )


def _named(rank: int, state: RankState | None, silent_seconds: float, limit_seconds: float) -> str:
    if state is None:
        return f"rank {rank} hangs: nothing came from it for {silent_seconds:.0f} s, which stops the job's store too"
    if silent_seconds > limit_seconds * state.patience:
        return (
            f"rank {rank} hangs: no answer for {silent_seconds:.0f} s, so it is stopped or holds Python's lock; last, "
            f"{state}"
        )
    return f"rank {rank} hangs: no progress for {state.idle_seconds:.0f} s; {state}"


def write_stacks(folder: Path, rank: int, line: str) -> Path | None:
    """Append the stacks of all threads to the rank's file; None if it can't be written."""
    path = stacks_file(folder, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"--- {when}, {socket.gethostname()}, process {os.getpid()}: {line}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError:
        return None
    return path
