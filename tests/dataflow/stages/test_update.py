"""What an update reports of the distance between generator and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engines.training.tiny import CONFIG, OPTIM, SeededWeights
from tests.support.ranks import run_ranks

from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.settings.policy_configs import GrpoConfig
from spmdrl.dataflow.stages.rows import mini_batch_of_rows, token_rows
from spmdrl.dataflow.stages.update import UpdatePlan, UpdateStage
from spmdrl.dataflow.stages.update_report import ShownRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import Batch
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World

MODEL = replace(CONFIG, intermediate_size=12)
LENGTHS = (4, 1, 6, 3, 5, 2)
# By how much the generator's log-probs are said to be higher than the trainer's, a row.
ERRORS = (0.0, 0.25, -0.5, 0.0, 0.125, 0.0)
# Of the trainer's version, 0; the tokens of row 3 and the first two of row 4 are older.
LAGS = ([0] * 4, [0], [0] * 6, [2] * 3, [1, 1, 0, 0, 0], [0] * 2)


class Taken:
    """The samples of one step as the update state sees them: `batch` of all."""

    def __init__(self, batch: Batch, num_rows: int):
        self.batch, self.to_train, self.group_size, self.step = batch, np.arange(num_rows), 1, 7
        self.groups_to_train, self.rows = self.to_train, self

    def take(self, state):
        return self.batch.select(range(len(self.batch)))

    def commit(self, state): ...


def rows_of_step(engine: TrainingEngine, errors: Sequence[float]) -> Batch:
    """All rows; the column of the generator's log-probs differs from the trainer's by `errors` a row."""
    generator = torch.Generator().manual_seed(3)
    batch = Batch.of_rows(range(len(LENGTHS)))

    def tokens(lengths):
        return [torch.randint(0, MODEL.vocab_size, (length,), generator=generator).tolist() for length in lengths]

    batch.put_lists("prompt_ids", tokens([2] * len(LENGTHS)), torch.int32)
    batch.put_lists("response_ids", tokens(LENGTHS), torch.int32)
    offsets = batch.offsets("response_ids")
    scores = engine.score(token_rows(batch, engine.config)).logprobs_R.cpu()
    errors_R = torch.tensor(errors).repeat_interleave(offsets.diff())
    batch.put_ragged("rollout_logprobs", scores + errors_R, offsets)
    batch.put_ragged("old_logprobs", scores, offsets)
    batch.put_lists("versions", [[-lag for lag in lags] for lags in LAGS], torch.int32)
    # Row 5 has no signal, so the update leaves it out.
    advantages_B = torch.tensor([1.0, -1.0, 0.5, 1.0, -2.0, 0.0])
    batch.put_ragged("advantages", advantages_B.repeat_interleave(offsets.diff()), offsets)
    return batch


def one_step(world: World, layout: UpdateLayout, plan: UpdatePlan, algo: GrpoConfig, errors: Sequence[float] = ERRORS):
    """The merged metrics of one step on ranks that share its rows, and the trainer's log-probs of shown rows."""
    mesh = build_update_mesh(fit_update_layout(layout, world.size), world.device, world.rank)
    engine = TrainingEngine(MODEL, TrainingConfig(max_tokens_per_microbatch=16), OPTIM, mesh, world.device)
    engine.load(SeededWeights())
    batch = rows_of_step(engine, errors)
    scores = batch.to_lists("old_logprobs")
    mine = [row for row in range(len(LENGTHS)) if row % engine.mesh.data.size == engine.mesh.data.rank]
    shown, recorder = ShownRows(len(LENGTHS)), Recorder()
    UpdateStage(engine, plan, recorder, shown)(Taken(batch.select(mine), len(LENGTHS)), Grpo(algo))
    return merge(gather_bytes(encode(recorder.drain()))), [shown.logprobs(row) for row in shown.rows], scores


ONCE = UpdatePlan(1, 1, 8, skip_zero_advantage=True)


def check_step(world: World, layout: UpdateLayout) -> None:
    metrics, shown, scores = one_step(world, layout, ONCE, GrpoConfig())
    # Rows 0 to 4 are trained on; 4 + 1 + 6 + 3 of their tokens are new.
    fresh = [0.0] * 4 + [0.25] + [-0.5] * 6 + [0.125] * 3
    assert metrics["mismatch/abs_max"] == pytest.approx(0.5, rel=1e-5)
    assert metrics["mismatch/abs_mean"] == pytest.approx(sum(map(abs, fresh)) / 14, rel=1e-5)
    assert metrics["mismatch/kl"] == pytest.approx(sum(fresh) / 14, rel=1e-5)
    lags = [lag for row in LAGS for lag in row]
    counts = [metrics.get(f"off_policy/lag_{lag}") for lag in range(4)]
    assert counts == [lags.count(0), lags.count(1), lags.count(2), None]
    assert metrics["off_policy/max"] == 2
    assert metrics["off_policy/mean"] == pytest.approx(sum(lags) / len(lags))
    assert shown[5] is None
    for found, expected in zip(shown[:5], scores[:5], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(1, UpdateLayout()), (2, UpdateLayout(data=2, shard=1)), (2, UpdateLayout(tensor=2)),
     (2, UpdateLayout(pipeline=2)), (2, UpdateLayout(context=2))],
)  # fmt: skip
def test_mismatch_and_lags_are_those_of_all_rows_on_any_layout(num_ranks, layout):
    run_ranks(num_ranks, check_step, layout)


def check_later_updates(world: World) -> None:
    metrics, shown, scores = one_step(
        world, UpdateLayout(), UpdatePlan(2, 2, 8, skip_zero_advantage=True), GrpoConfig()
    )
    assert metrics["mismatch/abs_max"] == 0.5, "measured with the weights that the step began with"
    assert shown[0] == scores[0]


@pytest.mark.ranks
def test_later_updates_of_a_step_change_no_mismatch():
    run_ranks(1, check_later_updates)


def check_correction(world: World) -> None:
    metrics, _, _ = one_step(world, UpdateLayout(), ONCE, GrpoConfig(rollout_is="icepop", rollout_is_clip=(0.8, 1.2)))
    # exp(-0.25) in row 1 and exp(0.5) in row 2 lie outside; the 19 trained tokens all count.
    assert metrics["rollout_is/masked_share"] == pytest.approx(7 / 19)
    assert metrics["rollout_is/clipped_share"] == 0


@pytest.mark.ranks
def test_the_share_of_masked_tokens_is_reported():
    run_ranks(1, check_correction)


def check_differences_are_refused(world: World) -> None:
    for agreement in ("checked", "used"):
        with pytest.raises(RuntimeError, match="in step 7 a log-prob of the generator differs by 0.5 "):
            one_step(world, UpdateLayout(), replace(ONCE, agreement=agreement), GrpoConfig())


@pytest.mark.ranks
def test_a_generator_that_must_agree_and_does_not_ends_the_run():
    run_ranks(1, check_differences_are_refused)


def check_stand_in(world: World) -> None:
    plan = UpdatePlan(2, 1, 8, skip_zero_advantage=True, agreement="used")
    metrics, shown, scores = one_step(world, UpdateLayout(), plan, GrpoConfig(), errors=(0.0,) * len(LENGTHS))
    assert metrics["mismatch/abs_max"] == 0
    assert shown[0] == scores[0], "the first update's own"
    asked, _, _ = one_step(world, UpdateLayout(), replace(plan, agreement="measured"), GrpoConfig(), errors=(0.0,) * 6)
    assert (asked["loss"], asked["grad_norm"]) == (metrics["loss"], metrics["grad_norm"])


@pytest.mark.ranks
def test_log_probs_that_agree_stand_in_for_the_old_ones():
    run_ranks(1, check_stand_in)


def test_mini_batches_are_equal_parts_of_the_prompts_that_are_left():
    samples = Taken(Batch.of_rows([2, 9, 4, 7]), 12)
    samples.groups_to_train = np.array([2, 4, 7, 9])
    assert mini_batch_of_rows(samples.batch.rows, samples, 2).tolist() == [0, 1, 0, 1]
    samples.groups_to_train = np.array([], dtype=np.int64)
    assert mini_batch_of_rows(Batch.of_rows([]).rows, samples, 2).tolist() == []
