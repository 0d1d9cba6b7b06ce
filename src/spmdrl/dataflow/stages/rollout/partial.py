"""Partial rollout: a replica's unfinished groups become pending, and a later step continues them.

begun --finish or last round--> trained in that step        begun --deferred--> pending --next step--> begun
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.pending import FINISH, PendingGroup, PendingGroups, Quota, StepGroups, quotas
from spmdrl.dataflow.samples.row_lives import DEFERRED
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.rollout.generation import GenerationStage, WholeGroup
from spmdrl.dataflow.stages.rollout.requests import EndedResponses, StopPoint, row_seed, run_rollout, token_columns
from spmdrl.dataflow.stages.rows import ROUTED_EXPERTS, TURN_REWARDS, TURNS
from spmdrl.engines.generation.native.row_steps import Lockstep
from spmdrl.engines.generation.protocol import Finish, PartialResponse, Request, Response
from spmdrl.engines.generation.replay import packed_outcomes, unpacked_outcomes
from spmdrl.nouns.batch import Batch
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.runtime.workers.verdict import Outcome

_FINISHES: tuple[Finish, ...] = get_args(Finish)
OUTCOME_REWARD, OUTCOME_VERDICT = "outcome_reward", "outcome_verdict"
"""Dense columns of a pending group with rows that an environment judged."""


@dataclass(frozen=True)
class OwnGroup:
    """A group that was dealt to this rank's replica."""

    serial: int
    round: int
    prompt: Prompt
    seeds: tuple[int, ...]
    begun: tuple[Response, ...]
    """Responses of its rows so far, under their numbers in this step's batch; `aborted` if they continue."""

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(response.row for response in self.begun)

    def request(self, sampling: SamplingParams) -> Request | None:
        """Return the engine's request for the unfinished rows; None if all have ended."""
        members = [number for number, response in enumerate(self.begun) if response.finish == "aborted"]
        if not members:
            return None
        going_on = [self.begun[member] for member in members]
        return Request(
            rows=tuple(response.row for response in going_on),
            prompt_ids=tuple(self.prompt.prompt_ids),
            seeds=tuple(self.seeds[member] for member in members),
            sampling=sampling,
            partial=tuple(map(_partial, going_on)) if any(response.token_ids for response in going_on) else None,
        )

    def answered(self, responses: Iterable[Response]) -> tuple[Response, ...]:
        """Return all its rows, with the engine's responses to the requested ones."""
        by_row = {response.row: response for response in responses}
        return tuple(by_row.get(response.row, response) for response in self.begun)


AnsweredGroup = tuple[OwnGroup, Sequence[Response]]
"""A group with responses to it."""


@dataclass(kw_only=True)
class ContinuingStage(GenerationStage):
    """Generation of groups some of whose rows have tokens already."""

    def _answers(self, own: Sequence[OwnGroup], is_enough: Callable[[], bool]) -> Iterator[Sequence[AnsweredGroup]]:
        """Yield groups completed by an engine step; those that were already complete come first."""
        self._notify_of_ended([(group, group.begun) for group in own])
        asked = [(group, group.request(self.sampling)) for group in own]
        if whole := [(group, group.begun) for group, request in asked if request is None]:
            yield whole
        requested = [group for group, request in asked if request is not None]
        requests = [request for _, request in asked if request is not None]
        answers: list[list[Response]] = [[] for _ in requested]
        prompts = [group.prompt for group in requested]
        for ended in run_rollout(self.engine, requests, prompts, self.turns, is_enough, self.portions):
            self._notify_of_ended([(requested[number], responses) for number, responses in ended.items()])
            for number, responses in ended.items():
                answers[number] += responses
            last = [number for number in ended if len(answers[number]) == len(requests[number].rows)]
            yield [(requested[number], requested[number].answered(answers[number])) for number in last]

    def _notify_of_ended(self, groups: Iterable[AnsweredGroup]) -> None:
        ended = [
            EndedResponses.of(group.serial, group.prompt, len(group.begun), responses)
            for group, answered in groups
            if (responses := [response for response in answered if response.finish != "aborted"])
        ]
        self._notify(ended)

    def _count_new(self, group: OwnGroup, responses: Iterable[Response]) -> None:
        """Record the tokens that a group got beyond those that it had."""
        num_begun = sum(response.num_own_tokens for response in group.begun)
        self._count(sum(response.num_own_tokens for response in responses) - num_begun)


@dataclass(kw_only=True)
class PartialGenerationStage(ContinuingStage):
    """Generation of more groups than a step trains: each replica stops at its quota; the rest becomes pending.

    Collective: every rank calls it once per step.
    """

    pending: PendingGroups
    lockstep: Lockstep
    """connects the replicas that step together"""

    @classmethod
    def of(cls, generation: GenerationStage, pending: PendingGroups, device: torch.device) -> PartialGenerationStage:
        """Return the stage with the engine and settings of one whose responses all end in their step."""
        return cls(**vars(generation), pending=pending, lockstep=Lockstep(generation.mesh.expert, device))

    def __call__(self, samples: Samples) -> None:
        rows, size, rules = samples.rows.deal_generation(), samples.group_size, self.pending.rules
        groups = self.pending.of_step(samples.step)
        dealt = {rank: (share[::size] // size).tolist() for rank, share in samples.rows.shares[self.state].items()}
        own = [self._own_group(samples, groups, tuple(rows[at : at + size])) for at in range(0, len(rows), size)]
        quota = self._quota(groups, dealt)
        stops_early = samples.rows.num_rows > rules.num_wanted * size
        self._open_portions(samples, quota.number * size)
        left: dict[int, Batch] = {}
        stop = StopPoint(self.mesh)
        all_have = self._all_have(quota) if stops_early else None
        for answered in self._answers(own, lambda: stop() or (all_have is not None and all_have())):
            if stop.is_reached:
                break
            whole = []
            for group, responses in answered:
                self._count_new(group, responses)
                is_whole = all(response.finish != "aborted" for response in responses)
                if is_whole and quota.admit(is_last_round=group.round >= rules.max_rounds):
                    self._add_to_portion(responses)
                    whole.append(WholeGroup(group.prompt, responses))
                else:
                    left[group.serial] = packed(responses)
                    if self.mesh.is_leader:
                        samples.mark_dropped(group.rows, DEFERRED)
            self._put(samples, whole)
        self._commit(samples)
        self._keep_pending(samples, groups, dealt, left)

    def _own_group(self, samples: Samples, groups: StepGroups, rows: tuple[int, ...]) -> OwnGroup:
        number = rows[0] // samples.group_size
        serial = groups.serials[number]
        is_pending = number < len(groups.pending)
        begun = unpacked(self.pending.responses(serial), rows) if is_pending else nothing_yet(rows)
        seeds = seeds_of_group(self.seed, serial, self.pending.rules.num_wanted, samples.group_size)
        return OwnGroup(serial, groups.rounds[number], samples.rows.prompts[number], seeds, begun)

    def _quota(self, groups: StepGroups, dealt: Mapping[int, Sequence[int]]) -> Quota:
        """Return the number of its groups that this rank's replica must finish; `dealt` has the groups of each rank."""
        rules, place = self.pending.rules, list(dealt).index(self.mesh.tensor.ranks[0])
        rounds = [[groups.rounds[number] for number in numbers] for numbers in dealt.values()]
        num_last = sum(round_ >= rules.max_rounds for round_ in rounds[place])
        return Quota(quotas(rounds, rules)[place], num_last)

    def _all_have(self, quota: Quota) -> Callable[[], bool]:
        """Return a test of all replicas that step together for their quota: they can only stop together."""
        return lambda: self.lockstep.most(int(not quota.is_met)) == [0]

    def _keep_pending(
        self, samples: Samples, groups: StepGroups, dealt: Mapping[int, Sequence[int]], left: Mapping[int, Batch]
    ) -> None:
        """Record the pending groups and their ranks, on every rank."""
        size, rules = samples.group_size, self.pending.rules
        trained = set((samples.rows.to_train[::size] // size).tolist())
        holders = {number: rank for rank, numbers in dealt.items() for number in numbers}
        assert len(trained) == rules.num_wanted, (len(trained), rules)
        going_on = [
            PendingGroup(serial, round_, holders[number])
            for number, (serial, round_) in enumerate(zip(groups.serials, groups.rounds, strict=True))
            if number not in trained
        ]
        self.pending.replace(going_on, left)


def seeds_of_group(seed: int, serial: int, num_wanted: int, size: int) -> tuple[int, ...]:
    """Return the seeds of a group's rows, whichever step begins it: those of the step that would train it in order."""
    step, number = divmod(serial, num_wanted)
    return tuple(row_seed(seed, step + 1, number * size + member) for member in range(size))


def nothing_yet(rows: Iterable[int]) -> tuple[Response, ...]:
    """Return empty responses of rows to be started."""
    return tuple(Response(row, (), (), "aborted", ()) for row in rows)


def packed(responses: Sequence[Response]) -> Batch:
    """Return the responses of a pending group as a batch."""
    batch = token_columns([replace(response, row=member) for member, response in enumerate(responses)])
    finishes = [_FINISHES.index(response.finish) for response in responses]
    batch.put_dense(FINISH, torch.tensor(finishes, dtype=torch.int32))
    if any(response.outcome is not None for response in responses):
        rewards, verdicts = packed_outcomes(responses)
        batch.put_dense(OUTCOME_REWARD, rewards)
        batch.put_dense(OUTCOME_VERDICT, verdicts)
    return batch


def unpacked(batch: Batch, rows: Sequence[int]) -> tuple[Response, ...]:
    """Return the responses in a batch of `packed`, under these row numbers."""
    token_ids, logprobs, versions = (batch.to_lists(name) for name in ("response_ids", "rollout_logprobs", "versions"))
    turns, rewards = (batch.to_lists(name) if name in batch else None for name in (TURNS, TURN_REWARDS))
    outcomes: list[Outcome | None] = [None] * len(rows)
    if OUTCOME_VERDICT in batch:
        outcomes = unpacked_outcomes(batch.dense(OUTCOME_REWARD), batch.dense(OUTCOME_VERDICT))
    out = []
    for member, (row, finish) in enumerate(zip(rows, batch.dense(FINISH).tolist(), strict=True)):
        choices = batch.select([member]).values(ROUTED_EXPERTS) if ROUTED_EXPERTS in batch else None
        out.append(
            Response(
                row, tuple(map(int, token_ids[member])), tuple(logprobs[member]), _FINISHES[finish],
                tuple(map(int, versions[member])), choices if choices is not None and choices.numel() else None,
                None if turns is None else tuple(map(int, turns[member])),
                () if rewards is None else tuple(rewards[member]), outcomes[member],
            )
        )  # fmt: skip
    return tuple(out)


def _partial(response: Response) -> PartialResponse:
    return PartialResponse(
        response.token_ids, response.logprobs, response.versions, response.choices, response.turns,
        response.turn_rewards,
    )  # fmt: skip
