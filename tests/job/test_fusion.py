"""Whole jobs that score rows while others wait for an environment: to the same bits as after generation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.support.jobs import finished, inline_config, metrics_of, run_job, untimed, weights_digest

from spmdrl.observability.timeline import Span, read_timeline

# Answers come after 0 to 40 ms, otherwise in each run: no row may depend on how long they take.
ENVIRONMENT = """
import random, time
from spmdrl.engines.environment.episode import End, Episode, Observation

class Slow:
    def step(self, episode: Episode):
        time.sleep(random.random() * 0.04)
        return End() if len(episode.turns) == 2 else Observation(str(episode.seed % 100))
"""
SETTINGS = [
    "model.make.max_position_embeddings=64",
    "rollout.max_completion_length=40", "rollout.stop=[=, +]", "train.max_steps=2",
    "checkpoint.interval=1", "checkpoint.keep_last=9", "algo.kl_coef=0.1", "train.updates_per_step=2",
    "log.samples_per_step=64",
]  # fmt: skip


def settings_of(folder: Path, name: str) -> list[str]:
    (folder / "slow.py").write_text(ENVIRONMENT)
    return [f"run.dir={folder / name}", f"environment.function={folder / 'slow.py'}:Slow", *SETTINGS]


def results_of(folder: Path) -> tuple:
    """Rows, losses and weights of a run."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    metrics = untimed(metrics_of(folder))
    for step in metrics:
        # News are compressed, and hold where rows lie in a rank's file, which other columns come into meanwhile.
        step.pop("dock/metadata_bytes")
    return rows, metrics, weights_digest(folder, 2)


def inside_generation(folder: Path) -> list[Span]:
    """The spans of stages that ran inside generation."""
    spans = read_timeline(folder / "timeline").spans
    outer = [span for span in spans if span.stage == "generation"]
    return [
        span for span in spans
        if span.stage != "generation" and any(
            (one.rank, one.step) == (span.rank, span.step) and one.start <= span.start and span.end <= one.end
            for one in outer
        )
    ]  # fmt: skip


CASES = {
    "two ranks": (2, []),
    "critic and adapters": (1, ["critic={}", "algo={name: ppo, kl_coef: 0.1}", "lora={rank: 4}"]),
    "tensor parallel": (2, ["resources.generation.tensor=2"]),
    "over several steps": (
        2,
        ["rollout.partial_max_rounds=3", "rollout.partial_extra_prompts=8", "algo.rollout_is=tis"],
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(*case, id=name, marks=() if name == "two ranks" else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_rows_losses_and_weights_are_those_of_the_unfused_run(tmp_path, ranks, more):
    config = inline_config(tmp_path)
    finished(run_job("train", config, *settings_of(tmp_path, "fused"), *more, ranks=ranks))
    finished(run_job("train", config, *settings_of(tmp_path, "after"), *more, "dock.fuse=false", ranks=ranks))
    assert results_of(tmp_path / "fused") == results_of(tmp_path / "after")
    found = {(span.stage, span.rank) for span in inside_generation(tmp_path / "fused")}
    assert found >= {(name, rank) for name in ("reference", "old_logprobs") for rank in range(ranks)}
    assert inside_generation(tmp_path / "after") == []
    stages = [span.stage for span in read_timeline(tmp_path / "after" / "timeline").spans if span.step == 2]
    assert stages.index("generation") < stages.index("reward") < stages.index("reference")
    hidden = [sum(step["fusion/hidden_seconds/generation"] for step in metrics_of(tmp_path / name))
              for name in ("fused", "after")]  # fmt: skip
    # How much is hidden depends on how fast the machine is.
    assert hidden[0] >= hidden[1] == 0
    if "critic={}" not in more:
        # The other cases die and go on in test_environment.py.
        return
    # As if it had been killed in the second step.
    expected, folder = results_of(tmp_path / "fused"), tmp_path / "fused"
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    assert (
        "after step 1" in finished(run_job("train", config, *settings_of(tmp_path, "fused"), *more, ranks=ranks)).stdout
    )
    assert results_of(folder) == expected
