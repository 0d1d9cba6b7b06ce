"""A small job over thousands of steps: what its processes hold stays flat, and what its files grow by is shown.

The verb `train` under torchrun, with checkpoints and evaluations, looked at from outside each --interval steps. An
amount is flat if, from step --warm on, it grows by at most 0.5% per 1,000 steps, or by 0.2 where it is small.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from spmdrl.config.reader import ConfigError
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.train_runs import run_verb, words_of
from tests.bench.memory.job_holdings import FILES_OF, Holding, HoldingSampler, amounts_in

# A run keeps these from its first step to its last.
_GROW = tuple(f"{kind}, bytes" for kind in [*FILES_OF.values(), "other files"] if kind != "checkpoints")
# The last look isn't at a job that ends.
_STEPS_AFTER = 10
_FLAT_SHARE, _FLAT_AMOUNT = 0.005, 0.2
_REWARD = """
def share_of_digits(completions, **columns):
    return [sum(letter.isdigit() for letter in text) / 4 for text in completions]
"""
# No look falls on a checkpoint that is being written.
_SETTINGS: dict[str, object] = {
    "model.make": "{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, "
    "intermediate_size: 64, max_position_embeddings: 32, chars: '0123456789+= '}",
    "data.train": "synthetic://addition?low=0&high=9&count=40", "data.eval": "synthetic://addition?low=0&high=9&count=8",
    "rollout.prompts_per_step": 2, "rollout.num_generations": 2, "rollout.max_completion_length": 4,
    "optim.lr": "1e-4", "checkpoint.interval": 103, "eval.interval": 500, "eval.before_train": "false",
    "resources.device": "cpu",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=2, help="two or more, on this machine")
    parser.add_argument("--interval", type=int, default=50, help="steps from one look to the next")
    parser.add_argument("--warm", type=int, default=500, help="the step from which amounts must be flat")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Passes where all is flat but what grows with the steps that it holds."""
    if arguments.steps < arguments.warm + 2 * arguments.interval or arguments.ranks < 2:
        raise ConfigError(
            f"--steps {arguments.steps} must leave two looks, each {arguments.interval} steps, after step "
            f"{arguments.warm}, and --ranks {arguments.ranks} must be at least 2"
        )
    with tempfile.TemporaryDirectory(prefix="spmdrl-soak-") as name:
        folder = Path(name)
        (folder / "reward.py").write_text(_REWARD)
        own = {
            "reward.functions": f"[{folder / 'reward.py'}:share_of_digits]",
            "train.max_steps": arguments.steps + _STEPS_AFTER,
        }
        sampler = HoldingSampler(folder / "run", arguments.interval)
        with sampler.running():
            words = words_of("train", _SETTINGS | own, folder / "run")
            run_verb(words, num_ranks=arguments.ranks, environment={"OMP_NUM_THREADS": "1"})
        report_bytes = amounts_in(folder / "run")["report, bytes"]
    holdings = [one for one in sampler.holdings if one.step >= arguments.warm]
    if len(holdings) < 2:
        raise RuntimeError(f"the job was looked at {len(holdings)} times after step {arguments.warm}, not twice")
    rows, per_step = growth_rows(holdings), report_bytes / (arguments.steps + _STEPS_AFTER)
    return BenchTable(
        title=f"bench soak: {arguments.steps} steps on {arguments.ranks} ranks, looked at each {arguments.interval}",
        rows=rows,
        notes=(f"the report, written at the end: {report_bytes / 1024:.0f} KiB, {per_step:.0f} bytes a step",),
        details={"report_bytes": report_bytes, "looks": [{"step": one.step} | one.amounts for one in sampler.holdings]},
        passed=all(row["flat"] != "NO" for row in rows),
    )


def growth_rows(holdings: Sequence[Holding]) -> list[dict[str, object]]:
    """By amount: at the first look and the last one, and what it grows by per 1,000 steps between them."""
    first, last = holdings[0], holdings[-1]
    steps = [one.step for one in holdings]
    rows: list[dict[str, object]] = []
    for name, before in first.amounts.items():
        slope = 1000 * statistics.linear_regression(steps, [one.amounts[name] for one in holdings]).slope
        is_flat = slope <= max(_FLAT_SHARE * before, _FLAT_AMOUNT)
        verdict = f"{slope / 1000:.0f} bytes a step" if name in _GROW else ("yes" if is_flat else "NO")
        rows.append({
            "amount": name, f"step {first.step}": before, f"step {last.step}": last.amounts[name],
            "per 1,000 steps": slope, "flat": verdict,
        })  # fmt: skip
    return rows
