from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from spmdrl.engines.training.checkpoints.trainer_state import (
    ShardFiles,
    load_trainer_state,
    trainer_state,
    write_shards,
)
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, Scores
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.runtime.supervision.activity import activity
from tests.engines.training.tiny import (
    CONFIG,
    OPTIM,
    TEMPERATURE,
    SeededWeights,
    make_engine,
    make_rows,
    relative_difference,
    weighted_nll,
    whole_weights,
)

UNCLIPPED = dataclasses.replace(OPTIM, max_grad_norm=math.inf)


def whole_gradient(engine: TrainingEngine) -> torch.Tensor:
    """After one unclipped step AdamW's first mean is the gradient, times 1 - beta."""
    return torch.cat([means["exp_avg"].flatten() for means in engine.optimizer_state().values()])


@pytest.mark.on_device
def test_gradients_are_the_same_in_any_microbatches(world):
    reference = make_engine(world, optim=UNCLIPPED)
    expected = reference.update(make_rows(), weighted_nll)
    assert expected.num_microbatches == 1
    for max_tokens in (1, 13, 25):
        engine = make_engine(world, optim=UNCLIPPED, max_tokens=max_tokens)
        result = engine.update(make_rows(), weighted_nll)
        assert result.num_microbatches > 1
        assert math.isclose(result.loss, expected.loss, rel_tol=1e-6)
        assert math.isclose(result.grad_norm, expected.grad_norm, rel_tol=1e-6)
        assert result.metrics["entropy"][1] == expected.metrics["entropy"][1] == make_rows().num_response_tokens
        assert relative_difference(whole_gradient(engine), whole_gradient(reference)) < 1e-6


def test_scores_come_back_in_row_order_whatever_the_microbatches(world):
    rows = make_rows()
    whole = make_engine(world).score(rows)
    for max_tokens in (1, 25):
        parts = make_engine(world, max_tokens=max_tokens).score(rows)
        torch.testing.assert_close(parts.logprobs_R, whole.logprobs_R, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(parts.entropy_R, whole.entropy_R, rtol=1e-5, atol=1e-6)
    assert not whole.logprobs_R.requires_grad


def test_an_update_sees_the_scores_that_score_gives(world):
    engine, rows = make_engine(world), make_rows()
    seen = []

    def watch(scores: Scores, micro: MicroBatch) -> LossTerms:
        seen.append(scores.logprobs_R.detach())
        return weighted_nll(scores, micro)

    before = engine.score(rows)
    engine.update(rows, watch)
    assert torch.equal(seen[0], before.logprobs_R)


def nan_loss(scores: Scores, micro: MicroBatch) -> LossTerms:
    return LossTerms(weighted_nll(scores, micro).loss * math.nan, {})


def infinite_gradient(scores: Scores, micro: MicroBatch) -> LossTerms:
    """A finite loss whose gradient is not: the root's slope at 0."""
    return LossTerms((scores.logprobs_R - scores.logprobs_R.detach()).abs().sqrt().sum(), {})


@pytest.mark.on_device
@pytest.mark.parametrize("loss", [nan_loss, infinite_gradient])
def test_a_step_that_is_not_finite_changes_nothing(world, loss):
    engine = make_engine(world)
    engine.update(make_rows(), weighted_nll)
    before = {key: shard.tensor.clone() for key, shard in trainer_state(engine).items()}
    result = engine.update(make_rows(), loss)
    assert result.skipped and engine.update_count == 1
    for key, shard in trainer_state(engine).items():
        assert torch.equal(shard.tensor, before[key]), key
    assert engine.model.named_gradients() == {}
    assert not engine.update(make_rows(), weighted_nll).skipped


def test_weights_that_are_away_are_refused_instead_of_read(world):
    engine = make_engine(world)
    engine.weights_on_device = False
    for action in (
        lambda: engine.score(make_rows()),
        lambda: engine.update(make_rows(), weighted_nll),
        lambda: engine.load(SeededWeights()),
        lambda: trainer_state(engine),
    ):
        with pytest.raises(RuntimeError, match="away on the host"):
            action()


def test_a_frozen_engine_scores_alike_but_does_not_update(world):
    trained = make_engine(world)
    frozen = TrainingEngine(
        CONFIG,
        TrainingConfig(),
        OPTIM,
        trained.mesh,
        world.device,
        frozen=True,
        temperature=TEMPERATURE,
        compute_dtype=torch.float32,
    )
    frozen.load(SeededWeights())
    assert torch.equal(frozen.score(make_rows()).logprobs_R, trained.score(make_rows()).logprobs_R)
    assert frozen.optimizer_state() == {}
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.update(make_rows(), weighted_nll)


def test_an_update_without_rows_is_refused(world):
    with pytest.raises(ValueError, match="needs rows"):
        make_engine(world).update(make_rows().select([]), weighted_nll)


def test_a_long_row_and_an_empty_response_are_fine(world):
    rows = make_rows()
    all_prompt = dataclasses.replace(rows, prompt_lengths_B=rows.lengths_B, response={"weights": torch.empty(0)})
    engine = make_engine(world, max_tokens=2)
    assert engine.score(all_prompt).logprobs_R.shape == (0,)
    assert engine.update(all_prompt, weighted_nll).loss == 0.0


def test_each_part_of_an_update_counts_as_progress(world):
    engine, before = make_engine(world, max_tokens=25), activity.counts.copy()
    num_microbatches = engine.update(make_rows(), weighted_nll).num_microbatches
    assert num_microbatches > 1
    assert activity.counts - before == {
        "micro-batches": num_microbatches, "backward passes": num_microbatches, "gradients": 1, "optimizer steps": 1,
    }  # fmt: skip


def test_weights_that_are_read_count_as_progress(world, tmp_path):
    engine = make_engine(world)
    write_shards(tmp_path, 0, trainer_state(engine))
    before = activity.counts["weights read"]
    engine.load(SeededWeights())
    load_trainer_state(engine, ShardFiles(tmp_path))
    assert activity.counts["weights read"] - before == 2 * len(engine.named_shards())


def test_the_learning_rate_follows_the_steps_made(world):
    engine = make_engine(world)
    assert [engine.update(make_rows(), weighted_nll).lr for _ in range(3)] == [0.005, 0.01, 0.01]


@pytest.mark.on_device
def test_bfloat16_computation_keeps_float32_weights(world):
    full = make_engine(world)
    half = TrainingEngine(
        CONFIG,
        TrainingConfig(),
        UNCLIPPED,
        full.mesh,
        world.device,
        temperature=TEMPERATURE,
        compute_dtype=torch.bfloat16,
    )
    half.load(SeededWeights())
    rows = make_rows()
    torch.testing.assert_close(half.score(rows).logprobs_R, full.score(rows).logprobs_R, rtol=0.05, atol=0.05)
    expected, result = full.update(rows, weighted_nll), half.update(rows, weighted_nll)
    assert math.isclose(result.grad_norm, expected.grad_norm, rel_tol=0.05)
    assert {shard.tensor.dtype for shard in half.named_shards().values()} == {torch.float32}
    trained = half.named_shards()["lm_head.weight"].tensor
    assert not torch.equal(trained.cpu(), SeededWeights().tensors["lm_head.weight"])


@pytest.mark.on_device
def test_training_goes_on_from_a_written_state_bit_for_bit(world, tmp_path):
    engine = make_engine(world)
    engine.update(make_rows(), weighted_nll)
    write_shards(tmp_path, 0, trainer_state(engine))
    expected = engine.update(make_rows(), weighted_nll)
    resumed = make_engine(world)
    load_trainer_state(resumed, ShardFiles(tmp_path))
    assert resumed.update(make_rows(), weighted_nll) == expected
    ours, theirs = whole_weights(resumed), whole_weights(engine)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
