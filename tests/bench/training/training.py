"""The update of one rank beside plain PyTorch on the same transformers model, rows and token budget, run in turn.

Each contender makes forward, backward and the optimizer's step over the same rows of log-normal lengths, with the same
loss, the mean over response tokens. Plain PyTorch batches rows of similar lengths, and takes logits at targets only.
The matmul rate is that of one large product measured in the same run, in the dtype that the contenders compute in.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    made = ", ".join(ROLLOUT_MODELS)
    parser.add_argument("--model", help=f"Hugging Face folder, or a random one of {made}; unless given, a Qwen3 of 30M")
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
    """Run all in turn, and compare medians. Raises ValueError where their losses differ."""
    with open_world(arguments.device) as world, _model_folder(arguments.model) as folder:
        with start_up():
            config = read_config(folder)
        sizes = RowSizes(arguments.rows, arguments.mean_length, arguments.spread, arguments.longest)
        rows = make_rows(config.vocab_size, sizes)
        steps, max_tokens = _contenders(folder, config, rows, world, arguments.max_tokens)
        losses = {name: step() for name, step in steps.items()}
        _check_same_loss(losses)
        # All see the same machine, the large product too.
        timed = {name: functools.partial(device_seconds, step, world.device) for name, step in steps.items()}
        size = MATMUL_SIZE_ON_CPU if world.device.is_cpu else MATMUL_SIZE
        turns = in_turn({**timed, _MATMUL: functools.partial(matmul_rate, world.device, size)}, arguments.rounds)
    flops_per_second = max(turns.pop(_MATMUL).results)
    seconds = {name: turn.results for name, turn in turns.items()}
    flops = useful_flops(config, rows)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    lengths = rows.lengths_B.tolist()
    table_rows = [
        {
            "trainer": name,
            "seconds": median,
            "tokens_per_s": sum(lengths) / median,
            "matmul_share": flops / median / flops_per_second,
            "times_ours": median / medians[OURS],
            "loss": losses[name],
        }
        for name, median in medians.items()
    ]
    return BenchTable(
        title=f"bench training: {len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, "
        f"micro-batches of at most {max_tokens}",
        rows=table_rows,
        notes=(
            f"{medians[PLAIN] / medians[OURS]:.2f} times as fast as plain PyTorch; "
            f"medians over {arguments.rounds} steps run in turn",
            f"{flops / 1e12:.3g} useful TFLOP a step; one large product runs at {flops_per_second / 1e12:.3g} TFLOP/s "
            f"with {torch.get_num_threads()} CPU threads",
        ),
        details={"seconds": seconds, "ratio": medians[PLAIN] / medians[OURS], "flops": flops},
    )


@contextmanager
def _model_folder(given: str | None) -> Iterator[Path]:
    """The folder given, or a temporary one with a random model."""
    config = QWEN3_30M if given is None else ROLLOUT_MODELS.get(given)
    if given is not None and config is None:
        yield Path(given)
        return
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        write_model(Path(name), config)
        yield Path(name)


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


def _contenders(
    folder: Path, config: DecoderConfig, rows: TokenRows, world: World, max_tokens: int | None
) -> tuple[dict[str, Callable[[], float]], int]:
    """Each contender's step, which returns its loss, and the token budget of all."""
    training = TrainingConfig(max_tokens_per_microbatch=max_tokens)
    budget = training.tokens_per_microbatch(world.device.kind)
    optim = OptimConfig()
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(), world.size), world.device, world.rank)
    engine = TrainingEngine(config, training, optim, mesh, world.device)
    engine.load(open_weights(folder, config))
    plain = PlainTrainer(folder, optim, world.device)
    num_targets = rows.num_response_tokens
    mean_loss = mean_loss_of(num_targets)
    steps: dict[str, Callable[[], float]] = {OURS: lambda: engine.update(rows, mean_loss).loss}
    batches = similar_batches(rows, budget, world.device.torch_device)
    steps[PLAIN] = lambda: plain.step(batches, num_targets)
    return steps, budget


def mean_loss_of(num_targets: int) -> LossFunction:
    """Minus the mean log-prob of so many response tokens, of all micro-batches and ranks together."""

    def mean_loss(scores: Scores, micro: MicroBatch) -> LossTerms:
        return LossTerms(-scores.logprobs_R.sum() / num_targets, {})

    return mean_loss


def _check_same_loss(losses: dict[str, float]) -> None:
    # Plain PyTorch's contenders share a model, so each begins a step after the one before.
    if max(losses.values()) - min(losses.values()) > 0.01 * abs(losses[OURS]):
        raise ValueError(f"the contenders' losses differ, so they don't do the same work: {losses}")


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
