"""The worker states of one run, timed, in the order of its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.schedule import Phase, Slot
from spmdrl.dataflow.stages.update import Learner
from spmdrl.nouns.batch import TokenTerms
from spmdrl.nouns.roles import WorkerState
from spmdrl.observability.timeline import Timeline
from spmdrl.resources.rank_sets import RankSets

Stage = Callable[[Samples], object]
"""The work of a worker state. Collective: every rank calls it at the same place of a step."""
Attempts = Callable[[Samples], Iterable[None]]
AtStageEnd = Callable[[int, str], None]


class StageHook:
    """Observer of the samples around each worker state; its exceptions end the step."""

    def before(self, state: WorkerState, samples: Samples) -> None:
        """Observe the samples before the state's work."""

    def after(self, state: WorkerState, samples: Samples) -> None:
        """Observe the samples after the state's work, outside of its time."""

    def loss(self, learner: Learner, terms: TokenTerms, weighted_R: Tensor) -> None:
        """Observe the loss of an update's micro-batch, on the device, before its backward pass."""


class Stages:
    """Runner of each worker state in its slot, under the timeline's clock."""

    def __init__(
        self, slots: Sequence[Slot], stages: Mapping[WorkerState, Stage], timeline: Timeline, at_end: AtStageEnd, *,
        hooks: list[StageHook], sets: RankSets, attempts: Attempts | None = None,
    ):  # fmt: skip
        """`stages` has the states of this rank, which one of `sets` shares with it.

        `attempts` yields before each generation of a step; without it, a step generates once.

        `at_end(step, stage)` is called at each stage's end, to record held memory.
        """
        self.hooks = hooks
        self._slots = slots
        self._stages = stages
        self._timeline = timeline
        self._at_end = at_end
        self._sets = sets
        self._attempts = attempts

    def run(self, phase: Phase, samples: Samples) -> None:
        """Run the slots of a phase, in their order. Collective over the ranks that have their states."""
        attempts = self._attempts if phase is Phase.GENERATION else None
        for _ in (None,) if attempts is None else attempts(samples):
            for slot in self._slots:
                members = self._sets.generation if slot.state.is_of_generation else self._sets.update
                if slot.phase is phase and members.is_member:
                    with members.alone(), self._stage(slot.state, samples):
                        self._stages[slot.state](samples)

    @contextmanager
    def _stage(self, state: WorkerState, samples: Samples) -> Iterator[None]:
        for hook in self.hooks:
            hook.before(state, samples)
        with self._timeline.stage(state.value, samples.step):
            yield
        self._at_end(samples.step, state.value)
        for hook in self.hooks:
            hook.after(state, samples)
