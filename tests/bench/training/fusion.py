"""Whole steps in which models score rows while rewards and tools are waited for, beside `dock.fuse=false`.

Two cases on a model with random weights, each with a reference and a pass for old log-probs, fused and unfused in turn:

    reward   a reward function sleeps 50 ms for each response
    tool     an environment sleeps a tenth of --answer-seconds or more, up to all of them, for each of its answers; rows
             take 1 to 3, both by the row's seed

Waits are those of the unfused order: for rewards from the end of generation until the last has come, for tools whenever
no row can be decoded. Hideable is what other work could fill of them in the best order. For rewards that is the passes
over all rows, or the wait where it is shorter, step by step. For tools each wait could hold the passes over rows that
had ended before it began and that no earlier wait had held. `hidden_share` is the part of the hideable seconds in which
such work really ran; it is less than 1 where a pass outlasts the wait in which it began.
Rows, losses and weights of all runs are compared by their digests. The first step of a run isn't counted.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.observability.timeline import read_timeline
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import STEPS_OF_WARM_UP, check_steps, train_steps

CASES = ("reward", "tool")
_PASSES = ("reference", "old_logprobs")
_REWARD = """
import time

def slow(completions, **columns):
    time.sleep(0.05 * len(completions))
    return [sum(letter.isdigit() for letter in text) / 8 for text in completions]
"""
_TOOL = """
import random, time
from spmdrl.engines.environment.episode import End, Episode, Observation

class Slow:
    def step(self, episode: Episode):
        if len(episode.turns) > random.Random(episode.seed).randint(1, 3):
            return End()
        time.sleep(random.Random(f"{episode.seed} {len(episode.turns)}").uniform(SECONDS / 10, SECONDS))
        return Observation(str(episode.seed % 100))
"""


@dataclass(frozen=True)
class FusionRun:
    """What was measured in one run."""

    step_seconds: list[float]
    waited: float
    hideable: float
    hidden: float
    digests: tuple[str, ...]
    """of rows, losses and weights"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--width", type=int, default=192, help="of the model, which has 6 layers")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step, with 4 responses each")
    parser.add_argument("--length", type=int, default=56, help="most tokens of a response")
    parser.add_argument("--answer-seconds", type=float, default=2.0, help="the longest wait for a tool's answer")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run, the first of which is not counted")
    parser.add_argument("--rounds", type=int, default=3, help="how often all run in turn")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Train in each case, fused and unfused in turn. Raises RuntimeError with the end of a run's stderr if it fails."""
    check_steps(arguments.steps)
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        (folder / "slow_reward.py").write_text(_REWARD)
        (folder / "slow_tool.py").write_text(_TOOL.replace("SECONDS", str(arguments.answer_seconds)))
        runs = {
            (case, fuse): functools.partial(_train, arguments, folder, case=case, fuse=fuse)
            for case in arguments.cases
            for fuse in (True, False)
        }
        found = {key: turn.results for key, turn in in_turn(runs, arguments.rounds).items()}
    rows = [_row(case, found[case, True], found[case, False]) for case in arguments.cases]
    return BenchTable(
        title=f"bench fusion: {arguments.prompts} prompts x 4 responses, {arguments.ranks} ranks",
        rows=rows,
        notes=("seconds are medians: of steps on the slowest rank; waits are sums over ranks and the run's steps",),
        details={"ratios": {name: min(float(str(row[name])) for row in rows) for name in
                            ("hidden_share", "fused_vs_unfused")}},
        passed=all(bool(row["equal"]) for row in rows),
    )  # fmt: skip


def _row(case: str, fused: Sequence[FusionRun], unfused: Sequence[FusionRun]) -> dict[str, object]:
    seconds = [statistics.median(one for run in runs for one in run.step_seconds) for runs in (fused, unfused)]
    return {
        "case": case,
        "fused step s": seconds[0],
        "unfused step s": seconds[1],
        "fused_vs_unfused": seconds[1] / seconds[0],
        "waited s": statistics.median(run.waited for run in fused),
        "hideable s": statistics.median(run.hideable for run in fused),
        "hidden_share": statistics.median(run.hidden / run.hideable for run in fused),
        "unfused hidden s": statistics.median(run.hidden for run in unfused),
        "equal": len({run.digests for run in (*fused, *unfused)}) == 1,
    }


def _train(arguments: argparse.Namespace, inputs: Path, *, case: str, fuse: bool) -> FusionRun:
    """One run of the `train` verb."""
    shape = {"hidden_size": arguments.width, "num_hidden_layers": 6, "num_attention_heads": 4,
             "num_key_value_heads": 2,
             "intermediate_size": 3 * arguments.width, "max_position_embeddings": 16 + arguments.length}  # fmt: skip
    settings: dict[str, object] = {
        "model.make": json.dumps(shape | {"chars": "0123456789+=<>"}),
        "data.train": "synthetic://addition?low=0&high=99&count=200",
        "rollout.prompts_per_step": arguments.prompts,
        "rollout.num_generations": 4,
        "rollout.max_completion_length": arguments.length,
        "reward.functions": f"[{inputs / 'slow_reward.py'}:slow]" if case == "reward" else "[exact]",
        "reward.workers": 2,
        "algo.kl_coef": 0.05,
        "train.updates_per_step": 2,
        "train.max_steps": arguments.steps,
        "checkpoint.interval": arguments.steps,
        "log.samples_per_step": 4 * arguments.prompts,
        "eval.before_train": "false",
        "reshard.swap": "never",
        "resources.device": "cpu",
        "dock.fuse": str(fuse).lower(),
    }
    if case == "tool":
        settings |= {"environment.function": f"{inputs / 'slow_tool.py'}:Slow", "environment.workers": 16,
                     "rollout.stop": "['=', '+']"}  # fmt: skip
    folder = inputs / "run"
    steps = train_steps(folder, settings, num_ranks=arguments.ranks)
    waiting = "generation" if case == "tool" else "reward"
    waits = [[step.get(f"fusion/{what}_seconds/{waiting}", 0.0) for step in steps] for what in ("waited", "hidden")]
    works = _work_seconds(folder)
    hideable = [
        step["fusion/hideable_seconds/generation"] if case == "tool" else min(waited, works[STEPS_OF_WARM_UP + 1 + at])
        for at, (step, waited) in enumerate(zip(steps, waits[0], strict=True))
    ]
    found = FusionRun(
        [step["time/step"] for step in steps],
        sum(waits[0]),
        sum(hideable),
        sum(map(min, waits[1], hideable)) if fuse else sum(waits[1]),
        digests(folder, steps, arguments.steps, ("loss", "grad_norm", "kl", "reward")),
    )
    shutil.rmtree(folder)
    return found


def _work_seconds(folder: Path) -> Mapping[int, float]:
    """Seconds of the passes in each step, over all ranks."""
    work = defaultdict[int, float](float)
    for span in read_timeline(folder / "timeline").spans:
        if span.stage in _PASSES:
            work[span.step] += span.seconds
    return work


def digests(folder: Path, steps: Sequence[Mapping[str, float]], last: int, names: Sequence[str]) -> tuple[str, ...]:
    """Digests of a run's samples, of these metrics, and of its last weights."""
    losses = json.dumps([{name: step[name] for name in names} for step in steps])
    weights = folder / f"checkpoints/step_{last:06d}/model/model.safetensors"
    contents = ((folder / "samples.jsonl").read_bytes(), losses.encode(), weights.read_bytes())
    return tuple(hashlib.sha256(content).hexdigest() for content in contents)
