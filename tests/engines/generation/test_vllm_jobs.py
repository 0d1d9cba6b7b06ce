"""The quickstart, shortened, with vLLM as its rollout engine: the engine follows the weights that change each step."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import REWARD, finished, metrics_of, run_job

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM isn't installed; see docs/vllm.md"),
]

STEPS = 4
# One that moves the log-probs of a 0.8M model by some hundredths a step, far more than rounding does.
LEARNING_RATE = "5.0e-3"
LAYOUTS = {
    "one rank": (1, []),
    "two ranks, data-parallel": (2, []),
    "two ranks, tensor-parallel": (2, ["resources.generation.tensor=2"]),
}
PARTIAL = ["rollout.partial_max_rounds=2", "rollout.partial_extra_prompts=16", "algo.rollout_is=tis"]


def train_quickstart(folder: Path, ranks: int, options: list[str]) -> list[dict[str, Any]]:
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    shortened = [
        "sft.max_steps=5", f"train.max_steps={STEPS}", "rollout.prompts_per_step=16", "data.eval=null",
        "checkpoint.interval=0", f"optim.lr={LEARNING_RATE}", "optim.warmup_steps=0", "optim.schedule=constant",
        f"reward.functions=[{reward}:share_of_digits]",
    ]  # fmt: skip
    job = run_job(
        "train", "configs/debug/quickstart.yaml", f"run.dir={folder / 'run'}", "rollout.engine=vllm", *shortened,
        *options, ranks=ranks, timeout=240,
    )  # fmt: skip
    finished(job)
    return metrics_of(folder / "run")


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folders = {layout: tmp_path_factory.mktemp("job") for layout in LAYOUTS}
    return {layout: train_quickstart(folders[layout], *how) for layout, how in LAYOUTS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_engine_follows_the_trainer(metrics: dict[str, list[dict[str, Any]]], layout: str):
    steps = metrics[layout]
    assert len(steps) == STEPS
    for step in steps:
        assert step["grad_norm"] > 0
        assert step["mismatch/abs_max"] < 1e-4


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_the_layout_changes_no_answer(metrics: dict[str, list[dict[str, Any]]], layout: str):
    for one, other in zip(metrics["one rank"], metrics[layout], strict=True):
        assert other["reward"] == pytest.approx(one["reward"], abs=0.02)
        assert other["completions/mean_length"] == pytest.approx(one["completions/mean_length"], abs=0.1)


def test_responses_go_on_in_the_next_step(tmp_path: Path):
    steps = train_quickstart(tmp_path, 1, PARTIAL)
    assert len(steps) == STEPS
    # A step whose rows were all drawn before has no token of its own weights.
    mismatches = [step["mismatch/abs_max"] for step in steps if "mismatch/abs_max" in step]
    assert mismatches and max(mismatches) < 1e-4
    assert any(step["off_policy/max"] >= 1 for step in steps[1:])
    assert any(step["dock/deferred"] > 0 for step in steps) and steps[-1]["dock/deferred"] == 0


def test_merged_adapters_reach_the_engine(tmp_path: Path):
    steps = train_quickstart(tmp_path, 1, ["lora={rank: 8}", "optim.lr=2.0e-2"])
    assert len(steps) == STEPS
    assert all(step["grad_norm"] > 0 and step["mismatch/abs_max"] < 1e-4 for step in steps)
    # Adapters have moved the model by more than that: each step's switch compares it with what the engine answers.
    assert steps[-1]["entropy"] != pytest.approx(steps[0]["entropy"], abs=1e-2)
