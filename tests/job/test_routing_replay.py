"""With `train.routing.replay: rollout`, an update sends tokens to the experts that they went to when generated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engines.generation.support import TINY, prompt_of, request, run, small_rollout
from tests.support.chosen_device import chosen_device
from tests.support.jobs import finished, inline_config, metrics_of, run_job
from torch import Tensor

from spmdrl.algorithms.table import build_algorithm
from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError
from spmdrl.dataflow.stages.rollout.requests import columns_of
from spmdrl.dataflow.stages.rows import ROUTED_EXPERTS, token_rows
from spmdrl.dataflow.stages.update import UpdatePlan, UpdateStage
from spmdrl.dataflow.stages.update_report import ShownRows
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.job.start.checked_run import states_of
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.batch import Batch, TokenLoss, WorkerState
from spmdrl.nouns.settings.model_sizes import MoeConfig
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.nouns.settings.training_config import OptimConfig, RoutingConfig, TrainingConfig
from spmdrl.observability.metrics import Recorder
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World

NUM_EXPERTS, NUM_CHOICES = 8, 2
SPARSE = replace(
    TINY, model_type="qwen3_moe", num_layers=2,
    moe=MoeConfig(num_experts=NUM_EXPERTS, experts_per_token=NUM_CHOICES, intermediate_size=16),
)  # fmt: skip
REPLAY = "train.routing.replay=rollout"
JOB = [
    REPLAY, "model.make.model_type=qwen3_moe", "model.make.num_experts=4", "model.dtype=float32", "train.max_steps=2",
    "train.updates_per_step=2", "optim.lr=1e-7",
]  # fmt: skip


class Weights:
    """A source with the same values for both engines, large enough for routers to prefer some experts."""

    def __init__(self, shapes):
        generator = torch.Generator().manual_seed(0)
        self.tensors = {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def read(self, wanted):
        bounds = zip(wanted.starts, wanted.stops, strict=True)
        return self.tensors[wanted.name][tuple(slice(start, stop) for start, stop in bounds)]


class Taken:
    """Samples of one step, all taken by one rank."""

    def __init__(self, batch: Batch):
        self.batch, self.to_train, self.group_size, self.step = batch, np.arange(len(batch)), 1, 1
        self.groups_to_train, self.rows = self.to_train, self

    def take(self, state):
        return self.batch.select(range(len(self.batch)))

    def commit(self, state): ...


class Watching:
    """A learner that keeps the log-probs that it was shown."""

    unit_size = 1

    def __init__(self):
        self.logprobs_R = torch.empty(0)

    def columns_for_loss(self, num_updates):
        return frozenset({"rollout_logprobs", "advantages"})

    def loss(self, terms):
        self.logprobs_R = terms.logprobs_R.detach().to("cpu", copy=True)
        return TokenLoss(-terms.logprobs_R, {})

    def token_weights(self, lengths_B, scope):
        return torch.full((int(lengths_B.sum()),), 1 / scope.num_tokens)

    def needs_signal(self):
        return False


def generated() -> tuple[Batch, Weights]:
    engine = NativeEngine(SPARSE, small_rollout(), chosen_device(), torch.float32, recorder=ChoiceRecorder())
    weights = Weights(engine.weight_shapes())
    engine.load_weights(weights.tensors.items())
    engine.wake_cache()
    prompts = [prompt_of(length) for length in (2, 5, 9)]
    sampling = SamplingParams(max_tokens=6, stop_token_ids=tuple(range(10)))
    responses = run(engine, [request(prompt, [row], sampling) for row, prompt in enumerate(prompts)])
    batch = columns_of([responses[row] for row in range(len(prompts))])
    batch.put_lists("prompt_ids", prompts, torch.int32)
    ones = torch.ones_like(batch.values("rollout_logprobs"))
    batch.put_ragged("advantages", ones, batch.offsets("response_ids"))
    return batch, weights


def rerouted(batch: Batch) -> Batch:
    """The same rows, with every token at the experts beside those that it went to."""
    other = batch.select(range(len(batch)))
    choices = (batch.values(ROUTED_EXPERTS) + 1) % NUM_EXPERTS
    other.put_ragged(ROUTED_EXPERTS, choices, batch.offsets(ROUTED_EXPERTS))
    return other


def trainer_with(world: World, weights: Weights, replay: str) -> TrainingEngine:
    training = TrainingConfig(max_steps=1, routing=RoutingConfig(replay=replay))
    mesh = build_update_mesh(UpdateLayout(1, 1), world.device, world.rank)
    engine = TrainingEngine(SPARSE, training, OptimConfig(), mesh, world.device, compute_dtype=torch.float32)
    engine.load(weights)
    return engine


def logprobs_in_update(world: World, batch: Batch, weights: Weights, replay: str) -> Tensor:
    engine, learner = trainer_with(world, weights, replay), Watching()
    # Where nothing is replayed, the update reads no choices.
    read = batch if replay == "rollout" else batch.select(range(len(batch)), {*batch.names} - {ROUTED_EXPERTS})
    UpdateStage(engine, UpdatePlan(1, 1, 6, False), Recorder(), ShownRows(0))(Taken(read), learner)
    return learner.logprobs_R


def test_an_update_uses_the_recorded_experts_and_only_where_it_is_asked_to(world):
    batch, weights = generated()
    expected = batch.values("rollout_logprobs").sort().values
    same = logprobs_in_update(world, batch, weights, "rollout").sort().values
    other = logprobs_in_update(world, rerouted(batch), weights, "rollout").sort().values
    unasked = logprobs_in_update(world, rerouted(batch), weights, "none").sort().values
    assert torch.allclose(same, expected, atol=1e-5)
    assert torch.allclose(unasked, expected, atol=1e-5)
    assert (other - expected).abs().mean() > 1e-3


def test_scores_follow_the_recorded_experts_too(world):
    batch, weights = generated()
    engine = trainer_with(world, weights, "rollout")
    same, other = (engine.score(token_rows(rows, SPARSE)).logprobs_R.cpu() for rows in (batch, rerouted(batch)))
    assert torch.allclose(same, batch.values("rollout_logprobs"), atol=1e-5)
    assert (other - same).abs().mean() > 1e-3


def test_token_rows_carry_the_choices_of_each_token_that_was_fed():
    batch, _ = generated()
    rows = token_rows(batch, SPARSE)
    assert rows.experts_TLC is not None
    assert rows.experts_TLC.shape == (rows.tokens_T.numel(), SPARSE.num_layers, NUM_CHOICES)
    for row, recorded in enumerate(batch.to_lists(ROUTED_EXPERTS)):
        start, stop = rows.offsets[row : row + 2].tolist()
        assert rows.experts_TLC[start : stop - 1].flatten().tolist() == recorded
        assert (rows.experts_TLC[stop - 1] == -1).all()
    assert token_rows(batch.select([0], ["prompt_ids", "response_ids"]), SPARSE).experts_TLC is None


def test_update_and_old_logprobs_read_the_choices_and_the_reference_does_not():
    settings = ["model.make={}", "data.train=synthetic://addition?count=10", "train.updates_per_step=2"]
    for replay in ("none", "rollout"):
        config = load_config([], [*settings, "algo.kl_coef=0.1", f"train.routing.replay={replay}"]).value
        needs = states_of(config, build_algorithm(config.algo))
        readers = {state for state, names in needs.items() if ROUTED_EXPERTS in names}
        assert readers == ({WorkerState.UPDATE, WorkerState.OLD_LOGPROBS} if replay == "rollout" else set())


@pytest.mark.parametrize("key", ["rollouts_from", "rollouts_to"])
def test_recordings_without_choices_are_refused(key):
    model = "model.make={model_type: qwen3_moe}"
    settings = [model, "data.train=synthetic://addition?count=10", REPLAY, f"debug.{key}=x"]
    with pytest.raises(ConfigError, match=f"the files of debug.{key} hold no experts"):
        check_run(load_config([], settings), "train")


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_trains_under_the_experts_of_its_rollouts(tmp_path, ranks):
    spread = [f"resources.update.expert={ranks}", f"run.dir={tmp_path / 'run'}"]
    finished(run_job("train", inline_config(tmp_path), *JOB, *spread, ranks=ranks))
    metrics = metrics_of(tmp_path / "run")
    assert len(metrics) == 2
    for step in metrics:
        assert any(name.startswith("router/") for name in step)
        assert step["grad_norm"] > 1e-3
    # The learning rate is so small that rows look alike before and after the first of two updates.
    assert all(step["mismatch/abs_mean"] < 1e-4 for step in metrics)
