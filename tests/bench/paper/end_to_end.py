"""The paper's Figure 7 in small: Eq. 5 with real tokens, with and without allgather-swap, beside another trainer."""

from __future__ import annotations

import argparse
import functools
import json
import random
import shlex
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdrl.engines.models.decoder import row_cost_of
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.resources.device import find_device
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import check_steps, train_steps
from tests.bench.training.step import RATE, peer_steps
from tests.bench.training.training import MATMUL_SIZE_ON_CPU, matmul_rate

OURS = {
    "allgather-swap at every switch": {"reshard.swap": "always", "reshard.executor": "allgather"},
    "neither swap nor all-gather": {"reshard.swap": "never", "reshard.executor": "exact"},
}
PEER, LARGE_PRODUCT, RATIO = "the other trainer", "one large product", "times the other's"
MODEL = MakeConfig(
    hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, intermediate_size=768
)
NUM_RANKS = 2
# Forward passes that a token costs: one to generate, one and a backward pass, worth two, to learn from.
_PASSES = 4
_SMALLEST_SHARE = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="fig7: Hugging Face folder; a random Qwen3 of 4.8M unless given")
    peer_help = (
        "fig7: command of the other trainer, as `step` takes it; {model}, {prompts} (JSONL), {num_prompts}, "
        "{num_generations}, {length} and {steps} stand for ours"
    )
    parser.add_argument("--peer", help=peer_help)
    parser.add_argument("--num-prompts", type=int, default=16, help="fig7: prompts per step")
    parser.add_argument("--num-generations", type=int, default=8, help="fig7: responses per prompt")
    parser.add_argument("--length", type=int, default=64, help="fig7: tokens of every response")
    parser.add_argument(
        "--steps", type=int, default=3, help="fig7: steps of each run, the first of which isn't counted"
    )
    parser.add_argument("--rounds", type=int, default=1, help="fig7: how often all run in turn")


def figure7(arguments: argparse.Namespace) -> BenchTable:
    """Run all in turn, and compare medians. Raises RuntimeError if a run fails."""
    check_steps(arguments.steps)
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        model = arguments.model or folder / "model"
        if arguments.model is None:
            make_model_folder(model, MODEL, seed=0)
        prompts = _write_prompts(folder / "prompts.jsonl")
        contenders = {
            contender: functools.partial(_our_steps, arguments, model, prompts, settings)
            for contender, settings in OURS.items()
        }
        if arguments.peer:
            sizes = {name: vars(arguments)[name] for name in ("num_prompts", "num_generations", "length", "steps")}
            command = arguments.peer.format(model=model, prompts=prompts, **sizes)
            contenders[PEER] = functools.partial(peer_steps, shlex.split(command))
        product = functools.partial(matmul_rate, find_device("cpu", 0), MATMUL_SIZE_ON_CPU)
        turns = in_turn({**contenders, LARGE_PRODUCT: product}, arguments.rounds)
        large_product = NUM_RANKS * max(turns[LARGE_PRODUCT].results)
        cost = row_cost_of(read_config(model))
    steps = {name: [step for each in turns[name].results for step in each] for name in contenders}
    num_rows = arguments.num_prompts * arguments.num_generations
    tokens = statistics.median(step["perf/tokens"] for ours in OURS for step in steps[ours])
    flops = _PASSES * num_rows * cost.of(round(tokens / num_rows))
    rows = [_row(name, found, flops / large_product) for name, found in steps.items()]
    if PEER in steps:
        for row in rows:
            row[RATIO] = float(str(row[RATE])) / float(str(rows[-1][RATE]))
    return BenchTable(
        title=f"Figure 7: {arguments.num_prompts} prompts x {arguments.num_generations} responses of "
        f"{arguments.length} tokens, {NUM_RANKS} ranks of a thread each",
        rows=rows,
        notes=(
            "The paper, 16 NPUs, Qwen2.5-7B/32B and Qwen3-30B-A3B: 1.42 to 3.97 times the baselines' throughput. "
            "Here: a small model, CPU ranks of one machine, another baseline.",
            f"Shares are of one large product's rate on as many threads, {large_product / 1e9:.4g} GFLOP/s in this "
            "run; a step's useful operations are four forward passes of all its rows.",
            "Neither technique can speed this up: swap frees memory that isn't short here, and all rows are on one "
            "node. The dock can't be turned off, as the product has no central buffer; its placement of rows "
            "(dock.locality) matters over nodes only: Figure 9.",
        ),
        details={
            "here": _here(rows),
            "large_product_flops": large_product,
            "flops_per_step": flops,
            "steps": steps,
        },
    )


def _write_prompts(path: Path, count: int = 512) -> Path:
    """Sums of numbers below 100."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))
    return path


def _our_steps(
    arguments: argparse.Namespace, model: Path, prompts: Path, settings: Mapping[str, object]
) -> list[dict[str, float]]:
    whole = {
        "model.path": model,
        "data.train": prompts,
        "rollout.prompts_per_step": arguments.num_prompts,
        "rollout.num_generations": arguments.num_generations,
        "rollout.max_completion_length": arguments.length,
        "rollout.max_running_rows": arguments.num_prompts * arguments.num_generations,
        "rollout.ignore_eos": "true",
        "train.max_steps": arguments.steps,
        **settings,
    }
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as folder:
        return train_steps(Path(folder), whole, num_ranks=NUM_RANKS)


def _row(name: str, steps: Sequence[Mapping[str, float]], least_seconds: float) -> dict[str, object]:
    """Medians of a contender; `least_seconds` are those of its useful operations at the large product's rate."""
    ours = name != PEER
    seconds = {
        key.removeprefix("time/"): statistics.median(step.get(key, 0.0) for step in steps)
        for key in steps[-1]
        if key.startswith("time/") or (not ours and key != RATE)
    }
    whole = seconds.pop("step")
    rates = [step[f"perf/eq5_{RATE}" if ours else RATE] for step in steps]
    return {
        "run": name,
        RATE: statistics.median(rates),
        "step, s": whole,
        "share of product": least_seconds / whole,
        "of it": {stage: each / whole for stage, each in seconds.items() if each >= _SMALLEST_SHARE * whole},
    }


def _here(rows: Sequence[Mapping[str, object]]) -> str:
    ratios = [f"{float(str(row[RATIO])):.2f}" for row in rows if RATIO in row and row["run"] != PEER]
    return f"{', '.join(ratios)} times the other's" if ratios else "no --peer"
