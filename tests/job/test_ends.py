"""What exit code, verdict and line a run ends with, by what happened to it."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path

import pytest
from tests.job.test_stopping import SUPERVISED, ask_after_steps
from tests.support.jobs import inline_config, run_job, summary_of

from spmdrl.job.run.outcome import end_of

NEWEST = Path("runs/a/checkpoints/step_000010")
FULL = "the checkpoint of step 11, the last one, could not be written (disk full)"
FACTS = {
    "done": {"place": "step 20 of 20", "newest": NEWEST},
    "done, not saved": {"place": "step 20 of 20", "unsaved": FULL},
    "asked, nothing to save": {"place": "step 1 of 20", "asked": "SIGTERM"},
    "asked, saved": {"place": "step 11 of 20", "asked": "SIGUSR1 (rank 3)", "newest": NEWEST},
    "asked, not saved": {"place": "step 12 of 20", "asked": "Slurm's time limit", "unsaved": FULL, "newest": NEWEST},
    "Ctrl-C, saved": {"place": "step 11 of 20", "asked": "Ctrl-C (rank 0)", "newest": NEWEST},
    "Ctrl-C, not saved": {"place": "step 12 of 20", "asked": "Ctrl-C", "unsaved": FULL},
    "failed": {"place": "step 11 of 20", "failure": "rank 1: RuntimeError: x", "newest": NEWEST},
    "failed, then asked by the launcher": {
        "place": "step 11 of 20",
        "asked": "SIGTERM",
        "failure": "rank 1: x",
        "unsaved": FULL,
    },
}
ENDS = {
    "done": (0, "done", ""),
    "done, not saved": (74, "unsaved", f"finished in step 20 of 20, but {FULL}; the same command starts anew"),
    "asked, nothing to save": (
        75, "stopped", "stopped by SIGTERM in step 1 of 20, before a checkpoint; the same command starts anew"),
    "asked, saved": (
        75, "stopped", f"stopped by SIGUSR1 (rank 3) in step 11 of 20; the same command goes on from {NEWEST}"),
    "asked, not saved": (
        74, "unsaved",
        f"stopped by Slurm's time limit in step 12 of 20, but {FULL}; the same command goes on from {NEWEST}"),
    "Ctrl-C, saved": (130, "interrupted", f"interrupted in step 11 of 20; the same command goes on from {NEWEST}"),
    "Ctrl-C, not saved": (74, "unsaved", f"interrupted in step 12 of 20, but {FULL}; the same command starts anew"),
    "failed": (1, "failed", "rank 1: RuntimeError: x"),
    "failed, then asked by the launcher": (1, "failed", "rank 1: x"),
}  # fmt: skip


@pytest.mark.parametrize("what", FACTS)
def test_the_first_of_failure_lost_work_and_request_decides_the_end(what):
    end = end_of(**FACTS[what])
    assert (end.code, end.verdict, end.line) == ENDS[what]


def fill_the_disk() -> None:
    """Let no file of this process be as long as a checkpoint, but as long as a summary."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def fill_and_ask(metrics: Path) -> None:
    fill_the_disk()
    ask_after_steps(metrics, 2)


VERBS = {
    "train": ("train.max_steps=1",),
    "sft": (*SUPERVISED["sft"][:-1], "sft.max_steps=2"),
    "preferences": (*SUPERVISED["preferences"], "preferences.max_steps=2"),
    "reward-model": (*SUPERVISED["reward-model"], "reward_model.max_steps=2"),
}


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=() if verb == "sft" else pytest.mark.slow) for verb in VERBS]
)
def test_a_run_that_could_not_be_saved_ends_with_a_code_of_its_own_and_names_no_next_step(verb, tmp_path):
    job = run_job(verb, inline_config(tmp_path), f"run.dir={tmp_path / 'run'}", *VERBS[verb], prepare=fill_the_disk)
    assert job.returncode == 74, job.stdout + job.stderr
    assert summary_of(tmp_path / "run")["verdict"] == "unsaved"
    line = job.stderr.splitlines()[-1]
    assert line.startswith("spmdrl: finished in step") and "could not be written" in line
    assert summary_of(tmp_path / "run")["error"] == line.removeprefix("spmdrl: ")
    assert "\n  next " not in job.stdout and not (tmp_path / "run" / ".summary.room").exists()


def test_a_run_that_is_stopped_and_can_not_save_is_not_to_be_started_again(tmp_path):
    ask = partial(fill_and_ask, tmp_path / "run" / "metrics.jsonl")
    options = (f"run.dir={tmp_path / 'run'}", "sft.max_steps=100000")
    job = run_job("sft", inline_config(tmp_path), *options, prepare=ask)
    assert job.returncode == 74, job.stdout + job.stderr
    assert summary_of(tmp_path / "run")["verdict"] == "unsaved"
    assert "stopped by SIGUSR1 in step" in job.stderr and "could not be written" in job.stderr
