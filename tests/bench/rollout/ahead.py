"""Rows per second with ranks that only generate, a step ahead of those that train, beside the same ranks together.

Three kinds of work, each on the calculator's recipe with one supervised start for all runs, PPO's critic, a reference,
and no evaluations: `tool`, whose calculator sleeps for a log-normal time between 0.2 and 2 s per turn; `reward`, whose
reward sleeps as long per response; `compute`, where nothing sleeps. Runs are made in turn. Each step's seconds are
those of its fastest round; the first `lag` + 1 steps of a run aren't counted, nor are its last `lag`, in which one side
has nothing to do.

With `--delays N`, N runs of small jobs are delayed at random instead, and must have the bits of undelayed ones.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import tempfile
from pathlib import Path

from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import run_verb, train_steps, words_of
from tests.bench.rollout.ahead_delays import delays
from tests.bench.rollout.sessions import fastest, recipe_of

_FUNCTIONS = """
import random
import time

from spmdrl.engines.environment.calculator import Calculator


def seconds_of(seed):
    return min(2.0, max(0.2, random.Random(seed).lognormvariate(-0.7, 0.7)))


class SlowCalculator(Calculator):
    def step(self, episode):
        time.sleep(seconds_of(f"{episode.seed}/{episode.response}"))
        return super().step(episode)


def slow_exact(completions, answer, **columns):
    time.sleep(seconds_of("".join(completions)))
    return [float(text.strip() == right) for text, right in zip(completions, answer)]
"""
WORKLOADS = ("tool", "reward", "compute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="kinds of work, or of delayed runs; default: all")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--generating", type=int, default=1, help="how many of them only generate")
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--start", type=int, default=40, help="steps of the supervised start")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step, of 8 responses each")
    parser.add_argument("--rows", type=int, default=20_000, help="of the task; a job reads all of them when it starts")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--epochs", type=int, default=1, help="passes of the update over a step's rows")
    parser.add_argument("--workers", type=int, default=64, help="processes of tools or rewards")
    parser.add_argument("--delays", type=int, default=0, metavar="N", help="number of delayed runs; others aren't made")
    parser.add_argument("--rounds", type=int, default=3, help="how often both run in turn")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Train with both in turn. Raises RuntimeError with the end of a run's stderr if it fails."""
    rows, ratios = [], {}
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        if arguments.delays:
            return delays(folder, arguments.delays, arguments.only)
        (folder / "slow.py").write_text(_FUNCTIONS)
        start = _recipe(arguments) | {
            "sft.max_steps": arguments.start, "train.max_steps": 1, "rollout.prompts_per_step": arguments.prompts,
        }  # fmt: skip
        run_verb(words_of("train", start, folder / "start"), num_ranks=2)
        for work in (arguments.only or ",".join(WORKLOADS)).split(","):
            lags = {"together": 0, "apart": arguments.lag}
            runs = {kind: functools.partial(_train, arguments, folder, work, lag) for kind, lag in lags.items()}
            seconds = {}
            for kind, turn in in_turn(runs, arguments.rounds).items():
                figures = _figures(turn.results, arguments.prompts * 8)
                seconds[kind] = figures["step s"]
                rows.append({"work": work, "ranks": kind, **figures})
            ratios[work] = seconds["together"] / seconds["apart"]
    return BenchTable(
        title=f"bench ahead: {arguments.ranks} ranks, {arguments.generating} of which generate {arguments.lag} steps "
        f"ahead, {arguments.rounds} rounds",
        rows=rows,
        notes=("rows per second, apart over together: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()),),
        details={"ratios": ratios},
        passed=True,
    )


def _figures(rounds: list[list[dict[str, float]]], num_rows: int) -> dict[str, float]:
    def mean(name: str) -> float:
        return statistics.mean(fastest(rounds, name))

    step = mean("time/step")
    return {
        "step s": step,
        "rows/s": num_rows / step,
        "generation s": mean("time/generation") + mean("time/reward"),
        "update s": mean("time/update"),
        "push s": mean("time/resharding"),
        "train side waits": mean("time/wait_for_generation") / step,
        "generation side waits": mean("time/wait_for_update") / step,
    }


def _recipe(arguments: argparse.Namespace, **sections: object) -> dict[str, object]:
    """The recipe's settings, with these sections in place of its own."""
    recipe = recipe_of(arguments.rows)
    recipe["model"]["make"] |= {"hidden_size": arguments.hidden, "intermediate_size": 3 * arguments.hidden}
    texts = {name: json.dumps(section) for name, section in (recipe | sections).items()}
    return texts | {"data.eval": "null", "checkpoint.interval": 0, "resources.device": "cpu"}


def _train(arguments: argparse.Namespace, folder: Path, work: str, lag: int) -> list[dict[str, float]]:
    tool, reward = f"{folder / 'slow.py'}:SlowCalculator", f"{folder / 'slow.py'}:slow_exact"
    # A rank alone has the processes of all those that share the work otherwise.
    share = 1 if lag else arguments.ranks
    workers = max(1, arguments.workers // share)
    own = {"model": {"path": str(folder / "start" / "warm_start")}, "sft": {}, "critic": {}}
    # A section, as the recipe's own would come behind keys that all runs of steps have.
    is_slow = work == "reward"
    own["reward"] = {"functions": [reward if is_slow else "exact"], "workers": workers if is_slow else 1}
    settings = _recipe(arguments, **own, algo={"name": "ppo", "kl_coef": 0.01}) | {
        "environment.function": tool if work == "tool" else "calculator",
        "environment.workers": workers if work == "tool" else 1,
        "rollout.prompts_per_step": arguments.prompts,
        "train.max_steps": arguments.steps,
        "train.epochs_per_step": arguments.epochs,
        "resources.update": "{data: 0, shard: 1}",
        "rollout.lag": lag,
        "resources.ranks.generation": arguments.generating if lag else 0,
    }
    steps = train_steps(folder / "run", settings, num_ranks=arguments.ranks)
    shutil.rmtree(folder / "run")
    return steps[arguments.lag : len(steps) - arguments.lag]
