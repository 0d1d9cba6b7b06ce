"""Whole jobs on this device, started as users start them: the quickstart twice, and steps with vLLM inside."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdrl.verbs.doctor.commands import train_to_end
from spmdrl.verbs.doctor.stage_run import StageRun

Steps = Sequence[Mapping[str, float]]
"""metrics of each step"""
Settings = Mapping[str, object]
"""values of config keys"""

# The first step of a process builds caches and optimizer state.
STEPS_OF_WARM_UP = 1
# Every step does the same work.
_SETTINGS: Settings = {
    "reward.functions": "[exact]",
    "train.skip_zero_advantage": "false",
    "checkpoint.interval": 0,
    "log.backends": "[jsonl]",
    "log.samples_per_step": 0,
}

# The quickstart's model, task and supervised start (configs/debug/quickstart.yaml), copied because an installed package
# has no configs.
_QUICKSTART: Settings = {
    "model.make": "{hidden_size: 128, num_hidden_layers: 5, num_attention_heads: 4, num_key_value_heads: 2, "
    "intermediate_size: 384, max_position_embeddings: 64}",
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
    "model.make": "{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, "
    "intermediate_size: 64, max_position_embeddings: 32}",
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
"""gain of the mean reward, from a run's first quarter to its last"""
_CLOCKED = re.compile("(time|perf|mem|fusion)/|reshard/.*(seconds|per_second|hidden_share)$")

# Prompts x responses, tokens of each response.
_STEP_SIZES = {"full": (32, 8, 256), "small": (4, 2, 8)}
_STEP_MODELS = {
    "full": "{hidden_size: 1024, num_hidden_layers: 24, num_attention_heads: 16, num_key_value_heads: 4, "
    "intermediate_size: 4096, max_position_embeddings: 1024}",
    "small": "{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, "
    "intermediate_size: 192, max_position_embeddings: 64}",
}
"""400 and 0.1 million parameters"""
_NUM_STEPS = STEPS_OF_WARM_UP + 3
_LARGEST_MISMATCH = 0.05
"""nats between vLLM's log-probs and the trainer's, on average"""


def check_quickstart(run: StageRun) -> None:
    """Train twice from one seed, with the training state swapped at each switch."""
    settings = {**_task(run), "reshard.swap": "always", "debug.deterministic": "true"}
    first, second = (train(run, run.folder / name, settings) for name in ("first", "second"))
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
    """Describe the first difference between two runs' metrics, except measurements by a clock or the system."""
    for number, (one, other) in enumerate(zip(first, second, strict=True), STEPS_OF_WARM_UP + 1):
        for name in sorted(one.keys() | other.keys()):
            if not _CLOCKED.match(name) and one.get(name) != other.get(name):
                return f"{name} of step {number} is {one.get(name)} and {other.get(name)}"
    return None


def check_vllm(run: StageRun) -> None:
    """Train a few steps whose responses vLLM generates inside the ranks; it sleeps, wakes and takes new weights."""
    settings = step_settings(run) | {"rollout.engine": "vllm", "reshard.swap": "always", "rollout.temperature": 1.0}
    steps = train(run, run.folder / "run", settings)
    mismatch = max(step["mismatch/abs_mean"] for step in steps)
    run.figures["seconds_per_step"] = statistics.median(step["time/step"] for step in steps)
    run.figures["mismatch_nats"] = mismatch
    run.figures["probe_mismatch_nats"] = max(step["mismatch/probe_abs_max"] for step in steps)
    fault = (
        f"vLLM's log-probs and the trainer's are {mismatch:.3g} nats apart on average, more than {_LARGEST_MISMATCH}"
    )
    run.require(mismatch <= _LARGEST_MISMATCH, fault)


def step_settings(run: StageRun) -> dict[str, object]:
    """Return the settings of steps of fixed work with a random model."""
    num_prompts, num_responses, length = _STEP_SIZES[run.scale]
    return {
        "model.make": _STEP_MODELS[run.scale],
        "data.train": "synthetic://addition?low=0&high=49&count=256",
        "rollout.prompts_per_step": num_prompts,
        "rollout.num_generations": num_responses,
        "rollout.max_completion_length": length,
        "rollout.ignore_eos": "true",
        "train.max_steps": _NUM_STEPS,
    }


def train(run: StageRun, folder: Path, settings: Settings) -> Steps:
    """Train in a new run folder; returns the metrics of each step after warm-up.

    Raises CommandFailed with the end of the run's stderr if it fails.
    """
    # The doctor has found the device, so that auto finds the same.
    device = {"resources.device": "cpu" if run.kind == "cpu" else "auto"}
    words = [f"{key}={value}" for key, value in {**_SETTINGS, **settings, **device}.items()]
    return train_to_end(words, run.num_ranks, folder)[STEPS_OF_WARM_UP:]
