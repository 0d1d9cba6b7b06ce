"""The board on which ranks publish their progress, and its verdict: none, a stop, a failure or a hang.

every rank publishes its line twice a second, and reads rank 0's
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from spmdrl.runtime.supervision.ending import FirstFailure

# Share of the limit for which a rank is silent before no other one is blamed.
_SUSPECT_SHARE = 0.5


@dataclass(frozen=True)
class RankState:
    """Place and progress of one rank."""

    rank: int
    stage: str
    step: int
    num_boundaries: int
    idle_seconds: float
    """time since its last progress"""
    collective: str
    """the collective in which it waits for other ranks; empty if it doesn't"""
    doing: str
    """its place in the code, and its finished work"""
    patience: float = 1.0
    """factor on the limit"""
    host: str = ""
    """name and address of its node, in a job of several nodes"""
    rank_set: int = 0
    """number of its set of ranks, which pass the same stages"""

    @property
    def place(self) -> str:
        return self.stage if self.step == 0 else f"{self.stage} of step {self.step}"

    def __str__(self) -> str:
        waits = f" waits in {self.collective}" if self.collective else ""
        return f"rank {self.rank}{waits} in {self.place} ({self.doing})"


@dataclass(frozen=True)
class Stop:
    """Verdict after a rank was asked to stop: all ranks stop."""

    reason: str


@dataclass(frozen=True)
class Hang:
    """Verdict if the job makes no progress."""

    ranks: Sequence[int]
    """ranks that hold it up"""
    line: str = ""
    """message for the screen; empty until it is written"""


Verdict = Stop | FirstFailure | Hang
_VERDICTS = {kind.__name__: kind for kind in (Stop, FirstFailure, Hang)}


@dataclass(frozen=True)
class Line:
    """A rank's published place, progress and requests."""

    number: int = 0
    """increases with each line: without a new one the rank is silent"""
    state: RankState | None = None
    """None if it isn't watched for hangs"""
    asked: str = ""
    """reason of a request to stop"""
    verdict: Verdict | None = None
    """rank 0's verdict"""
    has_left: bool = False
    """True once it stops watching"""

    def to_json(self) -> str:
        fields = asdict(self)
        if self.verdict is not None:
            fields["verdict"] = [type(self.verdict).__name__, asdict(self.verdict)]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Line:
        fields = json.loads(text)
        if fields["state"] is not None:
            fields["state"] = RankState(**fields["state"])
        if fields["verdict"] is not None:
            kind, values = fields["verdict"]
            fields["verdict"] = _VERDICTS[kind](**values)
        return cls(**fields)


@dataclass(frozen=True)
class Board:
    """One rank's knowledge of the job."""

    own: RankState
    limit_seconds: float
    """longest time without progress; 0: no limit"""
    slack_seconds: float = 0.0
    """longest delay of a line"""
    lines: Mapping[int, Line] = field(default_factory=dict)
    """newest lines: of all ranks on rank 0, of rank 0 on the others"""
    silent: Mapping[int, float] = field(default_factory=dict)
    """seconds without a new line, by rank"""
    failure: FirstFailure | None = None
    """None if none was published"""
    is_alone: bool = False
    """True once rank 0, or the store that it keeps, has ended"""

    @property
    def states(self) -> list[RankState]:
        """States of the present and known ranks, this one's as it is now."""
        lines = [line for rank, line in self.lines.items() if rank != self.own.rank and not line.has_left]
        others = [line.state for line in lines if line.state is not None]
        return sorted([self.own, *others], key=lambda state: state.rank)


def decide(board: Board) -> Verdict | None:
    """Return this rank's verdict from the board: first a hang, then a request to stop, then a failure."""
    main = board.lines.get(0) if board.own.rank != 0 else None
    if main is not None and isinstance(main.verdict, Hang):
        return main.verdict
    if board.limit_seconds and (ranks := _hanging(board)):
        return Hang(ranks)
    if main is not None and main.verdict is not None:
        return main.verdict
    asked = [f"{line.asked} (rank {rank})" for rank, line in sorted(board.lines.items()) if line.asked]
    return Stop(asked[0]) if asked else board.failure


def _hanging(board: Board) -> list[int]:
    if board.is_alone:
        return culprits([board.own], {}, board.limit_seconds)
    if board.own.rank != 0:
        main = next((state for state in board.states if state.rank == 0), None)
        allowed = board.limit_seconds * (main.patience if main else 1.0) + board.slack_seconds
        return [0] if board.silent.get(0, 0.0) > allowed else []
    # A rank that failed may be the silent one, and ends the job with its own cause.
    return culprits(board.states, {} if board.failure else board.silent, board.limit_seconds)


def culprits(states: Sequence[RankState], silent: Mapping[int, float], limit_seconds: float) -> list[int]:
    """Return the ranks that hold the job up; none while a rank that others may wait for makes progress.

    First the silent ranks, by their silence; else ranks without progress that wait for no other; else, if all wait,
    those of each set that got least far, but for a set that waits for the other one.
    """
    by_rank = {state.rank: state for state in states}
    limits = {rank: limit_seconds * state.patience for rank, state in by_rank.items()}
    if mute := [rank for rank, seconds in silent.items() if seconds > limits.get(rank, limit_seconds)]:
        return sorted(mute)
    # Others may wait for a rank that is about to count as lost, and in places that don't look like waiting.
    if any(seconds > _SUSPECT_SHARE * limit_seconds for seconds in silent.values()):
        return []
    stuck = [state for state in states if state.idle_seconds > limits[state.rank]]
    if own := [state.rank for state in stuck if not state.collective]:
        return sorted(own)
    if not stuck or len(stuck) < len(states):
        return []
    behind = [state for state in stuck if not state.stage.startswith("wait_for_")] or stuck
    least = {state.rank_set: state.num_boundaries for state in sorted(behind, key=lambda state: -state.num_boundaries)}
    return sorted(state.rank for state in behind if state.num_boundaries == least[state.rank_set])
