"""Returns, the value loss and its fit, against numpy in float64, on every axis of the update layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.algorithms.random_rows import SETTINGS
from tests.engines.training.tiny import CONFIG, OPTIM
from tests.support.ranks import run_ranks

from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.policy.ppo import Ppo
from spmdrl.algorithms.settings.actor_critic_configs import PpoConfig
from spmdrl.algorithms.settings.policy_configs import GrpoConfig
from spmdrl.dataflow.stages.critic_states import (
    CriticUpdateStage,
    ReturnsStage,
    ValueLoss,
    explained_variance,
    lambda_returns,
)
from spmdrl.dataflow.stages.inference import CutValueStage, ScoreStage
from spmdrl.dataflow.stages.rows import token_rows
from spmdrl.dataflow.stages.update import UpdatePlan
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.packed_rows import to_microbatch
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import Batch, WorkerState
from spmdrl.nouns.settings.role_configs import CriticConfig
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World

# 12 can be cut in two.
MODEL = replace(CONFIG, intermediate_size=12).with_value_head()
LENGTHS = (4, 1, 6, 3, 5, 2)
REWARDS = (1.0, 0.0, -0.5, 2.0, 0.25, 1.5)
LAYOUTS = [
    UpdateLayout(data=2, shard=1), UpdateLayout(shard=2), UpdateLayout(tensor=2), UpdateLayout(pipeline=2),
    UpdateLayout(context=2),
]  # fmt: skip


def at_row_ends(rewards, lengths) -> torch.Tensor:
    rewards_R = torch.zeros(sum(lengths), dtype=torch.float64)
    rewards_R[torch.tensor(lengths).cumsum(0) - 1] = torch.tensor(rewards, dtype=torch.float64)
    return rewards_R


def monte_carlo_returns(rewards, lengths, gamma: float) -> torch.Tensor:
    return lambda_returns(at_row_ends(rewards, lengths), None, torch.tensor(lengths), gamma=gamma, lam=1.0)


def rows_of_step() -> Batch:
    generator = torch.Generator().manual_seed(3)
    batch = Batch.of_rows(range(len(LENGTHS)))
    for name, lengths in (("prompt_ids", [2] * len(LENGTHS)), ("response_ids", LENGTHS)):
        tokens = [torch.randint(0, MODEL.vocab_size, (length,), generator=generator).tolist() for length in lengths]
        batch.put_lists(name, tokens, torch.int32)
    offsets = batch.offsets("response_ids")
    returns_R = monte_carlo_returns(REWARDS, LENGTHS, gamma=0.9).float()
    batch.put_ragged("returns", returns_R, offsets)
    batch.put_ragged("values", torch.randn(len(returns_R), generator=generator), offsets)
    return batch


class Taken:
    """One step's samples, of which this rank took some rows."""

    def __init__(self, batch: Batch):
        self.batch, self.to_train, self.group_size, self.step = batch, np.arange(len(LENGTHS)), 1, 7
        self.groups_to_train, self.rows = self.to_train, self

    def reads(self, state):
        return {*self.batch.names, "advantages"}

    def ready_portions(self, state):
        return [self.batch.rows.numpy()]

    def take(self, state, names=None, *, among=None):
        return self.batch.select(range(len(self.batch)), names)

    def commit(self, state): ...


def one_step(world: World, layout: UpdateLayout, critic: CriticConfig, plan: UpdatePlan):
    """Merged metrics of one step, the whole weights after it, and the values before it."""
    mesh = build_update_mesh(fit_update_layout(layout, world.size), world.device, world.rank)
    training = TrainingConfig(max_tokens_per_microbatch=16)
    engine = TrainingEngine(
        MODEL, training, OPTIM, mesh, world.device, rating="token_values", compute_dtype=torch.float32
    )
    engine.load(RandomWeights(MODEL, seed=0))
    batch, recorder = rows_of_step(), Recorder()
    values_R = engine.values(token_rows(batch, MODEL)).cpu()
    mine = [row for row in range(len(LENGTHS)) if row % engine.mesh.data.size == engine.mesh.data.rank]
    CriticUpdateStage(engine, critic, plan, recorder)(Taken(batch.select(mine)))
    weights = {name: weight.to("cpu", copy=True) for name, weight in engine.whole_weights(torch.float32)}
    return merge(gather_bytes(encode(recorder.drain()))), weights, values_R


def steps_of(world: World, layouts: list[UpdateLayout]):
    critic = CriticConfig(clip=0.3)
    plans = UpdatePlan(1, 1, 8, skip_zero_advantage=True), UpdatePlan(2, 2, 8, skip_zero_advantage=True)
    return [one_step(world, layout, critic, plan) for layout in layouts for plan in plans]


@pytest.fixture(scope="module")
def one_process():
    (found,) = run_ranks(1, steps_of, [UpdateLayout()])
    return found


def explained_by_numpy(batch: Batch) -> float:
    values, returns = (batch.values(name).numpy().astype(np.float64) for name in ("values", "returns"))
    return 1 - np.var(returns - values) / np.var(returns)


@pytest.mark.ranks
def test_one_update_has_the_loss_and_the_fit_that_numpy_computes(one_process):
    batch = rows_of_step()
    (metrics, _, values_R), _ = one_process
    now, before, returns = (
        tensor.numpy().astype(np.float64) for tensor in (values_R, batch.values("values"), batch.values("returns"))
    )
    clipped = np.clip(now, before - 0.3, before + 0.3)
    expected = 0.5 * np.mean(np.maximum((now - returns) ** 2, (clipped - returns) ** 2))
    assert metrics["critic/loss"] == pytest.approx(expected, rel=1e-5)
    assert not np.isclose(expected, 0.5 * np.mean((now - returns) ** 2))
    assert metrics["critic/explained_variance"] == pytest.approx(explained_by_numpy(batch), rel=1e-12)
    assert metrics["critic/lr"] == OPTIM.lr / 2 and metrics["critic/skipped"] == 0


@pytest.mark.ranks
def test_a_step_is_the_same_on_data_ranks_and_on_every_axis_that_cuts_the_model(one_process):
    expected = one_process * len(LAYOUTS)
    for found in run_ranks(2, steps_of, LAYOUTS):
        for (metrics, weights, _), (one_metrics, one_weights, _) in zip(found, expected, strict=True):
            assert metrics == pytest.approx(one_metrics, rel=1e-4)
            assert metrics["critic/explained_variance"] == pytest.approx(explained_by_numpy(rows_of_step()), rel=1e-12)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, one_weights[name], rtol=1e-4, atol=1e-5)


def test_a_tokens_return_is_its_rows_reward_discounted_by_the_tokens_after_it():
    returns_R = monte_carlo_returns(REWARDS, LENGTHS, gamma=0.9)
    expected = [
        reward * 0.9 ** (length - 1 - at)
        for reward, length in zip(REWARDS, LENGTHS, strict=True)
        for at in range(length)
    ]
    assert returns_R.tolist() == pytest.approx(expected, rel=1e-12)
    assert monte_carlo_returns([0.5], [3], gamma=1.0).tolist() == [0.5] * 3
    assert monte_carlo_returns([0.5], [3], gamma=0.0).tolist() == [0, 0, 0.5]


@pytest.mark.parametrize("bootstraps", [False, True])
@given(st.lists(st.integers(1, 7), max_size=6), st.integers(0, 99), st.floats(0, 1), st.floats(0, 1))
def test_lambda_returns_less_values_are_sums_of_temporal_differences(bootstraps, lengths, seed, gamma, lam):
    """A_t = sum over l of (gamma lambda)^l delta_{t + l}, delta_t = r_t + gamma V_{t + 1} - V_t (arXiv:1506.02438)."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(size=(2, length)) for length in lengths]
    ends = rng.normal(size=len(lengths)) * bootstraps
    expected = []
    for (rewards, values), end in zip(rows, ends, strict=True):
        deltas = rewards + gamma * np.append(values[1:], end) - values
        for place in range(len(deltas)):
            powers = (gamma * lam) ** np.arange(len(deltas) - place)
            expected.append((powers * deltas[place:]).sum() + values[place])
    rewards_R, values_R = (torch.tensor(np.concatenate([row[n] for row in rows] or [[]])) for n in range(2))
    end_values_B = torch.tensor(ends) if bootstraps else None
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    found = lambda_returns(rewards_R, values_R, lengths_B, gamma=gamma, lam=lam, end_values_B=end_values_B)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)
    assert end_values_B is None or end_values_B.tolist() == ends.tolist(), "the caller's values stay as they are"


class Rewarded(Taken):
    """Samples that keep what is put."""

    def put(self, state, batch):
        self.columns = batch


def test_what_an_environment_wrote_has_no_return_and_discounts_none():
    batch = Batch.of_rows(range(3))
    batch.put_lists("response_ids", [[1] * 4, [1] * 2, [1] * 3], torch.int32)
    # Of row 0 the second and third token are the environment's; row 1 has no usable reward.
    batch.put_lists("turns", [[1, 0, 0, 2], [1, 1], [1, 1, 1]], torch.int16)
    batch.put_dense("reward", torch.tensor([8.0, float("nan"), 4.0]))
    samples = Rewarded(batch)
    ReturnsStage(CriticConfig(gamma=0.5), SETTINGS)(samples, Grpo(GrpoConfig()))
    first, unrated, third = samples.columns.to_lists("returns")
    assert (first, third) == ([4.0, 0.0, 0.0, 8.0], [1.0, 2.0, 4.0])
    assert np.isnan(unrated).all(), "not missing, as advantages may wait for them"


def test_a_row_that_could_not_be_opened_changes_no_return_of_another():
    batch = Batch.of_rows(range(4))
    batch.put_lists("response_ids", [[1, 1], [], [1, 1], []], torch.int32)
    batch.put_lists("turns", [[1, 1], [], [0, 1], []], torch.int16)
    batch.put_lists("turn_rewards", [[0.0, 0.0], [], [0.0, 0.0], []], torch.float32)
    batch.put_dense("reward", torch.tensor([8.0, float("nan"), 4.0, float("nan")]))
    samples = Rewarded(batch)
    ReturnsStage(CriticConfig(gamma=0.5), SETTINGS)(samples, Grpo(GrpoConfig()))
    assert samples.columns.to_lists("returns") == [[4.0, 8.0], [], [0.0, 4.0], []]


@given(st.integers(0, 99), st.floats(0, 1), st.floats(0, 1))
def test_advantages_of_rewarded_turns_are_those_of_numpy(seed, gamma, lam):
    """Generalized advantages over the model's tokens alone, each turn's reward with the last one."""
    rng = np.random.default_rng(seed)
    batch, expected, turns, rewards, totals, values = Batch.of_rows(range(3)), [], [], [], [], []
    for _ in range(3):
        own = rng.integers(1, 4, size=rng.integers(1, 4))
        earned = rng.normal(size=len(own)).astype(np.float32)
        token_rewards = np.zeros(own.sum())
        token_rewards[own.cumsum() - 1] = earned
        last = rng.normal()  # by the row's end, or by reward functions
        totals.append(earned.astype(np.float64).sum() + last)
        token_rewards[-1] += last
        value = rng.normal(size=own.sum() + 1).astype(np.float32)
        value[-1] = 0
        advantage, following = np.zeros(own.sum()), 0.0
        for place in reversed(range(own.sum())):
            delta = token_rewards[place] + gamma * np.float64(value[place + 1]) - value[place]
            following = advantage[place] = delta + gamma * lam * following
        read = rng.integers(0, 3, size=len(own))
        expected.append(advantage)
        turns.append([of for turn, n in enumerate(own, 1) for of in [turn] * n + [0] * read[turn - 1]])
        rewards.append(
            [x for r, n, m in zip(earned, own, read, strict=True) for x in [0.0] * (n - 1) + [r] + [0.0] * m]
        )
        places = iter(value)
        values.append([next(places) if turn else 9.0 for turn in turns[-1]])
    batch.put_lists("response_ids", [[1] * len(row) for row in turns], torch.int32)
    batch.put_lists("turns", turns, torch.int16)
    batch.put_lists("turn_rewards", rewards, torch.float32)
    batch.put_lists("values", values, torch.float32)
    batch.put_dense("reward", torch.tensor(totals))
    samples = Rewarded(batch)
    ReturnsStage(CriticConfig(gamma=gamma, lam=lam), SETTINGS)(samples, Ppo(PpoConfig(kl_coef=0.0)))
    for row, returns in enumerate(samples.columns.to_lists("returns")):
        pairs = zip(returns, values[row], turns[row], strict=True)
        found = [one - value for one, value, turn in pairs if turn]
        np.testing.assert_allclose(found, expected[row], rtol=1e-5, atol=1e-5)


def values_of_cut_rows(world: World, layout: UpdateLayout) -> None:
    """Against an engine that rates whole rows, of which the cut ones are the ones that it sees."""
    mesh = build_update_mesh(fit_update_layout(layout, world.size), world.device, world.rank)
    by_token, by_row = (
        TrainingEngine(
            MODEL, TrainingConfig(max_tokens_per_microbatch=16), OPTIM, mesh, world.device, rating=rating,
            compute_dtype=torch.float32, frozen=True,
        ) for rating in ("token_values", "row_values")
    )  # fmt: skip
    for engine in (by_token, by_row):
        engine.load(RandomWeights(MODEL, seed=0))
    batch = rows_of_step().select(range(len(LENGTHS)), ["prompt_ids", "response_ids"])
    # An environment wrote the end of row 0, the middle of row 2 and the end of row 5.
    turns = [[1, 1, 0, 0], [1], [1, 0, 0, 2, 2, 2], [1, 1, 1], [1] * 5, [1, 0]]
    batch.put_lists("turns", turns, torch.int16)
    batch.put_dense("finished", torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.int32))
    samples = Rewarded(batch)
    CutValueStage(WorkerState.VALUES, by_token)(samples)
    cut, plain = samples.columns, Rewarded(batch)
    ScoreStage(WorkerState.VALUES, by_token)(plain)
    torch.testing.assert_close(cut.values("values").cpu(), plain.columns.values("values").cpu())
    whole_B = by_row.values(token_rows(batch, MODEL)).cpu().where(batch.dense("finished") == 0, 0.0)
    torch.testing.assert_close(cut.dense("end_value").cpu(), whole_B)
    assert (whole_B != 0).sum() == 3


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "layout"), [(1, UpdateLayout()), (2, UpdateLayout(context=2)), (2, UpdateLayout(pipeline=2))]
)
def test_a_response_that_was_cut_has_the_value_of_the_state_behind_its_last_token(num_ranks, layout):
    run_ranks(num_ranks, values_of_cut_rows, layout)


def test_equal_returns_have_no_variance_to_explain():
    nothing = torch.zeros(0)
    for returns_R in (torch.full((1000,), 0.1), nothing):
        assert explained_variance(torch.randn(len(returns_R)), returns_R, lambda sums: sums) is None
    assert explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), lambda sums: sums) == 1
    assert explained_variance(torch.tensor([7.0, 7.0]), torch.tensor([1.0, 2.0]), lambda sums: sums) == 0


def test_a_value_beyond_the_bound_gets_no_gradient_away_from_it(device):
    rows = token_rows(rows_of_step(), MODEL, ["values", "returns"])
    micro = to_microbatch(rows, range(len(rows)), device, "token_values")
    before_R, returns_R = micro.response["values"], micro.response["returns"]
    # All the way to the return: beyond the bound where that is far, so that the clipped error is the larger one.
    values_R = returns_R.clone().requires_grad_()
    ValueLoss(len(returns_R), clip=0.3)(values_R, micro).loss.backward()
    assert values_R.grad is not None and not values_R.grad.any()
    assert ((returns_R - before_R).abs() > 0.3).any()


def test_an_empty_path_is_refused_by_its_key():
    with pytest.raises(ValueError, match="critic.path is empty"):
        CriticConfig(path=" ")
