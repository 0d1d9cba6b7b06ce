"""Portions of a step's responses, scored while this rank waits for tools.

    row has ended --add--> portion is whole --arrive--> whole on all ranks --put, announce--> scored by each model

What a portion holds follows from tokens alone: of each replica, a share of its rows in the order in which they ended.
So it holds the same rows whether it is scored beside generation or after it, and results are equal to the bit. Later
portions are smaller: the last is scored after generation, and what ends late has few waits left to be scored in.

Scoring is collective over all ranks, which generate at their own pace. A rank arrives at the next portion, without
waiting, once its own rows of it have ended and the engine waits: for an environment's answer, or with none left.
When all ranks have arrived the portion runs; each rank finds out between two steps of its engine, or while it waits.

Nothing can deadlock. Portions run in their order, one at a time, in the thread that generates. Until all ranks have
arrived at a portion, none waits for another one. Every rank arrives at every portion, at the latest when its last row
has ended; and once all have, each joins within one step of its engine. The ranks of a replica are at the same place of
the same program and do what their first rank has found. Replicas that step together would wait for each other's steps,
so theirs aren't scored beside generation.
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
    """Announces a step's responses in so many portions; with `arrivals`, scores all but the last as it goes on."""

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
        self._num_rows = 0
        self._ended: list[Response] = []
        self._num_run = 0
        self._portion_seconds = 0.0
        """what the last portion took"""
        self._mean_wait_seconds = 0.0
        """over the waits so far, the newer ones counting more"""
        self._waits: list[tuple[int, float]] = []
        self._scored_seconds = 0.0

    def open(self, samples: Samples, num_rows: int) -> None:
        """Begin a step of which this rank's replica generates so many rows."""
        self._samples, self._num_rows, self._num_run, self._scored_seconds = samples, num_rows, 0, 0.0
        self._ended.clear()
        self._waits.clear()

    def add(self, responses: Sequence[Response]) -> None:
        """Add responses that have ended and will be trained; their columns are put with their portion."""
        self._ended += responses

    def between_steps(self) -> None:
        """Score what all ranks have arrived at. Collective over the replica."""
        while self._arrivals is not None and self._arrivals.has_arrived and self._agreed(self._arrivals.are_complete):
            self._run_next(self._arrivals)

    def until(self, came: Came | None) -> None:
        """Score portions until what the replica's first rank waits for has come. Collective over the replica.

        A wait that is shorter than a portion hides little of it, and how long it will be is unknown. So this rank
        arrives at a portion once the wait has lasted as long as the last one took, or a quarter of the usual wait.
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
            assert ended is not None, "without a limit it waits to the end"
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
        """Most seconds of scoring that any order could have put into this step's waits, by what it took for a row.

        So much of what had ended before a wait began, and wasn't scored in an earlier one, as the wait is long.
        """
        row_seconds = self._scored_seconds / max(self._end(self._num_run - 1), 1)
        hidden = 0.0
        for num_ended, seconds in self._waits:
            hidden += min(seconds, num_ended * row_seconds - hidden)
        return hidden

    def _is_long(self, came: Came, started: float) -> bool:
        """Whether the wait since `started` is worth a portion; waits until it is, or what is waited for came."""
        worth = min(self._portion_seconds, self._mean_wait_seconds / 4)
        return came(max(0.0, started + worth - time.perf_counter())) is None

    @property
    def _is_due(self) -> bool:
        """Whether this rank's rows of the next portion have ended; the last is left to the states' own turn."""
        return self._num_run < self._number - 1 and len(self._ended) >= self._end(self._num_run)

    def _end(self, portion: int) -> int:
        """How many of the replica's rows the portions up to this one have; what is left falls as its square."""
        num_after = self._number - 1 - portion
        return self._num_rows + -self._num_rows * num_after**2 // self._number**2

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
        """Store what this rank's rows of the next portion have."""
        responses = self._ended[self._end(self._num_run - 1) : self._end(self._num_run)]
        if responses:
            self._open_samples.put(WorkerState.GENERATION, columns_of(responses))

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


def build_portions(
    number: int, scores: Sequence[ScoreStage], mesh: GenerationMesh, timeline: Timeline, note: Callable[[str], None], *,
    fuse: bool, swaps: bool, timeout_seconds: float,
) -> Portions:  # fmt: skip
    """Portions that are scored while rows wait for an environment, unless something stands against it. Collective."""
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
    """Whether all ranks have arrived before what this rank waits for came; waits for one of both."""
    while came(0.0) is None:
        if arrivals.are_complete:
            return True
        came(_PAUSE_SECONDS)
    return False
