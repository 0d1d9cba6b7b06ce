"""What `train.share_prompts` saves: updates and log-prob passes of one rank with and without it, run in turn.

Rows are groups of responses to one prompt, in three shapes: prompts four times as long as responses, as long, and a
quarter as long, each as many tokens a row. Log-probs, losses and the updated weights' next losses are compared, too.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.making.make_model import RandomWeights
from spmdrl.engines.training.batching.packed_rows import TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.device import Device
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World, open_world
from spmdrl.verbs.doctor.device_times import device_seconds
from tests.bench.harness.bench_models import qwen3
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.resharding.resharding_ranks import measure_move
from tests.bench.training.training import MADE_MODEL, mean_loss_of

MODELS: dict[str, DecoderConfig] = {
    "1m": qwen3(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_layers=5, num_heads=4, num_kv_heads=2, head_size=32
    ),
    "5m": qwen3(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_layers=6, num_heads=8, num_kv_heads=4, head_size=32
    ),
    "30m": MADE_MODEL,
}
# Parts of a row that are prompt and response.
SHAPES = ((4, 1), (1, 1), (1, 4))
PASSES = ("update", "logprobs")
_LARGEST_DIFFERENCE = 1e-4
_MIB = 2**20


@dataclass(frozen=True)
class PassRun:
    """One pass over all rows."""

    seconds: float
    peak_bytes: int
    """beyond what was held before"""
    loss: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="5m", help="parameters of a model with random weights")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a pass")
    parser.add_argument("--group", type=int, default=8, help="responses to each")
    parser.add_argument("--length", type=int, default=160, help="tokens of a row")
    parser.add_argument("--ragged", action="store_true", help="responses of half to one and a half times the length")
    parser.add_argument("--rounds", type=int, default=3, help="how often all run in turn, after one of warm-up")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or npu")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Medians of seconds; passed if no loss differs by more than rounding."""
    config = MODELS[arguments.model]
    with open_world(arguments.device) as world:
        engines = {shares: _engine(config, world, shares=shares) for shares in (True, False)}
        rows = {shape: make_group_rows(config.vocab_size, shape, arguments) for shape in SHAPES}
        runs: dict[tuple[tuple[int, int], str, bool], Callable[[], PassRun]] = {
            (shape, name, shares): functools.partial(_run, engines[shares], rows[shape], name)
            for shape in SHAPES
            for name in PASSES
            for shares in (True, False)
        }
        in_turn(runs, rounds=1)
        found = {key: turn.results for key, turn in in_turn(runs, arguments.rounds).items()}
    table_rows = list(_table_rows(found))
    return BenchTable(
        title=f"bench prefix: {arguments.model}, {arguments.prompts} prompts x {arguments.group} responses, "
        f"{arguments.length} tokens a row{' on average' if arguments.ragged else ''}",
        rows=table_rows,
        notes=(f"medians over {arguments.rounds} rounds in turn; memory is what a pass adds at its peak",),
        details={"ratios": {f"{row['pass']} {row['prompt:response']}": row["times_faster"] for row in table_rows}},
        passed=all(float(str(row["difference"])) < _LARGEST_DIFFERENCE for row in table_rows),
    )


def _table_rows(found: Mapping[tuple[tuple[int, int], str, bool], list[PassRun]]) -> Iterator[dict[str, object]]:
    for shape in SHAPES:
        for name in PASSES:
            shared, unshared = (found[shape, name, shares] for shares in (True, False))
            seconds = [statistics.median(run.seconds for run in runs) for runs in (shared, unshared)]
            peaks = [statistics.median(run.peak_bytes for run in runs) / _MIB for runs in (shared, unshared)]
            differences = [abs(one.loss - other.loss) for one, other in zip(shared, unshared, strict=True)]
            yield {
                "prompt:response": ":".join(map(str, shape)),
                "pass": name,
                "shared s": seconds[0],
                "unshared s": seconds[1],
                "times_faster": seconds[1] / seconds[0],
                "shared MiB": peaks[0],
                "unshared MiB": peaks[1],
                "difference": max(differences),
            }


def make_group_rows(vocab_size: int, shape: tuple[int, int], arguments: argparse.Namespace) -> TokenRows:
    """Groups of random responses to random prompts, in these parts of a row's length."""
    generator = torch.Generator().manual_seed(0)
    prompt = arguments.length * shape[0] // sum(shape)
    tokens, mean = [], arguments.length - prompt
    for _ in range(arguments.prompts):
        given = torch.randint(vocab_size, (prompt,), generator=generator)
        for _ in range(arguments.group):
            length = int(mean * (0.5 + torch.rand(1, generator=generator))) if arguments.ragged else mean
            tokens.append(torch.cat((given, torch.randint(vocab_size, (max(1, length),), generator=generator))))
    return TokenRows(torch.cat(tokens), offsets_of([len(row) for row in tokens]), torch.full((len(tokens),), prompt))


def _engine(config: DecoderConfig, world: World, *, shares: bool) -> TrainingEngine:
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(), world.size), world.device, world.rank)
    engine = TrainingEngine(config, TrainingConfig(share_prompts=shares), OptimConfig(), mesh, world.device)
    engine.load(RandomWeights(config, seed=0))
    return engine


def _run(engine: TrainingEngine, rows: TokenRows, name: str) -> PassRun:
    mean_loss = mean_loss_of(rows.num_response_tokens)
    losses: list[float] = []

    def work() -> None:
        if name == "update":
            losses.append(engine.update(rows, mean_loss).loss)
        else:
            losses.append(-float(engine.score(rows).logprobs_R.mean()))

    seconds, peak = _measured(work, engine.device)
    return PassRun(seconds, peak, losses[0])


def _measured(work: Callable[[], None], device: Device) -> tuple[float, int]:
    if device.is_cpu:
        found = measure_move(work)
        return found.seconds, found.resident_growth
    held = device.held_bytes()
    device.take_peak_bytes()
    return device_seconds(work, device), device.take_peak_bytes() - held
