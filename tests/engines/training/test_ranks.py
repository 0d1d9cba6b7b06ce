"""The engine on gloo ranks equals the engine on one."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from spmdrl.engines.models.decoder import Decoder
from spmdrl.engines.training.checkpoints.trainer_state import (
    ShardFiles,
    load_trainer_state,
    trainer_state,
    write_shards,
)
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.sharded_model import local_tensor
from spmdrl.engines.training.training_engine import TrainingEngine, UpdateResult
from spmdrl.nouns.batch import WeightSlice
from spmdrl.resources.collectives import barrier
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.world import World
from tests.engines.training.tiny import make_engine, make_rows, relative_difference, weighted_nll, whole_weights
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

# Small enough that ranks need several micro-batches, and not equally many.
MAX_TOKENS = 13


def uneven_rows(rank: int, world_size: int) -> TokenRows:
    """Rank 0 takes two rows, the last rank none where there are three, another rank the rest."""
    rows = make_rows()
    if world_size == 1:
        return rows
    return rows.select([[0, 1], [2, 3, 4, 5, 6], []][rank])


def nan_on_rank_1(scores: Scores, micro: MicroBatch) -> LossTerms:
    terms = weighted_nll(scores, micro)
    is_rank_1 = bool((micro.response["row"] >= 2).any())
    return LossTerms(terms.loss * math.nan if is_rank_1 else terms.loss, terms.metrics)


def train_three_steps(world: World, layout: UpdateLayout) -> tuple[TrainingEngine, list[UpdateResult]]:
    engine = make_engine(world, layout=layout, max_tokens=MAX_TOKENS)
    rows = uneven_rows(world.rank, world.size)
    return engine, [engine.update(rows, weighted_nll) for _ in range(3)]


class Calls(TorchDispatchMode):
    """Counts the collectives that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counts[func.__name__.split(".")[0]] += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def gathers_of_passes(world: World) -> tuple[list[int], bool]:
    """Times that weights are gathered by an update in several micro-batches and by a scoring pass; what is left."""
    engine, counts = make_engine(world, layout=UpdateLayout(shard=2), max_tokens=MAX_TOKENS), []
    rows = uneven_rows(world.rank, world.size)
    for run in (lambda: engine.update(rows, weighted_nll), lambda: engine.score(rows)):
        with Calls() as calls:
            run()
        counts.append(calls.counts["_allgather_base_"])
    return counts, all(isinstance(weight, DTensor) for _, weight in engine.model.named_parameters())


def trained(world: World, layouts: list[UpdateLayout]) -> list[tuple[list[UpdateResult], dict[str, Tensor], Tensor]]:
    out = []
    for layout in layouts:
        engine, results = train_three_steps(world, layout)
        scores = engine.score(uneven_rows(world.rank, world.size))
        out.append((results, whole_weights(engine), scores.logprobs_R.cpu()))
    return out


def assert_like_one_rank(ranks: list, one: tuple) -> None:
    expected_results, expected_weights, expected_logprobs = one
    for results, weights, _ in ranks:
        assert results == ranks[0][0]
        for result, expected in zip(results, expected_results, strict=True):
            assert math.isclose(result.loss, expected.loss, rel_tol=1e-5)
            assert math.isclose(result.grad_norm, expected.grad_norm, rel_tol=1e-5)
            assert result.metrics["entropy"][1] == expected.metrics["entropy"][1]
            assert math.isclose(result.metrics["entropy"][0], expected.metrics["entropy"][0], rel_tol=1e-5)
        for name, weight in weights.items():
            assert relative_difference(weight, expected_weights[name]) < 1e-5, name
    logprobs_R = torch.cat([logprobs for _, _, logprobs in ranks])
    torch.testing.assert_close(logprobs_R, expected_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.on_device
def test_sharded_and_replicated_ranks_with_uneven_rows_train_as_one_process_does(world):
    [one] = trained(world, [UpdateLayout()])
    layouts = [UpdateLayout(data=1, shard=2), UpdateLayout(data=2, shard=1)]
    by_rank = run_ranks(2, trained, layouts)
    for k in range(len(layouts)):
        assert_like_one_rank([answers[k] for answers in by_rank], one)


def test_three_ranks_with_empty_shards_and_a_rank_without_rows_train_as_one_process_does(world):
    [one] = trained(world, [UpdateLayout()])
    by_rank = run_ranks(3, trained, [UpdateLayout()])
    assert_like_one_rank([answers[0] for answers in by_rank], one)


def gather(decoder: Decoder) -> None:
    if isinstance(decoder, FSDPModule):
        decoder.unshard()


def shards_found(world: World) -> list[bool]:
    """Whether shards are what the modules hold, after each thing that may replace what they hold."""
    engine, rows, found = make_engine(world), uneven_rows(world.rank, world.size), []
    [decoder] = engine.model.decoders
    for change in (
        lambda: engine.score(rows),
        lambda: engine.update(rows, weighted_nll),
        lambda: gather(decoder),
        engine.reshard,
        lambda: decoder._apply(torch.clone),
    ):
        change()
        shards = engine.named_shards()
        storages = {name: local_tensor(weight).untyped_storage() for name, weight in decoder.named_parameters()}
        found.append(
            all(
                shard.tensor.untyped_storage().data_ptr() == storages[name].data_ptr() for name, shard in shards.items()
            )
        )
    return found


def test_shards_are_those_that_modules_hold_where_other_tensors_or_storage_took_their_place(world):
    assert [shards_found(world), *run_ranks(3, shards_found)] == [[True] * 5] * 4


def skipped_step(world: World) -> tuple[bool, bool, bool]:
    engine, _ = train_three_steps(world, UpdateLayout())
    before = {key: shard.tensor.clone() for key, shard in trainer_state(engine).items()}
    skipped = engine.update(uneven_rows(world.rank, world.size), nan_on_rank_1).skipped
    unchanged = all(torch.equal(shard.tensor, before[key]) for key, shard in trainer_state(engine).items())
    after = engine.update(uneven_rows(world.rank, world.size), weighted_nll)
    return skipped, unchanged, after.skipped


def test_nan_on_one_rank_makes_all_ranks_skip_the_step():
    assert run_ranks(2, skipped_step) == [(True, True, False)] * 2


def write_state(world: World, folder: Path, layout: UpdateLayout) -> dict[str, Tensor]:
    engine, _ = train_three_steps(world, layout)
    write_shards(folder, world.rank, trainer_state(engine))
    barrier()
    return whole_weights(engine)


def read_state(world: World, folder: Path) -> tuple[int, dict[str, Tensor]]:
    engine = make_engine(world)
    load_trainer_state(engine, ShardFiles(folder))
    return engine.update_count, whole_weights(engine)


@pytest.mark.parametrize("layout", [UpdateLayout(data=1, shard=2), UpdateLayout(data=2, shard=1)])
def test_a_state_written_by_two_ranks_loads_into_one_and_back(world, tmp_path, layout):
    written, _ = run_ranks(2, write_state, tmp_path, layout)
    engine = make_engine(world)
    files = ShardFiles(tmp_path)
    load_trainer_state(engine, files)
    assert engine.update_count == 3
    for name, weight in whole_weights(engine).items():
        assert torch.equal(weight, written[name]), name
    for name, means in engine.optimizer_state().items():
        whole = WeightSlice(name, (0,) * means["exp_avg"].dim(), tuple(means["exp_avg"].shape))
        assert torch.equal(means["exp_avg"].cpu(), files.read("exp_avg", whole)) and means["exp_avg"].any()
    (again := tmp_path / "again").mkdir()
    write_shards(again, 0, trainer_state(engine))
    for step_count, weights in run_ranks(2, read_state, again):
        assert step_count == 3 and all(torch.equal(weights[name], written[name]) for name in written)


def test_a_small_model_is_gathered_once_per_pass_and_not_kept() -> None:
    for counts, leaves_shards in run_ranks(2, gathers_of_passes):
        assert counts == [1, 1]
        assert leaves_shards
