"""Whole jobs on this device, started as users start them: the quickstart twice, a step's parts, and vLLM inside."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdrl.engines.models.making.make_model import make_char_tokenizer
from tests.bench.accelerator.stage_run import StageRun
from tests.bench.harness.bench_models import QWEN_0_5B, TINY, write_model
from tests.bench.harness.train_runs import STEPS_OF_WARM_UP, train_steps

Steps = Sequence[Mapping[str, float]]
"""the metrics of each step"""
Settings = Mapping[str, object]
"""values of config keys"""

# The quickstart's model, task and supervised start (configs/debug/quickstart.yaml), written out because an installed
# package has no configs.
_QUICKSTART: Settings = {
    "model.make": "{hidden_size: 128, num_layers: 5, num_heads: 4, num_kv_heads: 2, intermediate_size: 384, "
    "max_positions: 64}",
    "data.train": "synthetic://addition?low=0&high=49&test_fraction=0.15&count=2000",
    "sft": "{max_steps: 400, rows_per_step: 256, stop_at_probability: 0.25, "
    "optim: {lr: 3.0e-3, warmup_steps: 20, betas: [0.9, 0.95]}}",
    "rollout.prompts_per_step": 64,
    "rollout.num_generations": 8,
    "rollout.max_completion_length": 6,
    "rollout.max_running_rows": 512,
    "optim": "{lr: 5.0e-4, betas: [0.9, 0.95], warmup_steps: 5}",
    "train.max_steps": 60,
}
# Small sizes learn within seconds to write digits.
_DIGITS: Settings = {
    "model.make": "{hidden_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, intermediate_size: 64, "
    "max_positions: 32}",
    "data.train": "synthetic://addition?low=0&high=9&count=80",
    "rollout.prompts_per_step": 8,
    "rollout.num_generations": 8,
    "rollout.max_completion_length": 8,
    "rollout.kv_cache_gib": 0.02,
    "optim.lr": 1e-2,
    "train.max_steps": 8 + STEPS_OF_WARM_UP,
}
_REWARD = """
def share_of_digits(completions, **columns):
    return [sum(letter.isdigit() for letter in text) / 8 for text in completions]
"""
_LEAST_GAIN = 0.02
"""of the mean reward, from a run's first quarter to its last"""
_CLOCKED = re.compile("(time|perf|mem|fusion)/|reshard/.*(seconds|per_second|hidden_share)$")

# Prompts x responses, tokens of each response.
_STEP_SIZES = {"full": (32, 8, 256), "small": (4, 2, 8)}
_STEP_MODELS = {"full": QWEN_0_5B, "small": TINY}
_STEP_CACHES: Mapping[str, Settings] = {"full": {}, "small": {"rollout.kv_cache_gib": 0.02}}
_PARTS = {"rollout": "generation", "logprobs": "old_logprobs", "update": "update", "switch": "resharding"}
_NUM_STEPS = STEPS_OF_WARM_UP + 3
_LARGEST_MISMATCH = 0.05
"""nats between vLLM's log-probs and the trainer's, on average"""


def check_quickstart(run: StageRun) -> None:
    """Train twice from one seed, with the training state swapped at each switch."""
    settings = {**_task(run), "reshard.swap": "always", "debug.deterministic": "true"}
    first, second = (_train(run, run.folder / name, settings) for name in ("first", "second"))
    different = _first_difference(first, second)
    run.require(different is None, f"two runs from one seed differ: {different}")
    quarter = len(first) // 4
    start, end = (statistics.fmean(step["reward"] for step in steps) for steps in (first[:quarter], first[-quarter:]))
    run.figures["first_reward"], run.figures["last_reward"] = start, end
    run.require(end - start >= _LEAST_GAIN, f"the mean reward goes from {start:.3f} to {end:.3f}: nothing was learned")
    run.figures["seconds_per_step"] = statistics.median(step["time/step"] for step in first)


def _task(run: StageRun) -> Settings:
    if run.scale == "full":
        return _QUICKSTART
    reward = run.folder / "reward.py"
    reward.write_text(_REWARD)
    return {**_DIGITS, "reward.functions": f'["{reward}:share_of_digits"]'}


def _first_difference(first: Steps, second: Steps) -> str | None:
    """Where two runs' metrics differ first, but for what a clock or the system measures."""
    for number, (one, other) in enumerate(zip(first, second, strict=True), STEPS_OF_WARM_UP + 1):
        for name in sorted(one.keys() | other.keys()):
            if not _CLOCKED.match(name) and one.get(name) != other.get(name):
                return f"{name} of step {number} is {one.get(name)} and {other.get(name)}"
    return None


def check_step(run: StageRun) -> None:
    """Train a few steps of a random model, and show the share of each part in a step."""
    steps = _train(run, run.folder / "run", _step_settings(run) | _STEP_CACHES[run.scale])
    whole = statistics.median(step["time/step"] for step in steps)
    run.figures["seconds_per_step"] = whole
    parts = {part: [step.get(f"time/{stage}", 0.0) for step in steps] for part, stage in _PARTS.items()}
    for part, seconds in parts.items():
        run.figures[f"{part}_share"] = statistics.median(seconds) / whole
    run.figures["other_share"] = 1 - sum(run.figures[f"{part}_share"] for part in _PARTS)
    run.figures["tokens_per_second"] = statistics.median(step["perf/tokens_per_second"] for step in steps)
    run.figures["times"] = {
        name: statistics.median(step[name] for step in steps) for name in steps[0] if name.startswith(("time/", "mem/"))
    }


def check_vllm(run: StageRun) -> None:
    """Train a few steps whose responses vLLM generates inside the ranks; it sleeps, wakes and takes new weights."""
    settings = _step_settings(run) | {"rollout.engine": "vllm", "reshard.swap": "always", "rollout.temperature": 1.0}
    steps = _train(run, run.folder / "run", settings)
    mismatch = max(step["mismatch/abs_mean"] for step in steps)
    run.figures["seconds_per_step"] = statistics.median(step["time/step"] for step in steps)
    run.figures["mismatch_nats"] = mismatch
    run.figures["probe_mismatch_nats"] = max(step["mismatch/probe_abs_max"] for step in steps)
    fault = (
        f"vLLM's log-probs and the trainer's are {mismatch:.3g} nats apart on average, more than {_LARGEST_MISMATCH}"
    )
    run.require(mismatch <= _LARGEST_MISMATCH, fault)


def _step_settings(run: StageRun) -> dict[str, object]:
    """Steps of fixed work with a random model, which is written into the stage's folder."""
    num_prompts, num_responses, length = _STEP_SIZES[run.scale]
    model, prompts = run.folder / "model", run.folder / "prompts.jsonl"
    write_model(model, _STEP_MODELS[run.scale], eos_token_id=2)
    make_char_tokenizer(model)
    lines = [json.dumps({"prompt": f"{n}+{n + 7}=", "answer": str(2 * n + 7)}) for n in range(256)]
    prompts.write_text("\n".join(lines) + "\n")
    return {
        "model.path": model,
        "data.train": prompts,
        "rollout.prompts_per_step": num_prompts,
        "rollout.num_generations": num_responses,
        "rollout.max_completion_length": length,
        "rollout.ignore_eos": "true",
        "rollout.engine": "native",
        "train.max_steps": _NUM_STEPS,
    }


def _train(run: StageRun, folder: Path, settings: Settings) -> Steps:
    """The metrics of each step after warm-up."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}
    # The check has found the device, so that auto finds the same.
    device = "cpu" if run.kind == "cpu" else "auto"
    on_device = {**settings, "resources.device": device, "log.samples_per_step": 0}
    return train_steps(folder, on_device, num_ranks=run.num_ranks, environment=environment)
