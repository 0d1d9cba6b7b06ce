"""The advantage state on two ranks, each with some of the rows, under algorithms made up for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.algorithms.random_rows import SETTINGS
from tests.support.jobs import finished, metrics_of, run_job, tiny_config
from tests.support.ranks import run_ranks
from torch import Tensor

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.algorithms.policy_gradient import Clipped, FromRewards
from spmdrl.algorithms.settings.algo_config import ClippedConfig
from spmdrl.dataflow.stages.advantage import AdvantageStage
from spmdrl.dataflow.stages.rows import TURNS
from spmdrl.nouns.batch import Batch, CreditInputs
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.world import World

REWARDS = (1.0, 0.0, 0.5, 0.5, float("nan"), 2.0)
"""of three prompts with two responses each; those to the second have the same"""
LENGTHS = (3, 1, 2, 2, 1, 4)
FINISHED = (1, 1, 1, 1, 1, 0)
# Not in the order of the rows, as the dock may deal them.
ROWS_OF_RANK = ([4, 1, 2], [5, 0, 3])


@dataclass(frozen=True)
class MeanBaseline(FromRewards, Clipped):
    """The reward less the mean over all rows that are left."""

    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        return rewards_B - rewards_B.mean()


class PerToken(MeanBaseline):
    """The reward of the row, plus the generator's log-prob of the token."""

    def columns_for_credit(self) -> frozenset[str]:
        return frozenset({"rollout_logprobs"})

    def advantages(self, inputs: CreditInputs) -> Tensor:
        return inputs.rewards_B.repeat_interleave(inputs.lengths_B) + inputs.columns.values("rollout_logprobs")


class OnlyGroupsWithSignal(MeanBaseline):
    """Leaves out prompts whose responses all have the same reward, and responses that were cut."""

    def columns_for_credit(self) -> frozenset[str]:
        return frozenset({"finished"})

    def select(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        rewards_GN = inputs.rewards_B.view(-1, 2)
        is_equal_G = rewards_GN[:, 0] == rewards_GN[:, 1]
        return {
            **super().select(inputs),
            "no_signal": is_equal_G.repeat_interleave(2),
            "cut": inputs.columns.dense("finished") == 0,
        }


class Taken:
    """The samples of one step as this state sees them: each rank has the rows that it took."""

    group_size, step, num_dropped = 2, 0, {}

    def __init__(self, batch: Batch):
        self.batch, self.rows = batch, self
        self.dropped: dict[str, list[int]] = {}
        self.advantages: dict[int, list[float]] = {}

    def take(self, state):
        return self.batch.select(range(len(self.batch)))

    def mark_dropped(self, rows, reason):
        if rows:
            self.dropped[reason] = sorted(rows)

    def put(self, state, batch):
        self.advantages |= dict(zip(batch.rows.tolist(), batch.to_lists("advantages"), strict=True))

    def commit(self, state): ...


class WithTurns(Taken):
    """The same rows after an environment wrote two tokens behind the first of each."""

    def __init__(self, batch: Batch):
        longer = Batch(batch.rows)
        longer.put_dense("reward", batch.dense("reward"))
        lengths = [int(length) for length in batch.lengths("response_ids")]
        for name in ("response_ids", "rollout_logprobs"):
            lists = [[values[0], 9, 9, *values[1:]] for values in batch.to_lists(name)]
            longer.put_lists(name, lists, batch.values(name).dtype)
        longer.put_lists(TURNS, [[1, 0, 0, *[2] * (length - 1)] for length in lengths], torch.int16)
        super().__init__(longer)


def logprobs_of(row: int) -> list[float]:
    return [-row - place / 8 for place in range(LENGTHS[row])]


def credited(
    world: World, algorithm: Algorithm, kind: type[Taken] = Taken
) -> tuple[dict[int, list[float]], dict[str, list[int]], dict]:
    """The advantages and the drops of this rank, and the merged metrics."""
    rows = ROWS_OF_RANK[world.rank]
    batch = Batch.of_rows(rows)
    batch.put_lists("response_ids", [[7] * LENGTHS[row] for row in rows], torch.int32)
    batch.put_lists("rollout_logprobs", [logprobs_of(row) for row in rows], torch.float32)
    batch.put_dense("reward", torch.tensor([REWARDS[row] for row in rows]))
    batch.put_dense("finished", torch.tensor([FINISHED[row] for row in rows], dtype=torch.int32))
    samples, recorder = kind(batch), Recorder()
    AdvantageStage(recorder, SETTINGS)(samples, algorithm)
    return samples.advantages, samples.dropped, merge(gather_bytes(encode(recorder.drain())))


def on_two_ranks(
    algorithm: Algorithm, kind: type[Taken] = Taken
) -> tuple[dict[int, list[float]], list[dict[str, list[int]]], dict]:
    per_rank = run_ranks(2, credited, algorithm, kind)
    advantages = {row: values for mine, _, _ in per_rank for row, values in mine.items()}
    assert [set(mine) <= set(rows) for (mine, _, _), rows in zip(per_rank, ROWS_OF_RANK, strict=True)] == [True, True]
    return advantages, [dropped for _, dropped, _ in per_rank], per_rank[0][2]


@pytest.mark.ranks
def test_one_advantage_per_row_goes_to_each_of_its_tokens_and_baselines_count_kept_rows_only():
    advantages, dropped, metrics = on_two_ranks(MeanBaseline(ClippedConfig("made up")))
    mean = np.mean([1.0, 0.0, 0.5, 0.5, 2.0])
    expected = {row: [REWARDS[row] - mean] * LENGTHS[row] for row in (0, 1, 2, 3, 5)}
    assert advantages == {row: pytest.approx(values, rel=1e-6) for row, values in expected.items()}
    assert dropped == [{"no_reward": [4]}, {}]
    assert metrics["select/dropped_rows"] == metrics["select/no_reward"] == 1


@pytest.mark.ranks
def test_one_advantage_per_token_goes_to_that_token_of_that_row():
    advantages, _, _ = on_two_ranks(PerToken(ClippedConfig("made up")))
    expected = {row: [REWARDS[row] + logprob for logprob in logprobs_of(row)] for row in (0, 1, 2, 3, 5)}
    assert advantages == {row: pytest.approx(values, rel=1e-6) for row, values in expected.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [MeanBaseline, PerToken])
def test_tokens_that_an_environment_wrote_change_no_advantage_and_have_none(kind):
    plain, dropped, metrics = on_two_ranks(kind(ClippedConfig("made up")))
    longer, *others = on_two_ranks(kind(ClippedConfig("made up")), WithTurns)
    assert longer == {row: [values[0], 0.0, 0.0, *values[1:]] for row, values in plain.items()}
    assert others == [dropped, metrics]


@pytest.mark.ranks
def test_rows_that_an_algorithm_leaves_out_are_dropped_for_one_reason_each_and_counted():
    advantages, dropped, metrics = on_two_ranks(OnlyGroupsWithSignal(ClippedConfig("made up")))
    assert advantages == {0: [0.5] * 3, 1: [-0.5]}
    assert dropped == [{"no_reward": [4], "no_signal": [2]}, {"no_signal": [3], "cut": [5]}]
    counts = {name: value for name, value in metrics.items() if name.startswith("select/")}
    assert counts == {"select/dropped_rows": 4, "select/no_reward": 1, "select/no_signal": 2, "select/cut": 1}


LEAVES_OUT = """
def share_of_digits(completions, **columns):
    return [None if text[:1] in "01234" else sum(map(str.isdigit, text)) / 8 for text in completions]
"""


@pytest.mark.ranks
@pytest.mark.parametrize("settings", [["algo.kl_coef=0.1", "algo.kl_in=advantage"], ["algo.name=ppo", "critic={}"]])
def test_a_jobs_rows_without_a_reward_are_counted_alike_by_the_algorithm_and_by_the_dock(tmp_path, settings):
    config = tiny_config(tmp_path)
    (tmp_path / "reward.py").write_text(LEAVES_OUT)
    finished(run_job("train", config, f"run.dir={tmp_path / 'run'}", *settings, ranks=2))
    steps = metrics_of(tmp_path / "run")
    assert len(steps) == 3
    for step in steps:
        dropped = step["select/dropped_rows"]
        assert 0 < dropped < 32 and dropped == step["select/no_reward"] == step["dock/dropped"]
        assert dropped == round(32 * step["reward/unscored_ratio"])
        assert step["dock/trained"] == 32 - dropped and step["update/skipped"] == 0
