"""Where the reference is the policy without its adapters, one stage makes log-probs of both, for the states of both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.dataflow.samples import flow
from tests.engines.training.tiny import CONFIG, OPTIM
from tests.support.ranks import run_ranks

from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.schema import needs_by_state
from spmdrl.dataflow.stages.inference import AdapterLogprobsStage
from spmdrl.dataflow.stages.rows import token_rows
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import WorkerState
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.nouns.settings.model_config import LoraConfig
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World

COLUMNS = ("old_logprobs", "ref_logprobs")
LORA = replace(CONFIG, lora=LoraConfig(rank=3))


def response_of(row: int) -> list[int]:
    return [(row + token) % 17 for token in range(row * 7 % 11 + 1)]


def scored_in_both_states(world: World) -> None:
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(), world.size), world.device, world.rank)
    training = TrainingConfig(max_tokens_per_microbatch=1000)
    engine = TrainingEngine(LORA, training, OPTIM, mesh, world.device, compute_dtype=torch.float32)
    engine.load(RandomWeights(LORA, seed=0))
    with TransferDock(world, needs_by_state({*COLUMNS, "advantages"}), DockConfig(20.0)) as dock:
        samples = dock.open_batch(1, flow.make_prompts(), flow.GROUP_SIZE)
        flow.generate(samples, samples.rows.deal_generation(), response_of)
        AdapterLogprobsStage(engine)(samples)
        assert (
            samples.rows.ready_portions(WorkerState.REFERENCE)
            == samples.rows.ready_portions(WorkerState.OLD_LOGPROBS)
            == []
        )
        batch = samples.read(range(flow.NUM_ROWS), {"prompt_ids", "response_ids", *COLUMNS})
        rows = token_rows(batch, LORA)
        torch.testing.assert_close(batch.values("old_logprobs"), engine.score(rows).logprobs_R.cpu())
        with engine.without_adapters():
            torch.testing.assert_close(batch.values("ref_logprobs"), engine.score(rows).logprobs_R.cpu())
        assert not torch.allclose(batch.values("ref_logprobs"), batch.values("old_logprobs"))
        flow.reward(samples)
        flow.credit(samples)
        samples.take(WorkerState.UPDATE)
        samples.commit(WorkerState.UPDATE)
        dock.close_batch(samples)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_have_the_log_probs_of_both_and_are_done_in_both_states(num_ranks):
    run_ranks(num_ranks, scored_in_both_states)
