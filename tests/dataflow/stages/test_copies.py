"""Rows that are trained on several times, against the same rows put into the batch as often."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.dataflow.stages import test_advantage, test_critic, test_update
from tests.dataflow.stages.test_advantage import LENGTHS, REWARDS, MeanBaseline
from tests.engines.training.tiny import OPTIM, SeededWeights
from tests.support.ranks import run_ranks
from torch import Tensor

from spmdrl.algorithms.policy.pf_ppo import PfPpo
from spmdrl.algorithms.settings.actor_critic_configs import PfPpoConfig
from spmdrl.algorithms.settings.algo_config import ClippedConfig
from spmdrl.dataflow.stages.critic_states import CriticUpdateStage
from spmdrl.dataflow.stages.rows import TURNS
from spmdrl.dataflow.stages.update import UpdateStage
from spmdrl.dataflow.stages.update_report import ShownRows
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import Batch, CreditInputs
from spmdrl.nouns.settings.role_configs import CriticConfig
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World

COPIES = (2, 1, 3, 1, 1, 2)


@dataclass(frozen=True)
class Drawn(MeanBaseline):
    """Draws the first row of each prompt twice, the second never, and nothing of the last prompt's."""

    draws_rows = True

    def copies(self, inputs: CreditInputs) -> Tensor:
        return torch.tensor([2, 0, 2, 0, 0, 0])[inputs.columns.rows]

    def select(self, inputs: CreditInputs):
        return {**super().select(inputs), "filtered": inputs.columns.dense("copies") == 0}


class Keeping(test_advantage.Taken):
    """Samples that keep the column too."""

    def put(self, state, batch):
        super().put(state, batch)
        self.advantages |= {
            row: (values, copies)
            for row, values, copies in zip(
                batch.rows.tolist(), batch.to_lists("advantages"), batch.dense("copies").tolist(), strict=True
            )
        }


@pytest.mark.ranks
def test_drawn_rows_keep_their_advantages_and_the_number_of_their_copies_on_any_rank():
    found, dropped, metrics = test_advantage.on_two_ranks(Drawn(ClippedConfig("made up")), Keeping)
    mean = np.mean([REWARDS[0], REWARDS[2]])
    assert found == {row: (pytest.approx([REWARDS[row] - mean] * LENGTHS[row]), 2) for row in (0, 2)}
    assert dropped == [{"filtered": [1, 4]}, {"filtered": [3, 5]}] and metrics["select/filtered"] == 4


def engine_of(world: World, layout: UpdateLayout, model, source, **kind) -> TrainingEngine:
    mesh = build_update_mesh(fit_update_layout(layout, world.size), world.device, world.rank)
    training = TrainingConfig(max_tokens_per_microbatch=16)
    engine = TrainingEngine(model, training, OPTIM, mesh, world.device, compute_dtype=torch.float32, **kind)
    engine.load(source)
    return engine


def repeated(batch: Batch) -> Batch:
    """Each row as often as it counts, under numbers of their own."""
    out = batch.select(torch.arange(len(batch)).repeat_interleave(torch.tensor(COPIES)))
    out.rows.copy_(torch.arange(len(out)))
    return out


def with_copies(batch: Batch) -> Batch:
    batch.put_dense("copies", torch.tensor(COPIES, dtype=torch.int32))
    return batch


def mine(batch: Batch, engine: TrainingEngine) -> Batch:
    axis = engine.mesh.data
    return batch.select([row for row in range(len(batch)) if row % axis.size == axis.rank])


def after_update(world: World, layout: UpdateLayout, make, loss_agg: str):
    engine = engine_of(world, layout, test_update.MODEL, SeededWeights())
    batch, recorder = test_update.rows_of_step(engine, test_update.ERRORS), Recorder()
    # An environment wrote the second token of row 2.
    batch.put_lists(TURNS, [[1, 0, 1, 1, 2, 2] if row == 2 else [1] * n for row, n in enumerate(test_update.LENGTHS)],
                    torch.int16)  # fmt: skip
    batch = make(batch)
    learner = PfPpo(PfPpoConfig(loss_agg=loss_agg, entropy_coef=0.1, off_policy_bound=0.3))
    samples = test_update.Taken(mine(batch, engine), len(batch))
    UpdateStage(engine, test_update.ONCE, recorder, ShownRows(0))(samples, learner)
    return merge(gather_bytes(encode(recorder.drain()))), dict(engine.whole_weights(torch.float32))


def after_critics_update(world: World, layout: UpdateLayout, make):
    model = test_critic.MODEL
    engine = engine_of(world, layout, model, RandomWeights(model, seed=0), rating="token_values")
    batch, recorder = make(test_critic.rows_of_step()), Recorder()
    samples = test_critic.Taken(mine(batch, engine))
    samples.rows.to_train = samples.rows.groups_to_train = np.arange(len(batch))
    CriticUpdateStage(engine, CriticConfig(clip=0.3), test_update.ONCE, recorder)(samples)
    return merge(gather_bytes(encode(recorder.drain()))), dict(engine.whole_weights(torch.float32))


def check_copies(world: World, layout: UpdateLayout) -> None:
    for run, *given in (
        (after_update, "token-mean"), (after_update, "seq-mean-token-mean"), (after_critics_update,)
    ):  # fmt: skip
        (found, weights), (expected, expected_weights) = (
            run(world, layout, make, *given) for make in (with_copies, repeated)
        )
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=1e-4, atol=1e-6)
        # Lags and mismatches are of rows, each once, and the row that is trained on twice goes through the model once.
        alike = {name for name in expected if not name.startswith(("off_policy/l", "off_policy/me", "mismatch/"))}
        alike -= {"update/rows"}
        assert {name: found[name] for name in alike} == pytest.approx({name: expected[name] for name in alike}, 1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "layout"), [(1, UpdateLayout()), (2, UpdateLayout(data=2, shard=1))])
def test_an_update_with_copies_is_that_of_a_batch_with_the_rows_repeated(num_ranks, layout):
    run_ranks(num_ranks, check_copies, layout)
