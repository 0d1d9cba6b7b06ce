"""Where generator and trainer agree to the last bit, only rows with tokens of earlier weights are scored again."""

from __future__ import annotations

import pytest
import torch
from tests.engines.training.tiny import CONFIG, OPTIM
from tests.support.ranks import run_ranks

from spmdrl.dataflow.stages.inference import OlderLogprobsStage, ScoreStage
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import Batch, WorkerState
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World

VERSIONS = [[0, 0, 0], [-1, 0], [0], [-2, -1, 0, 0]]


class OneTake:
    """Samples of which this rank takes all at once, and that keep what is put."""

    def __init__(self, batch: Batch):
        self.batch, self.rows = batch, self

    def ready_portions(self, state):
        return [self.batch.rows]

    def take(self, state, among):
        return self.batch.select(range(len(self.batch)))

    def put(self, state, batch):
        self.columns = Batch(batch.rows)
        self.columns.put_ragged("old_logprobs", batch.values("old_logprobs").cpu(), batch.offsets("old_logprobs"))

    def commit(self, state): ...


def rows_generated(versions: list[list[int]]) -> Batch:
    batch = Batch.of_rows(range(len(versions)))
    batch.put_lists("prompt_ids", [[1, 2]] * len(versions), torch.int32)
    batch.put_lists("response_ids", [[3 + place for place in range(len(row))] for row in versions], torch.int32)
    batch.put_lists("versions", versions, torch.int32)
    batch.put_lists("rollout_logprobs", [[-1.0] * len(row) for row in versions], torch.float32)
    return batch


def old_logprobs(world: World) -> None:
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(), world.size), world.device, world.rank)
    engine = TrainingEngine(
        CONFIG, TrainingConfig(max_tokens_per_microbatch=8), OPTIM, mesh, world.device, compute_dtype=torch.float32
    )
    engine.load(RandomWeights(CONFIG, seed=0))
    # The second rank, where there is one, took no row with older tokens.
    versions = VERSIONS if world.rank == 0 else [[0, 0], [0]]
    samples, whole = OneTake(rows_generated(versions)), OneTake(rows_generated(versions))
    OlderLogprobsStage(WorkerState.OLD_LOGPROBS, engine)(samples)
    ScoreStage(WorkerState.OLD_LOGPROBS, engine)(whole)
    found, scored = (each.columns.to_lists("old_logprobs") for each in (samples, whole))
    for row, generated in enumerate(versions):
        if any(generated):
            torch.testing.assert_close(torch.tensor(found[row]), torch.tensor(scored[row]))
            assert found[row][0] != -1
        else:
            assert found[row] == [-1.0] * len(generated)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_of_the_present_weights_keep_the_log_probs_of_generation(num_ranks):
    run_ranks(num_ranks, old_logprobs)
