"""Portions of a step's responses, scored while this rank waits for tools.

    row has ended --add--> portion is whole --arrive--> whole on all ranks --put, announce--> scored by each model

A portion's content depends on tokens only: a share of each replica's rows, in the order in which they ended. So it has
the same rows whether it is scored during generation or after it, and results are equal to the bit. Later portions are
smaller: the last is scored after generation, and few waits remain for scoring rows that end late.

Scoring is collective over all ranks, which generate at their own pace. A rank arrives at the next portion, without
waiting, once its own rows of it have ended and the engine is idle: waiting for an environment, or without rows. When
all ranks have arrived the portion runs; each rank checks between two steps of its engine, or while it waits.

There is no deadlock. Portions run in order, one at a time, in the thread that generates. Until all ranks have arrived
at a portion, none waits for another one. Every rank arrives at every portion, at the latest when its last row has
ended; and once all have, each joins within one step of its engine. The ranks of a replica are at the same place of the
same program and follow their first rank's checks. Replicas that step together would wait for each other's steps, so
theirs aren't scored during generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.inference import ScoreStage
from spmdrl.dataflow.stages.rollout.requests import Came, columns_of
from spmdrl.engines.generation.protocol import Response
from spmdrl.nouns.batch import WorkerState
from spmdrl.observability.timeline import Timeline
from spmdrl.resources.collectives import Arrivals, broadcast_bytes
from spmdrl.resources.mesh import Axis, GenerationMesh

_PAUSE_SECONDS = 0.001


class Portions:
    """A step's responses in `number` portions; with `arrivals`, all but the last are scored during generation."""

    def __init__(
        self, number: int, scores: Sequence[ScoreStage], axis: Axis, timeline: Timeline, arrivals: Arrivals | None
    ):
        """`axis` connects the ranks of this rank's replica."""
        self._number = number
        self._scores = scores
        self._axis = axis
        self._timeline = timeline
        self._arrivals = arrivals
        self._samples: Samples | None = None
        self._num_rows = 0
        self._ended: list[Response] = []
        self._num_run = 0
        self._portion_seconds = 0.0
        """duration of the last portion"""
        self._mean_wait_seconds = 0.0
        """moving average over the waits so far"""
        self._waits: list[tuple[int, float]] = []
        self._scored_seconds = 0.0

    def open(self, samples: Samples, num_rows: int) -> None:
        """Begin a step in which this rank's replica generates this many rows."""
        self._samples, self._num_rows, self._num_run, self._scored_seconds = samples, num_rows, 0, 0.0
        self._ended.clear()
        self._waits.clear()

    def add(self, responses: Sequence[Response]) -> None:
        """Add ended responses that will be trained on; their columns are put with their portion."""
        self._ended += responses

    def between_steps(self) -> None:
        """Score portions at which all ranks have arrived. Collective over the replica."""
        while self._arrivals is not None and self._arrivals.has_arrived and self._agreed(self._arrivals.are_complete):
            self._run_next(self._arrivals)

    def until(self, came: Came | None) -> None:
        """Score portions until the event that the replica's first rank waits for. Collective over the replica.

        A wait shorter than a portion hides little of it, and its length is unknown. So this rank arrives at a portion
        once the wait has lasted as long as the last portion took, or a quarter of the usual wait.
        """
        started = time.perf_counter()
        while self._arrivals is not None and self._is_due:
            if not self._arrivals.has_arrived and not self._agreed(came is not None and self._is_long(came, started)):
                break
            self._arrivals.arrive()
            if not self._agreed(came is not None and _is_complete_before(self._arrivals, came)):
                break
            self._run_next(self._arrivals)
        if came is not None:
            ended = came(None)
            assert ended is not None, "a wait without a limit returns only at the end"
            seconds = max(0.0, ended - started)
            self._waits.append((len(self._ended), seconds))
            self._mean_wait_seconds += (seconds - self._mean_wait_seconds) / 8
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

    def hideable_seconds(self) -> float:
        """Return the most seconds of scoring that any order could have hidden in this step's waits.

        Rows that had ended before a wait began, and weren't scored earlier, count at most for the wait's length.
        """
        row_seconds = self._scored_seconds / max(self._end(self._num_run - 1), 1)
        hidden = 0.0
        for num_ended, seconds in self._waits:
            hidden += min(seconds, num_ended * row_seconds - hidden)
        return hidden

    def _is_long(self, came: Came, started: float) -> bool:
        """Return True if the wait since `started` is worth a portion; waits until it is, or until it ends."""
        worth = min(self._portion_seconds, self._mean_wait_seconds / 4)
        return came(max(0.0, started + worth - time.perf_counter())) is None

    @property
    def _is_due(self) -> bool:
        """Return True if this rank's rows of the next portion have ended; the last is left to the states' own turn."""
        return self._num_run < self._number - 1 and len(self._ended) >= self._end(self._num_run)

    def _end(self, portion: int) -> int:
        """Return the number of the replica's rows in the portions up to this one."""
        return rows_until(portion, self._number, self._num_rows)

    def _run_next(self, arrivals: Arrivals) -> None:
        """Announce the next portion and score it. Collective over all ranks."""
        arrivals.next_round()
        self._announce()
        samples, started = self._open_samples, time.perf_counter()
        for score in self._scores:
            with self._timeline.stage(score.state.value, samples.step):
                score(samples)
        self._portion_seconds = time.perf_counter() - started
        self._scored_seconds += self._portion_seconds

    def _announce(self) -> None:
        self._put()
        self._open_samples.announce_portion()
        self._num_run += 1

    def _put(self) -> None:
        """Store the columns of this rank's rows of the next portion."""
        responses = self._ended[self._end(self._num_run - 1) : self._end(self._num_run)]
        if responses:
            self._open_samples.put(WorkerState.GENERATION, columns_of(responses))

    @property
    def _open_samples(self) -> Samples:
        assert self._samples is not None, "portions need an open step"
        return self._samples

    def _agreed(self, found: bool) -> bool:
        """Return the finding of the replica's first rank. Collective over the replica."""
        if self._axis.size == 1:
            return found
        own = bytes([found]) if self._axis.rank == 0 else None
        return bool(broadcast_bytes(own, self._axis.ranks[0], self._axis.group)[0])


def rows_until(portion: int, number: int, num_rows: int) -> int:
    """Return the number of rows in the portions up to this one; the rest falls quadratically."""
    return num_rows + -num_rows * (number - 1 - portion) ** 2 // number**2


def build_portions(
    number: int, scores: Sequence[ScoreStage], mesh: GenerationMesh, timeline: Timeline, note: Callable[[str], None], *,
    fuse: bool, swaps: bool, timeout_seconds: float,
) -> Portions:  # fmt: skip
    """Build portions, scored while rows wait for an environment unless an obstacle prevents it. Collective."""
    obstacle = None
    if not fuse:
        obstacle = "as dock.fuse is false"
    elif swaps:
        obstacle = "as the training state leaves for generation"
    elif mesh.expert.size > 1:
        obstacle = "as replicas that share experts step together"
    when = f"after generation, {obstacle}" if obstacle else "while rows wait for the environment"
    note(f"{', '.join(stage.state.value for stage in scores)}: in {number} portions, {when}")
    return Portions(number, scores, mesh.tensor, timeline, None if obstacle else Arrivals(timeout_seconds))


def _is_complete_before(arrivals: Arrivals, came: Came) -> bool:
    """Wait for either all ranks' arrival or the awaited event; returns True if the arrival was first."""
    while came(0.0) is None:
        if arrivals.are_complete:
            return True
        came(_PAUSE_SECONDS)
    return False
