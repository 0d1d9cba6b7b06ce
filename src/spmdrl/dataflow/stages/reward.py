"""The reward state: rewards start as responses end, and are waited for here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmdrl.dataflow.samples.dock import Samples
from spmdrl.dataflow.stages.rollout.partial import OwnGroup
from spmdrl.dataflow.stages.scoring import DecodeTokens, EndedResponses, StreamedRewards
from spmdrl.engines.generation.protocol import Response
from spmdrl.engines.reward.pool import RewardConfig, RewardPool, RewardResult
from spmdrl.engines.workers.verdict import Verdict
from spmdrl.observability.metrics import Recorder
from spmdrl.resources.collectives import gather_bytes, sum_over
from spmdrl.types import Batch, WorkerState

# Verdicts about the reward function, not about the answer.
FAILURES = (Verdict.MALFORMED, Verdict.TIMED_OUT, Verdict.CRASHED)


class RewardStage:
    """Hands responses to the reward children as they end, and later stores what came back of those that are trained."""

    state = WorkerState.REWARD

    def __init__(self, pool: RewardPool, config: RewardConfig, decode: DecodeTokens, recorder: Recorder):
        self.config = config
        self.recorder = recorder
        self._rewards = StreamedRewards(pool, decode)
        self._groups: dict[int, OwnGroup] = {}
        """those of this step with responses that ended, by their first row"""

    def ended(self, group: OwnGroup, responses: Sequence[Response]) -> None:
        """Start on the rewards of responses and return at once; a carried group's are begun in the step they end in."""
        self._groups[group.rows[0]] = group
        by_member = {group.rows.index(response.row): response for response in responses}
        self._rewards.begin(EndedResponses(group.serial, group.prompt, len(group.rows), by_member))

    def __call__(self, samples: Samples) -> None:
        """Wait for the rewards of the rows that this rank generated. Collective: every rank calls it once a step.

        Raises RuntimeError on every rank when more than `reward.max_error_rate` of the calls failed.
        """
        rows = samples.take_generated(self.state)
        # Groups that go on in a later step aren't among them; their rewards wait in the pool.
        groups = [self._groups[row] for row in rows[:: samples.group_size]]
        self._groups.clear()
        results = self._rewards.collect([group.serial for group in groups])
        scored = [(group.rows, result) for group, result in zip(groups, results, strict=True)]
        samples.put(self.state, columns_of(scored))
        report(results, self.recorder)
        self._check_error_rate(results, samples.rows_of_step.size)
        samples.commit(self.state)

    def _check_error_rate(self, results: list[RewardResult], num_rows: int) -> None:
        failed = sum(verdict in FAILURES for result in results for verdict in result.verdicts)
        total = int(sum_over(torch.tensor([failed])))
        if total > self.config.max_error_rate * num_rows:
            own_error = next((result.error for result in results if result.error), None) or ""
            errors = [error.decode() for error in gather_bytes(own_error.encode()) if error]
            raise RewardFailure(
                f"the reward failed on {total} of {num_rows} rows, more than reward.max_error_rate "
                f"{self.config.max_error_rate} allows; the first failure: {errors[0] if errors else 'unknown'}; "
                "mend the reward function, or raise the limit"
            )


def report(results: Sequence[RewardResult], recorder: Recorder) -> None:
    """Record each function's mean, the failures by kind, and the share of rows without a reward."""
    for result in results:
        for function, values in result.parts.items():
            usable = [value for value in values if value is not None]
            if usable:
                recorder.mean(f"rewards/{function}/mean", sum(usable) / len(usable), len(usable))
        for verdict in result.verdicts:
            if verdict in FAILURES:
                recorder.total(f"reward/errors/{verdict.name.lower()}", 1)
        recorder.mean("reward/unscored_ratio", result.rewards.count(None) / len(result.rewards), len(result.rewards))


class RewardFailure(ValueError):
    """Too many rewards failed for the rest to be trusted."""


def columns_of(scored: list[tuple[tuple[int, ...], RewardResult]]) -> Batch:
    """Rewards (NaN where a row has none) and verdicts of these rows."""
    batch = Batch.of_rows(row for rows, _ in scored for row in rows)
    rewards = [float("nan") if value is None else value for _, result in scored for value in result.rewards]
    verdicts = [int(verdict) for _, result in scored for verdict in result.verdicts]
    batch.put_dense("reward", torch.tensor(rewards, dtype=torch.float32))
    parts = [
        [float("nan") if part is None else part for part in row]
        for _, result in scored
        for row in zip(*result.parts.values(), strict=True)
    ]
    batch.put_lists("reward_parts", parts, torch.float32)
    batch.put_dense("reward_verdict", torch.tensor(verdicts, dtype=torch.int32))
    return batch
