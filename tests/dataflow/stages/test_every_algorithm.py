"""Two updates by each algorithm of the table, the same however rows are packed, cut into micro-batches and spread."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.dataflow.stages.test_model_tokens import COLUMNS, TOP, rows_of
from tests.dataflow.stages.test_update import MODEL, Taken
from tests.engines.training.tiny import OPTIM, SeededWeights
from tests.support.ranks import run_ranks
from torch import Tensor

from spmdrl.algorithms.table import ALGORITHMS, build_algorithm
from spmdrl.dataflow.stages.rows import ModelTokens, token_rows
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

TURNS_OF_ROWS = [[1, 1, 0, 2], [1], [1, 0, 2, 3], [1, 1, 1], [0, 1, 1], [1, 1, 1, 1, 1], [1, 0], [1, 1]]
CASES = {config().name: config() for config in ALGORITHMS}
CASES |= {f"{name}, kl": replace(config, kl_coef=0.1) for name, config in CASES.items()}
TWO_EPOCHS = UpdatePlan(2, 1, 16, skip_zero_advantage=True)
LAYOUTS = {"data": UpdateLayout(data=2, shard=1), "shard": UpdateLayout(shard=2), "context": UpdateLayout(context=2)}


def updated(world: World, layout: UpdateLayout, max_tokens: int) -> dict[str, tuple[dict[str, float], Tensor]]:
    """What two updates by each algorithm report, and the weights behind them. Collective."""
    mesh = build_update_mesh(fit_update_layout(layout, world.size), world.device, world.rank)
    training, found = TrainingConfig(max_tokens_per_microbatch=max_tokens), {}
    for name, config in CASES.items():
        engine = TrainingEngine(MODEL, training, OPTIM, mesh, world.device, compute_dtype=torch.float32)
        engine.load(SeededWeights())
        algorithm, batch, data = build_algorithm(config), rated_rows(engine), engine.mesh.data
        if algorithm.draws_rows:
            batch.put_dense("copies", torch.arange(len(batch), dtype=torch.int32) % 3 + 1)
        mine = [row for row in range(len(batch)) if row // algorithm.unit_size % data.size == data.rank]
        recorder = Recorder()
        stage = UpdateStage(engine, TWO_EPOCHS, recorder, ShownRows(len(batch)))
        stage(Taken(batch.select(mine), len(batch)), algorithm)
        whole = engine.model.gather_whole(engine.named_shards(), torch.float32)
        weights = torch.cat([weight.flatten().cpu() for _, weight in whole])
        found[name] = merge(gather_bytes(encode(recorder.drain()))), weights
    return found


def rated_rows(engine: TrainingEngine) -> Batch:
    """Rows whose columns of log-probs lie on both sides of the policy's own."""
    batch, _ = rows_of(TURNS_OF_ROWS, 5)
    offsets = batch.offsets("response_ids")
    scores = engine.score(token_rows(batch, engine.config)).logprobs_R.cpu()
    spread = ModelTokens.of(batch).spread(scores)
    for name in set(COLUMNS) - {"advantages"}:
        batch.put_ragged(name, spread + 0.2 * batch.values(name), offsets)
    # Two tokens each, and what is left of the probability for the others.
    ids, top = (batch.values(name) for name in TOP)
    ids.copy_(torch.arange(len(ids)) % MODEL.vocab_size)
    top.sub_(1.0)
    rest = torch.log1p(-top.exp().sum(-1, keepdim=True))
    batch.put_ragged(TOP[1], torch.cat((top, rest), -1), offsets)
    return batch


def check_same(
    found: dict[str, tuple[dict[str, float], Tensor]], expected: dict[str, tuple[dict[str, float], Tensor]]
) -> None:
    for name, (metrics, weights) in expected.items():
        assert metrics["grad_norm"] > 1e-3, f"{name}: nothing was learnt"
        for metric in metrics.keys() & {
            "loss",
            "grad_norm",
            "entropy",
            "kl",
            "clip_ratio/low_mean",
            "clip_ratio/high_mean",
        }:
            assert found[name][0][metric] == pytest.approx(metrics[metric], rel=1e-4, abs=1e-6), (name, metric)
        torch.testing.assert_close(
            found[name][1], weights, rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def expected(world: World) -> dict[str, tuple[dict[str, float], Tensor]]:
    return updated(world, UpdateLayout(shard=1), 10_000)


def test_rows_packed_together_or_one_by_one_have_one_update(world, expected):
    check_same(updated(world, UpdateLayout(shard=1), 1), expected)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout", ["shard", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("data", "context"))]
)
def test_rows_spread_over_ranks_have_one_update(layout, expected):
    for found in run_ranks(2, updated, LAYOUTS[layout], 16):
        check_same(found, expected)
