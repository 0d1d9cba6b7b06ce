"""What is recorded of rewards, those that are missing included."""

from __future__ import annotations

from spmdrl.dataflow.stages.reward import report
from spmdrl.engines.reward.calls import FunctionScores, combine
from spmdrl.engines.workers.verdict import Verdict
from spmdrl.observability.metrics import Recorder, encode, merge

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
