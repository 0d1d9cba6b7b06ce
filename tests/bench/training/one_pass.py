"""Log-probs with adapters and without them: one pass over each row twice, beside two passes, run in turn.

Rows are groups of responses to one prompt, a third of each row; responses are half to one and a half times as long as
their mean. Seconds are a rank's wall time and the time that its thread computed, which on a busy machine says more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from spmdrl.engines.models.making.make_model import RandomWeights
from spmdrl.engines.training.batching.packed_rows import AdapterLogprobs, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.settings.model_config import LoraConfig
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.bench.harness.bench_ranks import BenchRanks
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.training.prefix import MODELS, make_group_rows

_SHAPE = (1, 2)
_LARGEST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class TimedPass:
    """What one of the two ways took on this rank."""

    seconds: float
    computing_seconds: float


@dataclass(frozen=True)
class PassTimes:
    """Medians over rounds on one rank, and the largest distance of log-probs."""

    one: TimedPass
    two: TimedPass
    difference: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="1m", help="parameters of a model with random weights")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of one thread, over which weights are sharded")
    parser.add_argument("--prompts", type=int, nargs="+", default=[4, 16, 64], help="prompts of a rank, in turn")
    parser.add_argument("--group", type=int, default=8, help="responses to each")
    parser.add_argument("--length", type=int, default=24, help="tokens of a row on average")
    parser.add_argument("--rounds", type=int, default=5, help="how often both run in turn, after one of warm-up")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Medians of seconds; passed if no log-prob differs by more than rounding."""
    found: list[PassTimes] = BenchRanks(arguments.ranks).call(_measure, arguments)[0]
    rows = [_table_row(prompts, times) for prompts, times in zip(arguments.prompts, found, strict=True)]
    return BenchTable(
        title=f"bench adapters: {arguments.model}, {arguments.ranks} ranks, {arguments.group} responses to a prompt, "
        f"{arguments.length} tokens a row on average",
        rows=rows,
        notes=(f"seconds of the first rank, medians over {arguments.rounds} rounds in turn",),
        details={"ratios": {str(row["prompts"]): row["one / two"] for row in rows}},
        passed=all(times.difference < _LARGEST_DIFFERENCE for times in found),
    )


def _table_row(prompts: int, times: PassTimes) -> dict[str, object]:
    return {
        "prompts": prompts,
        "one pass s": times.one.seconds,
        "two s": times.two.seconds,
        "one / two": times.one.seconds / times.two.seconds,
        "computing: one / two": times.one.computing_seconds / times.two.computing_seconds,
        "difference": times.difference,
    }


def _measure(world: World, arguments: argparse.Namespace) -> list[PassTimes]:
    """Collective over all ranks."""
    config = replace(MODELS[arguments.model], lora=LoraConfig())
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(), world.size), world.device, world.rank)
    engine = TrainingEngine(config, TrainingConfig(), OptimConfig(), mesh, world.device)
    engine.load(RandomWeights(config, seed=0))
    return [_pass_times(engine, prompts, arguments) for prompts in arguments.prompts]


def _pass_times(engine: TrainingEngine, prompts: int, arguments: argparse.Namespace) -> PassTimes:
    sizes = argparse.Namespace(prompts=prompts, group=arguments.group, length=arguments.length, ragged=True)
    rows = make_group_rows(engine.config.vocab_size, _SHAPE, sizes)
    ways = {"one": engine.score_with_and_without_adapters, "two": lambda rows: _in_two_passes(engine, rows)}
    one, two = (way(rows) for way in ways.values())
    differences = [(one.with_R - two.with_R).abs().max(), (one.without_R - two.without_R).abs().max()]
    turns = in_turn({name: lambda way=way: _timed(way, rows) for name, way in ways.items()}, arguments.rounds)
    return PassTimes(_median(turns["one"].results), _median(turns["two"].results), float(max(differences)))


def _in_two_passes(engine: TrainingEngine, rows: TokenRows) -> AdapterLogprobs:
    with engine.without_adapters():
        without_R = engine.score(rows).logprobs_R
    return AdapterLogprobs(engine.score(rows).logprobs_R, without_R)


def _timed(way: Callable[[TokenRows], AdapterLogprobs], rows: TokenRows) -> TimedPass:
    start, start_computing = time.perf_counter(), time.process_time()
    way(rows)
    return TimedPass(time.perf_counter() - start, time.process_time() - start_computing)


def _median(runs: list[TimedPass]) -> TimedPass:
    return TimedPass(
        statistics.median(run.seconds for run in runs), statistics.median(run.computing_seconds for run in runs)
    )
