"""What is recorded of rewards, those that are missing included, and how many may be missing."""

from __future__ import annotations

import pytest

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.reward import RewardFailure, RewardStage, report
from spmdrl.dataflow.stages.rollout.requests import EndedResponses
from spmdrl.engines.generation.protocol import Response
from spmdrl.engines.reward.calls import FunctionScores, combine
from spmdrl.nouns.settings.reward_config import RewardConfig
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.runtime.workers.verdict import Verdict

SCORED, WRONG, NONE, LATE = Verdict.SCORED, Verdict.WRONG, Verdict.LEFT_OUT, Verdict.TIMED_OUT


def metrics_of(*calls: FunctionScores) -> dict[str, float]:
    recorder = Recorder()
    report([combine("key", {"fn": call}, [1.0]) for call in calls], recorder)
    return merge([encode(recorder.drain())])


def test_rows_without_a_reward_are_a_share_of_all_rows():
    calls = FunctionScores([1.0, None], [SCORED, NONE]), FunctionScores([None, 0.0], [LATE, WRONG])
    metrics = metrics_of(*calls)
    assert metrics["reward/unscored_ratio"] == 0.5
    assert metrics["reward/errors/timed_out"] == 1.0
    assert metrics["rewards/fn/mean"] == 0.5


def test_a_function_that_scores_no_row_is_seen():
    assert metrics_of(FunctionScores([None] * 3, [NONE] * 3)) == {"reward/unscored_ratio": 1.0}
    assert metrics_of(FunctionScores([0.0], [WRONG]))["reward/unscored_ratio"] == 0.0


class FirstFail:
    """A pool whose first rows of an attempt are late."""

    names, call_level = ("fn",), "response"
    num_failures = 0

    def submit(self, calls): ...

    def collect(self, keys):
        scores = [
            FunctionScores.failed(1, LATE, "late") if place < self.num_failures else FunctionScores([1.0], [SCORED])
            for place in range(len(keys))
        ]
        return [combine(key, {"fn": score}, [1.0]) for key, score in zip(keys, scores, strict=True)]


class Generated:
    """The samples of a step, of which these rows were generated last."""

    group_size = 1

    def __init__(self, step: int, rows: range):
        self.step, self.rows, self._generated = step, self, rows

    def take_generated(self, state):
        return list(self._generated)

    def put(self, state, batch): ...

    def commit(self, state): ...


def test_failures_are_a_share_of_all_rows_that_a_step_generated_so_far():
    pool = FirstFail()
    stage = RewardStage(pool, RewardConfig(max_error_rate=0.25), str, Recorder())

    def attempt(step: int, rows: range, num_failures: int) -> None:
        pool.num_failures = num_failures
        for row in rows:
            response = Response(row, (1,), (0.0,), "stop", (0,))
            stage.ended([EndedResponses(row, Prompt("", [1], "", None, {}, ""), 1, {0: response})])
        stage(Generated(step, rows))

    attempt(1, range(8), 1)
    attempt(1, range(8, 10), 1)
    with pytest.raises(RewardFailure, match="failed on 3 of 11 rows, more than reward.max_error_rate 0.25"):
        attempt(1, range(10, 11), 1)
    attempt(2, range(4), 1)
    with pytest.raises(RewardFailure, match="failed on 2 of 4 rows"):
        attempt(3, range(4), 2)
