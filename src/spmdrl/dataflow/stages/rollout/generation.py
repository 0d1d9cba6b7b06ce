"""The generation state: prompts become responses, and each goes on as soon as it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.carried import CarriedGroups
from spmdrl.dataflow.samples.dock import Samples
from spmdrl.dataflow.samples.rounds import CarriedGroup, Quota, quotas
from spmdrl.dataflow.stages.rollout.partial import (
    OwnGroup,
    columns_of,
    is_whole,
    nothing_yet,
    packed,
    seeds_of_group,
    unpacked,
)
from spmdrl.dataflow.stages.rollout.turns import RolloutTurns, run_rollout
from spmdrl.engines.generation.native.native_engine import Lockstep
from spmdrl.engines.generation.protocol import GenerationEngine, Response, SamplingParams
from spmdrl.engines.generation.replay import record_rollouts, rollout_file
from spmdrl.observability.metrics import Recorder
from spmdrl.resources.mesh import GenerationMesh
from spmdrl.types import Batch, WorkerState


class ResponseListener(Protocol):
    """Called with responses as soon as they finish."""

    def ended(self, group: OwnGroup, responses: Sequence[Response]) -> None:
        """Take finished responses of a group.

        A group that is carried over is passed again in the step that trains it, with that step's row numbers.
        """
        ...


class RolloutRecorder:
    """A listener that keeps a step's responses and writes this rank's part of them to disk at the step's end."""

    def __init__(self, folder: Path, rank: int):
        self.folder = folder
        self.rank = rank
        self._responses: list[Response] = []
        self._prompts: dict[int, tuple[int, ...]] = {}

    def ended(self, group: OwnGroup, responses: Sequence[Response]) -> None:
        self._responses += responses
        self._prompts |= {response.row: tuple(group.prompt.prompt_ids) for response in responses}

    def write(self, step: int) -> None:
        """Write what was generated in this step, and forget it."""
        try:
            record_rollouts(rollout_file(self.folder, step, self.rank), self._responses, self._prompts)
        finally:
            self._responses.clear()
            self._prompts.clear()


class GenerationStage:
    """Runs this rank's engine over the groups dealt to its replica. Collective: every rank calls it once a step.

    The ranks of a replica get the same responses; the first of them acts for all. Where a step works on more groups
    than it trains, each replica stops when it has its quota, and carries the rest over.
    """

    state = WorkerState.GENERATION

    def __init__(
        self, engine: GenerationEngine, mesh: GenerationMesh, sampling: SamplingParams, *, carried: CarriedGroups,
        lockstep: Lockstep, seed: int, listeners: Sequence[ResponseListener], recorder: Recorder,
        turns: RolloutTurns | None = None,
    ):  # fmt: skip
        """`lockstep` joins the replicas that step together. With `turns` an environment answers between turns."""
        self.engine = engine
        self.mesh = mesh
        self.sampling = sampling
        self.carried = carried
        self.lockstep = lockstep
        self.seed = seed
        self.listeners = listeners
        self.recorder = recorder
        self.turns = turns

    def __call__(self, samples: Samples) -> None:
        own = self._own_groups(samples)
        quota = self._quota(samples)
        left: dict[int, Batch] = {}
        stops_early = samples.num_rows > self.carried.rules.num_wanted * samples.group_size
        for group, responses in self._answers(own, self._all_have(quota) if stops_early else None):
            if self.mesh.is_leader:
                num_begun = sum(response.num_own_tokens for response in group.begun)
                num_tokens = sum(response.num_own_tokens for response in responses)
                self.recorder.total("generation/tokens", num_tokens - num_begun)
            if is_whole(responses) and quota.admit(is_last_round=group.round >= self.carried.rules.max_rounds):
                if self.mesh.is_leader:
                    samples.put(self.state, columns_of(responses))
                    self._report(group.prompt, responses)
            else:
                left[group.serial] = packed(responses)
                if self.mesh.is_leader:
                    samples.mark_deferred(group.rows)
        samples.commit(self.state)
        self._carry_over(samples, left)

    def _own_groups(self, samples: Samples) -> list[OwnGroup]:
        rows, size, groups = samples.deal_generation(), samples.group_size, self.carried.of_step(samples.step)
        serials, rounds, own = groups.serials, groups.rounds, []
        for start in range(0, len(rows), size):
            number, members = rows[start] // size, rows[start : start + size]
            is_carried = number < len(groups.carried)
            begun = unpacked(self.carried.responses(serials[number]), members) if is_carried else nothing_yet(members)
            seeds = seeds_of_group(self.seed, serials[number], self.carried.rules.num_wanted, size)
            own.append(OwnGroup(serials[number], rounds[number], samples.prompts[number], seeds, begun))
        return own

    def _quota(self, samples: Samples) -> Quota:
        """How many of its groups this rank's replica is to finish."""
        rounds, shares = self.carried.of_step(samples.step).rounds, samples.generation_shares()
        dealt = [[rounds[row // samples.group_size] for row in _first_rows(samples, rank)] for rank in shares]
        place = list(shares).index(self.mesh.tensor.ranks[0])
        num_last = sum(round_ >= self.carried.rules.max_rounds for round_ in dealt[place])
        return Quota(quotas(dealt, self.carried.rules)[place], num_last)

    def _all_have(self, quota: Quota) -> Callable[[], bool]:
        """Whether all replicas that step together have their quota: they can stop together only."""
        return lambda: self.lockstep.most(int(not quota.is_met)) == [0]

    def _answers(
        self, own: Sequence[OwnGroup], is_enough: Callable[[], bool] | None
    ) -> Iterator[tuple[OwnGroup, tuple[Response, ...]]]:
        """Each group with its responses, as the last of them comes; those that were whole before come first."""
        asked, requests = [], []
        for group in own:
            self._notify(group, group.begun)
            request = group.request(self.sampling)
            if request is None:
                yield group, group.begun
            else:
                asked.append(group)
                requests.append(request)
        answers: list[list[Response]] = [[] for _ in asked]
        prompts = [group.prompt for group in asked]
        for number, responses in run_rollout(self.engine, requests, prompts, self.turns, is_enough):
            self._notify(asked[number], responses)
            answers[number] += responses
            if len(answers[number]) == len(requests[number].rows):
                yield asked[number], asked[number].answered(answers[number])

    def _notify(self, group: OwnGroup, responses: Sequence[Response]) -> None:
        """Pass those of the responses that have ended to the listeners."""
        ended = [response for response in responses if response.finish != "aborted"]
        if ended and self.mesh.is_leader:
            for listener in self.listeners:
                listener.ended(group, ended)

    def _carry_over(self, samples: Samples, left: dict[int, Batch]) -> None:
        """Record, on every rank alike, which groups go on and where."""
        groups, size = self.carried.of_step(samples.step), samples.group_size
        serials, rounds = groups.serials, groups.rounds
        trained = set((samples.rows_of_step[::size] // size).tolist())
        holders = {row // size: rank for rank in samples.generation_shares() for row in _first_rows(samples, rank)}
        assert len(trained) == self.carried.rules.num_wanted, (len(trained), self.carried.rules)
        self.carried.carry(
            [
                CarriedGroup(serials[number], rounds[number], holders[number])
                for number in range(len(serials))
                if number not in trained
            ],
            left,
        )

    def _report(self, prompt: Prompt, responses: Sequence[Response]) -> None:
        for response in responses:
            length = response.num_own_tokens
            self.recorder.total("perf/tokens", len(prompt.prompt_ids) + len(response.token_ids))
            self.recorder.mean("completions/mean_length", length)
            self.recorder.minimum("completions/min_length", length)
            self.recorder.maximum("completions/max_length", length)
            self.recorder.mean("completions/clipped_ratio", float(response.finish == "length"))
            if response.turns is not None:
                self.recorder.mean("environment/turns", max(response.turns, default=0))
                self.recorder.mean("environment/tokens", response.turns.count(0))


def _first_rows(samples: Samples, rank: int) -> list[int]:
    """The first row of each group that a rank was dealt."""
    return samples.generation_shares()[rank][:: samples.group_size].tolist()
