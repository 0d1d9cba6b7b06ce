"""The update of one rank beside plain PyTorch on the same transformers model, rows and token budget, run in turn.

Each contender makes forward, backward and the optimizer's step over the same rows of log-normal lengths, with the same
loss, the mean over response tokens. Plain PyTorch batches rows of similar lengths, and takes logits at targets only.
Several models run in turn too, and each is compared with the first. CPU seconds are this process's, which other work on
the machine changes less. The matmul rate is that of one large product measured in the same run, in the dtype that the
contenders compute in.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from spmdrl.config.reader import start_up
from spmdrl.engines.models.decoder import DecoderConfig, row_cost_of
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.engines.training.packed_rows import LossFunction, LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.device import Device
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World, open_world
from spmdrl.verbs.doctor.device_verbs import device_seconds
from tests.bench.harness.bench_models import QWEN3_30M, ROLLOUT_MODELS, write_model
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.training.plain_training import PlainTrainer, similar_batches

OURS, PLAIN = "spmdrl", "plain PyTorch"
# Tokens of prompt in a row, as a share of the row.
PROMPT_SHARE = (0.1, 0.5)
MATMUL_SIZE_ON_CPU, MATMUL_SIZE = 1536, 8192
_MATMUL = "one large product"
_DEFAULT = "qwen3-30M"
_MADE = {_DEFAULT: QWEN3_30M, **ROLLOUT_MODELS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models_help = f"Hugging Face folders, or random ones of {','.join(_MADE)}; a {_DEFAULT} by default"
    parser.add_argument("--models", type=lambda text: tuple(text.split(",")), default=(_DEFAULT,), help=models_help)
    sizes = RowSizes()
    parser.add_argument("--rows", type=int, default=sizes.rows, help="rows of one step")
    parser.add_argument("--mean-length", type=float, default=sizes.mean_length, help="mean tokens of a row")
    spread_help = "standard deviation of the lengths' logarithms"
    parser.add_argument("--spread", type=float, default=sizes.spread, help=spread_help)
    parser.add_argument("--longest", type=int, default=sizes.longest, help="tokens of the longest row")
    parser.add_argument("--max-tokens", type=int, help="tokens of one micro-batch; the engine's default unless given")
    parser.add_argument("--rounds", type=int, default=3, help="steps that are counted, after one of warm-up")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or npu")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Run all in turn, and compare medians. Raises ValueError where a model's losses differ."""
    sizes = RowSizes(arguments.rows, arguments.mean_length, arguments.spread, arguments.longest)
    with open_world(arguments.device) as world, ExitStack() as stack:
        folders = {model: stack.enter_context(_model_folder(model)) for model in arguments.models}
        updates = {model: _update_of(folder, sizes, world, arguments.max_tokens) for model, folder in folders.items()}
        losses = {model: {name: step() for name, step in update.steps.items()} for model, update in updates.items()}
        for model, by_trainer in losses.items():
            _check_same_loss(model, by_trainer)
        # All see the same machine, the large product too.
        timed = {
            (model, name): functools.partial(_seconds_of, step, world.device)
            for model, update in updates.items()
            for name, step in update.steps.items()
        }
        size = MATMUL_SIZE_ON_CPU if world.device.is_cpu else MATMUL_SIZE
        turns = in_turn({**timed, _MATMUL: functools.partial(matmul_rate, world.device, size)}, arguments.rounds)
    flops_per_second = max(turns.pop(_MATMUL).results)
    seconds = {name: [wall for wall, _ in turn.results] for name, turn in turns.items()}
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    cpu = {name: statistics.median(cpu for _, cpu in turn.results) for name, turn in turns.items()}
    flops = {model: useful_flops(update.config, update.rows) for model, update in updates.items()}
    table_rows = [
        {
            "model": model,
            "trainer": name,
            "seconds": medians[model, name],
            "CPU seconds": cpu[model, name],
            "tokens_per_s": updates[model].rows.tokens_T.numel() / medians[model, name],
            "matmul_share": flops[model] / medians[model, name] / flops_per_second,
            "times_ours": medians[model, name] / medians[model, OURS],
            "by CPU time": cpu[model, name] / cpu[model, OURS],
            "loss": losses[model][name],
        }
        for model, name in medians
    ]
    first = arguments.models[0]
    lengths = updates[first].rows.lengths_B.tolist()
    ratios = {model: medians[model, PLAIN] / medians[model, OURS] for model in updates}
    beside_first = {
        model: [taken[model, OURS] / taken[first, OURS] for taken in (cpu, medians)] for model in arguments.models[1:]
    }
    return BenchTable(
        title=f"bench training: {len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, "
        f"micro-batches of at most {updates[first].max_tokens}",
        rows=table_rows,
        notes=(
            *(f"{model}: {ratio:.2f} times as fast as plain PyTorch" for model, ratio in ratios.items()),
            *(
                f"our update of {model} / {first}: {by_cpu:.2f} by CPU time, {by_clock:.2f} by the clock"
                for model, (by_cpu, by_clock) in beside_first.items()
            ),
            f"medians over {arguments.rounds} steps run in turn; one large product runs at "
            f"{flops_per_second / 1e12:.3g} TFLOP/s with {torch.get_num_threads()} CPU threads",
        ),
        details={
            "seconds": {model: {name: seconds[model, name] for name in (OURS, PLAIN)} for model in updates},
            "ratios": ratios,
            "beside_first": beside_first,
            "flops": flops,
        },
    )


@contextmanager
def _model_folder(model: str) -> Iterator[Path]:
    """The folder given, or a temporary one with a random model."""
    if model not in _MADE:
        yield Path(model)
        return
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        write_model(Path(name), _MADE[model])
        yield Path(name)


def _seconds_of(step: Callable[[], float], device: Device) -> tuple[float, float]:
    """Seconds that a step takes by the clock, and of this process's CPU time."""
    cpu_start = time.process_time()
    seconds = device_seconds(step, device)
    return seconds, time.process_time() - cpu_start


@dataclass(frozen=True)
class RowSizes:
    """Log-normal lengths of rows."""

    rows: int = 32
    mean_length: float = 192.0
    spread: float = 0.7
    """standard deviation of the lengths' logarithms"""
    longest: int = 2048


def make_rows(vocab_size: int, sizes: RowSizes) -> TokenRows:
    """Rows of random tokens with these lengths, the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    # The mean of a log-normal variable is exp(location + spread**2 / 2).
    location = math.log(sizes.mean_length) - sizes.spread**2 / 2
    logarithms_B = location + sizes.spread * torch.randn(sizes.rows, generator=generator)
    lengths_B = logarithms_B.exp().round().to(torch.int64).clamp(2, sizes.longest)
    least, most = PROMPT_SHARE
    shares_B = least + (most - least) * torch.rand(sizes.rows, generator=generator)
    return TokenRows(
        tokens_T=torch.randint(vocab_size, (int(lengths_B.sum()),), generator=generator),
        offsets=offsets_of(lengths_B),
        prompt_lengths_B=(lengths_B * shares_B).to(torch.int64).clamp(min=1),
    )


@dataclass(frozen=True)
class ModelUpdate:
    """One model's update by each trainer."""

    config: DecoderConfig
    rows: TokenRows
    steps: dict[str, Callable[[], float]]
    """each trainer's step, which returns its loss"""
    max_tokens: int
    """token budget of all"""


def _update_of(folder: Path, sizes: RowSizes, world: World, max_tokens: int | None) -> ModelUpdate:
    with start_up():
        config = read_config(folder)
    rows = make_rows(config.vocab_size, sizes)
    training = TrainingConfig(max_tokens_per_microbatch=max_tokens)
    budget = training.tokens_per_microbatch(world.device.kind)
    optim = OptimConfig()
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(), world.size), world.device, world.rank)
    engine = TrainingEngine(config, training, optim, mesh, world.device)
    engine.load(open_weights(folder, config))
    plain = PlainTrainer(folder, optim, world.device)
    num_targets = rows.num_response_tokens
    mean_loss = mean_loss_of(num_targets)
    batches = similar_batches(rows, budget, world.device.torch_device)
    steps: dict[str, Callable[[], float]] = {
        OURS: lambda: engine.update(rows, mean_loss).loss,
        PLAIN: lambda: plain.step(batches, num_targets),
    }
    return ModelUpdate(config, rows, steps, budget)


def mean_loss_of(num_targets: int) -> LossFunction:
    """Minus the mean log-prob of so many response tokens, of all micro-batches and ranks together."""

    def mean_loss(scores: Scores, micro: MicroBatch) -> LossTerms:
        return LossTerms(-scores.logprobs_R.sum() / num_targets, {})

    return mean_loss


def _check_same_loss(model: str, losses: dict[str, float]) -> None:
    if max(losses.values()) - min(losses.values()) > 1e-3 * abs(losses[OURS]):
        raise ValueError(f"the losses of {model} differ, so the trainers don't do the same work: {losses}")


def useful_flops(config: DecoderConfig, rows: TokenRows) -> float:
    """Floating-point operations that a step can't do without: forward once, backward twice, nothing padded.

    The head is needed at response tokens only.
    """
    cost = row_cost_of(config)
    forward = sum(cost.of(length) for length in rows.lengths_B.tolist())
    forward -= 2 * (rows.tokens_T.numel() - rows.num_response_tokens) * config.vocab_size * config.hidden_size
    return 3 * forward


def matmul_rate(device: Device, size: int) -> float:
    """Floating-point operations a second of one product of square matrices, the best of several."""
    left, right = (torch.randn(size, size, dtype=device.compute_dtype, device=device.torch_device) for _ in range(2))
    return 2 * size**3 / min(device_seconds(lambda: torch.mm(left, right), device) for _ in range(8))
