"""The worker states of one run, timed, in the order in which the loop calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.advantage import AdvantageStage, Credit
from spmdrl.dataflow.stages.returns import ReturnsStage, Rewarding
from spmdrl.dataflow.stages.rollout.refill import Refill
from spmdrl.dataflow.stages.update import Learner, UpdateStage
from spmdrl.nouns.batch import TokenTerms
from spmdrl.nouns.roles import WorkerState
from spmdrl.observability.timeline import Timeline

AtStageEnd = Callable[[int, str], None]


class Stage(Protocol):
    """A worker state that needs nothing but the samples."""

    @property
    def state(self) -> WorkerState: ...

    def __call__(self, samples: Samples) -> None: ...


class Crediting(Credit, Rewarding, Protocol):
    """The part of an algorithm that turns rewards into what is learnt."""


class StageHook:
    """Looks at the samples around each worker state; what it raises leaves the step."""

    def before(self, state: WorkerState, samples: Samples) -> None:
        """Called before the state's work."""

    def after(self, state: WorkerState, samples: Samples) -> None:
        """Called after the state's work, outside of its time."""

    def loss(self, learner: Learner, terms: TokenTerms, weighted_R: Tensor) -> None:
        """Called in an update with the loss of a micro-batch, on the device, before its backward pass."""


class Stages:
    """Calls each worker state under the timeline's clock."""

    def __init__(
        self, *, attempt: Sequence[Stage], refill: Refill | None, without_actor: Sequence[Stage],
        with_actor: Sequence[Stage], returns: ReturnsStage | None, advantage: AdvantageStage,
        with_credit: Sequence[Stage], update: UpdateStage, timeline: Timeline, at_end: AtStageEnd,
    ):  # fmt: skip
        """`attempt` are the states that answer prompts, again wherever there is a `refill`.

        `at_end(step, stage)` is called at each stage's end: the place to record what memory is held.
        """
        self.without_actor = [self._timed(stage) for stage in without_actor]
        self.with_actor = [self._timed(stage) for stage in with_actor]
        self.with_credit = [self._timed(stage) for stage in with_credit]
        self._attempt = [self._timed(stage) for stage in attempt]
        self._refill = refill
        self._returns = returns
        self._advantage = advantage
        self._update = update
        self._timeline = timeline
        self._at_end = at_end
        self.hooks: list[StageHook] = []

    def generate(self, samples: Samples) -> None:
        """Answer the prompts, and others in place of those that the algorithm leaves out. Collective.

        Rewards start as responses end.
        """
        for _ in (None,) if self._refill is None else self._refill.attempts(samples):
            for stage in self._attempt:
                stage(samples)

    def credit(self, samples: Samples, credit: Crediting) -> Mapping[str, float]:
        """Turn rewards into returns, where a critic learns them, and advantages. Collective.

        Returns the keys of the algorithm that change with the next step.
        """
        if self._returns is not None:
            with self._stage(self._returns.state, samples):
                self._returns(samples, credit)
        with self._stage(self._advantage.state, samples):
            return self._advantage(samples, credit)

    def update(self, samples: Samples, learner: Learner) -> None:
        """Train on the batch. Collective."""
        with self._stage(self._update.state, samples):
            self._update(samples, learner, [hook.loss for hook in self.hooks])

    def _timed(self, stage: Stage) -> Callable[[Samples], None]:
        def run(samples: Samples) -> None:
            with self._stage(stage.state, samples):
                stage(samples)

        return run

    @contextmanager
    def _stage(self, state: WorkerState, samples: Samples) -> Iterator[None]:
        for hook in self.hooks:
            hook.before(state, samples)
        with self._timeline.stage(state.value, samples.step):
            yield
        self._at_end(samples.step, state.value)
        for hook in self.hooks:
            hook.after(state, samples)
