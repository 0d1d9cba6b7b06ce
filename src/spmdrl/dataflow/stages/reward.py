"""The reward state: scoring starts while responses still arrive, and this state waits for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import SCORE_COLUMNS
from spmdrl.dataflow.stages.quarantine import Quarantine
from spmdrl.dataflow.stages.rollout.requests import EndedResponses
from spmdrl.dataflow.stages.rows import turn_texts
from spmdrl.engines.generation.protocol import Response
from spmdrl.engines.reward.calls import RewardCall, RewardResult, joined, with_earned, with_part
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.nouns.batch import Batch
from spmdrl.nouns.roles import WorkerState
from spmdrl.nouns.settings.reward_config import RewardConfig
from spmdrl.observability.fault_points import faultpoint
from spmdrl.observability.metrics import Recorder
from spmdrl.observability.timeline import Timeline
from spmdrl.resources.collectives import gather_bytes, sum_over
from spmdrl.runtime.supervision.stop_request import stop_reason
from spmdrl.runtime.workers.call_pool import Unanswered
from spmdrl.runtime.workers.strikes import Subject
from spmdrl.runtime.workers.verdict import FAILURES, Outcome, Verdict

DecodeTokens = Callable[[Sequence[int]], str]


class RewardStage:
    """State that submits responses to the reward children as they end, and later stores trained rows' results."""

    state = WorkerState.REWARD

    def __init__(
        self, pool: RewardPool, config: RewardConfig, decode: DecodeTokens, recorder: Recorder,
        timeline: Timeline | None = None, quarantine: Quarantine | None = None,
    ):  # fmt: skip
        """`timeline` records the state's waiting from the end of generation on."""
        self._quarantine = quarantine
        self.config = config
        self._timeline = timeline
        self.recorder = recorder
        self._rewards = StreamedRewards(pool, decode)
        self._so_far = (0, 0, 0)
        """present step, number of its failed rows, and of its rows"""
        self._groups: dict[int, Hashable] = {}
        """groups of this step with ended responses, by their places in its batch"""

    def ended(self, ended: Sequence[EndedResponses]) -> None:
        """Start the rewards of responses, without waiting."""
        for one in ended:
            row = next(iter(one.by_member.values())).row
            self._groups[row // one.group_size] = one.group
        self._rewards.begin(ended)

    def __call__(self, samples: Samples) -> None:
        """Wait for the rewards of the rows that this rank generated. Collective.

        Raises RewardFailure on every rank if more than `reward.max_error_rate` of the step's calls have failed.
        """
        rows = samples.rows.take_generated(self.state)
        # Groups that continue in a later step aren't among them; their rewards wait in the pool.
        groups = [self._groups[row // samples.group_size] for row in rows[:: samples.group_size]]
        if self._timeline is not None and (generated := self._timeline.end_of("generation", samples.step)) is not None:
            came = self._rewards.came_at(groups)
            self._timeline.waited(self.state.value, samples.step, start=generated, end=came)
        try:
            results = self._rewards.collect(groups)
        except Unanswered:
            # The commit ends the step on all ranks.
            rows, results = [], []
        self._groups.clear()
        for part, weight in self.config.parts_beside.items() if rows else ():
            scores_B = samples.read(rows, [SCORE_COLUMNS[part]]).dense(SCORE_COLUMNS[part])
            results = _with_scores(results, scores_B, part, weight)
        columns = columns_of(rows, results)
        faultpoint("reward", columns.dense("reward"))
        samples.put(self.state, columns)
        report(results, self.recorder)
        self._check_error_rate(results, samples.step)
        samples.commit(self.state)

    def _check_error_rate(self, results: list[RewardResult], step: int) -> None:
        failed = [verdict in FAILURES for result in results for verdict in result.verdicts]
        known_step, total, num_rows = self._so_far
        if known_step != step:
            total = num_rows = 0
        asked = stop_reason() is not None
        num_strikes = 0 if self._quarantine is None else self._quarantine.strikes.num_new
        counts = torch.tensor([sum(failed), len(failed), asked, num_strikes])
        now, rows_now, num_asked, strikes_now = sum_over(counts).tolist()
        if self._quarantine is not None and strikes_now:
            self._quarantine.exchange(step)
        if num_asked:
            # Some ranks' rewards are missing, and the step is abandoned.
            return
        total, num_rows = total + now, num_rows + rows_now
        self._so_far = (step, total, num_rows)
        if total > self.config.max_error_rate * num_rows:
            own_error = next((result.error for result in results if result.error), None) or ""
            errors = [error.decode() for error in gather_bytes(own_error.encode()) if error]
            raise RewardFailure(
                f"the reward failed on {total} of {num_rows} rows, more than reward.max_error_rate "
                f"{self.config.max_error_rate} allows; the first failure: {errors[0] if errors else 'unknown'}; "
                "fix the reward function, or raise the limit"
            )


def _with_scores(results: Sequence[RewardResult], scores_B: Tensor, part: str, weight: float) -> list[RewardResult]:
    """Return the results with one more part, whose scores [B] are those of their rows, in order; NaN for none."""
    scores = iter([None if math.isnan(score) else score for score in scores_B.tolist()])
    return [with_part(result, part, list(islice(scores, len(result.rewards))), weight) for result in results]


def report(results: Sequence[RewardResult], recorder: Recorder) -> None:
    """Record each function's mean, failures and failed programs by kind, and the share of rows without a reward."""
    for result in results:
        for function, values in result.parts.items():
            usable = [value for value in values if value is not None]
            if usable:
                recorder.mean(f"rewards/{function}/mean", sum(usable) / len(usable), len(usable))
        for verdict in result.verdicts:
            if verdict in FAILURES:
                recorder.total(f"reward/errors/{verdict.name.lower()}", 1)
            if verdict is Verdict.QUARANTINED:
                recorder.total("reward/quarantined", 1)
            if verdict.is_of_program:
                recorder.total(f"reward/programs/{verdict.name.lower()}", 1)
        recorder.mean("reward/unscored_ratio", result.rewards.count(None) / len(result.rewards), len(result.rewards))


class RewardFailure(ValueError):
    """Raised if too many rewards failed for the rest to be trusted."""


def columns_of(rows: Sequence[int], results: Sequence[RewardResult]) -> Batch:
    """Return rewards (NaN for none) and verdicts of these rows, which are the groups of `results` in order."""
    batch = Batch.of_rows(rows)
    rewards = [float("nan") if value is None else value for result in results for value in result.rewards]
    verdicts = [int(verdict) for result in results for verdict in result.verdicts]
    batch.put_dense("reward", torch.tensor(rewards, dtype=torch.float32))
    parts = [
        [float("nan") if part is None else part for part in row]
        for result in results
        for row in zip(*result.parts.values(), strict=True)
    ]
    batch.put_lists("reward_parts", parts, torch.float32)
    batch.put_dense("reward_verdict", torch.tensor(verdicts, dtype=torch.int32))
    return batch


@dataclass
class _GroupRewards:
    """Responses of one group: they wait for a call, are in one, or were judged by the environment."""

    waiting: dict[int, Response] = field(default_factory=dict)
    calls: list[tuple[int, ...]] = field(default_factory=list)
    """members that each call scores"""
    judged: dict[int, RewardResult] = field(default_factory=dict)
    """results of members that the environment judged itself"""
    earned: dict[int, float] = field(default_factory=dict)
    """sums of the rewards of members' turns"""


class StreamedRewards:
    """Listener that submits each response for its reward once: when it ends, or the last of its group does.

    A group may stay pending over steps: repeated responses are ignored, and results are kept until `collect`.
    """

    def __init__(self, pool: RewardPool, decode: DecodeTokens):
        self._pool = pool
        self._decode = decode
        self._groups: dict[Hashable, _GroupRewards] = {}

    def begin(self, ended: Sequence[EndedResponses]) -> None:
        """Start the rewards of these responses as far as `reward.call_level` allows, without waiting."""
        calls = [call for one in ended for call in self._calls_of(one)]
        if calls:
            self._pool.submit(dict(calls))

    def _calls_of(self, ended: EndedResponses) -> Iterator[tuple[Hashable, RewardCall]]:
        """Yield the call that these responses complete, if any, under its key."""
        begun = self._groups.setdefault(ended.group, _GroupRewards())
        known = {member for members in begun.calls for member in members}
        for member, response in ended.by_member.items():
            begun.earned[member] = math.fsum(response.turn_rewards)
            if response.outcome is not None:
                begun.judged[member] = self._judged(ended.group, response.outcome)
            elif member not in known:
                begun.waiting[member] = response
        is_whole = len(begun.waiting) + len(begun.judged) == ended.group_size
        if begun.waiting and (self._pool.call_level == "response" or is_whole):
            members = tuple(sorted(begun.waiting))
            yield (
                (ended.group, members[0]),
                reward_call(ended.prompt, [begun.waiting[member] for member in members], self._decode),
            )
            begun.calls.append(members)
            begun.waiting.clear()

    def collect(self, groups: Sequence[Hashable]) -> list[RewardResult]:
        """Wait for the rewards of these groups, whose responses were all submitted, and forget them."""
        keys = self._keys(groups)
        begun = {group: self._groups.pop(group) for group in groups}
        results = dict(zip(keys, self._pool.collect(keys), strict=True))
        return [
            with_earned(
                joined(
                    group,
                    [
                        *((members, results[group, members[0]]) for members in one.calls),
                        *(((member,), result) for member, result in one.judged.items()),
                    ],
                ),
                [one.earned[member] for member in range(len(one.earned))],
            )
            for group, one in begun.items()
        ]

    def came_at(self, groups: Sequence[Hashable]) -> float:
        """Wait for the rewards of these groups; returns the `time.perf_counter` of the last one."""
        return self._pool.came_at(self._keys(groups))

    def _keys(self, groups: Sequence[Hashable]) -> list[Hashable]:
        return [(group, members[0]) for group in groups for members in self._groups[group].calls]

    def _judged(self, key: Hashable, outcome: Outcome) -> RewardResult:
        """Return the result of a row that no function judges."""
        parts: dict[str, list[float | None]] = {name: [None] for name in self._pool.names}
        return RewardResult(key, [outcome.reward], parts, [outcome.verdict], outcome.error)


def reward_call(prompt: Prompt, responses: Sequence[Response], decode: DecodeTokens) -> RewardCall:
    """Build a call whose completions are the model's last texts: an environment's text isn't the model's answer."""
    token_ids, size = [list(response.last_turn) for response in responses], len(responses)
    columns = {name: [value] * size for name, value in prompt.columns.items()}
    if any(response.turns is not None for response in responses):
        columns["turns"] = [turns_record(response, decode)["turns"] for response in responses]
    texts, subject = [decode(ids) for ids in token_ids], Subject(prompt.id, prompt.text)
    return RewardCall([prompt.original] * size, texts, token_ids, columns, subject)


def turns_record(response: Response, decode: DecodeTokens) -> dict[str, Any]:
    """Return `turns`, each one's texts of model and environment; empty without an environment."""
    if response.turns is None:
        return {}
    texts = turn_texts(response.token_ids, response.turns, decode)
    return {"turns": [{"response": text, "observation": observation} for text, observation in texts]}
