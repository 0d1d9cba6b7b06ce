"""Portions of a step's groups, scored while this rank waits for tools.

    group is whole --add--> portion is whole --arrive--> whole on all ranks --put, announce--> scored by each model

What a portion holds follows from tokens alone: of each replica, equally many groups in the order in which they became
whole. So it holds the same rows whether it is scored beside generation or after it, and results are equal to the bit.

Scoring is collective over all ranks, which generate at their own pace. A rank arrives at the next portion, without
waiting, once its own groups of it are whole and it has nothing to decode: all rows wait for tools, or none are left.
When all ranks have arrived the portion runs; each rank finds out between two steps of its engine, or while it waits.

Nothing can deadlock. Portions run in their order, one at a time, in the thread that generates. Until all ranks have
arrived at a portion, none waits for another one. Every rank arrives at every portion, at the latest when its last row
has ended; and once all have, each joins within one step of its engine. The ranks of a replica are at the same place of
the same program and do what their first rank has found. Replicas that step together would wait for each other's steps,
so theirs aren't scored beside generation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from spmdrl.dataflow.samples.dock import Samples
from spmdrl.dataflow.stages.inference import ScoreStage
from spmdrl.dataflow.stages.rollout.requests import Came
from spmdrl.observability.timeline.timeline import Timeline
from spmdrl.resources.collectives import Arrivals, broadcast_bytes
from spmdrl.resources.mesh import Axis
from spmdrl.types import Batch, WorkerState

_PAUSE_SECONDS = 0.001


class Portions:
    """Announces a step's whole groups in so many portions; with `arrivals`, scores all but the last as it goes on."""

    def __init__(
        self, number: int, scores: Sequence[ScoreStage], axis: Axis, timeline: Timeline, arrivals: Arrivals | None
    ):
        """`axis` joins the ranks of this rank's replica."""
        self._number = number
        self._scores = scores
        self._axis = axis
        self._timeline = timeline
        self._arrivals = arrivals
        self._samples: Samples | None = None
        self._num_groups = 0
        self._whole: list[Batch] = []
        self._num_run = 0

    def open(self, samples: Samples, num_groups: int) -> None:
        """Begin a step of which this rank's replica generates so many groups."""
        self._samples, self._num_groups, self._num_run = samples, num_groups, 0
        self._whole.clear()

    def add(self, group: Batch) -> None:
        """Add the columns of a group that is whole; they are put with their portion."""
        self._whole.append(group)

    def between_steps(self) -> None:
        """Score what all ranks have arrived at. Collective over the replica."""
        while self._arrivals is not None and self._arrivals.has_arrived and self._agreed(self._arrivals.are_complete):
            self._run_next(self._arrivals)

    def until(self, came: Came | None) -> None:
        """Score portions until what the replica's first rank waits for has come. Collective over the replica."""
        started = time.perf_counter()
        while self._arrivals is not None and self._is_due:
            self._arrivals.arrive()
            if not self._agreed(came is not None and _is_complete_before(self._arrivals, came)):
                break
            self._run_next(self._arrivals)
        if came is not None:
            ended = came(None)
            assert ended is not None, "without a limit it waits to the end"
            self._timeline.waited("generation", self._open_samples.step, start=started, end=ended)

    def close(self) -> None:
        """Announce all portions but the last, which is put for the state's commit. Collective over all ranks."""
        while self._num_run < self._number - 1:
            if self._arrivals is None:
                self._announce()
                continue
            self._arrivals.arrive()
            self._arrivals.wait()
            self._run_next(self._arrivals)
        self._put()

    @property
    def _is_due(self) -> bool:
        """Whether this rank's groups of the next portion are whole; the last is left to the states' own turn."""
        return self._num_run < self._number - 1 and len(self._whole) >= self._end(self._num_run)

    def _end(self, portion: int) -> int:
        """How many of the replica's groups the portions up to this one have."""
        return -(-(portion + 1) * self._num_groups // self._number)

    def _run_next(self, arrivals: Arrivals) -> None:
        """Announce the next portion and score it. Collective over all ranks."""
        arrivals.next_round()
        self._announce()
        samples = self._open_samples
        for score in self._scores:
            with self._timeline.stage(score.state.value, samples.step):
                score(samples)

    def _announce(self) -> None:
        self._put()
        self._open_samples.announce_portion()
        self._num_run += 1

    def _put(self) -> None:
        """Store what this rank's groups of the next portion have."""
        for group in self._whole[self._end(self._num_run - 1) : self._end(self._num_run)]:
            self._open_samples.put(WorkerState.GENERATION, group)

    @property
    def _open_samples(self) -> Samples:
        assert self._samples is not None, "portions are of a step that is open"
        return self._samples

    def _agreed(self, found: bool) -> bool:
        """What the first rank of the replica has found. Collective over the replica."""
        if self._axis.size == 1:
            return found
        own = bytes([found]) if self._axis.rank == 0 else None
        return bool(broadcast_bytes(own, self._axis.ranks[0], self._axis.group)[0])


def _is_complete_before(arrivals: Arrivals, came: Came) -> bool:
    """Whether all ranks have arrived before what this rank waits for came; waits for one of both."""
    while came(0.0) is None:
        if arrivals.are_complete:
            return True
        came(_PAUSE_SECONDS)
    return False
