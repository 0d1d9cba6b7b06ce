"""Whole training jobs: the same on any number of ranks, repeatable, resumable, and read by transformers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spmdrl.observability.timeline import read_timeline
from tests.job.test_stopping import die_after_steps
from tests.support.jobs import (
    environment,
    finished,
    inline_config,
    job_command,
    metrics_of,
    run_job,
    summary_of,
    untimed,
    weights_digest,
)


@pytest.mark.ranks
@pytest.mark.parametrize("more", [[2], pytest.param([2, 4], marks=pytest.mark.slow)], ids=["two", "two and four"])
def test_one_rank_and_more_train_alike_on_the_same_rollouts(tmp_path, more):
    config, dump = inline_config(tmp_path), tmp_path / "rollouts"
    finished(run_job("train", config, f"run.dir={tmp_path / 'dump'}", f"debug.rollouts_to={dump}", "train.max_steps=2"))
    first = {}
    for ranks in (1, *more):
        folder = tmp_path / f"ranks_{ranks}"
        replay = f"debug.rollouts_from={dump}"
        finished(run_job("train", config, f"run.dir={folder}", replay, "train.max_steps=2", ranks=ranks))
        first[ranks] = metrics_of(folder)
    for ranks in more:
        for step in (0, 1):
            for name in ("loss", "grad_norm", "entropy"):
                expected = first[1][step][name]
                assert first[ranks][step][name] == pytest.approx(expected, rel=1e-5), (ranks, step, name)
            assert first[ranks][step]["reward"] == first[1][step]["reward"]
    assert all(abs(step["loss"]) > 1e-4 and step["grad_norm"] > 1e-2 for step in first[1]), "nothing was compared"


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["context=2", pytest.param("tensor=2 pipeline=2", marks=pytest.mark.slow)])
def test_every_axis_trains_as_one_rank_does_and_leaves_a_checkpoint_for_any_layout(tmp_path, layout):
    config, dump = inline_config(tmp_path), tmp_path / "rollouts"
    finished(run_job("train", config, f"run.dir={tmp_path / 'one'}", f"debug.rollouts_to={dump}", "train.max_steps=2"))
    settings = [f"resources.update.{degree}" for degree in layout.split()]
    ranks = 2 ** len(settings)
    folder = tmp_path / "spread"
    replay = [f"debug.rollouts_from={dump}", "checkpoint.interval=2"]
    finished(run_job("train", config, f"run.dir={folder}", *replay, "train.max_steps=2", *settings, ranks=ranks))
    expected, found = metrics_of(tmp_path / "one"), metrics_of(folder)
    for step in (0, 1):
        for name in ("loss", "grad_norm", "entropy"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-5), (step, name)
    # Generated anew, from weights that travel from the shards of each axis to whole ones, in another layout.
    resumed = finished(run_job("train", config, f"run.dir={folder}", "train.max_steps=3", "reshard.verify=true"))
    assert "resumed from" in resumed.stdout and metrics_of(folder)[-1]["step"] == 3


@pytest.mark.ranks
@pytest.mark.parametrize(("rounds", "launched"), [pytest.param(1, False, marks=pytest.mark.slow), (3, True)])
def test_a_run_killed_in_the_middle_of_a_step_ends_with_the_same_weights(tmp_path, rounds, launched):
    config = inline_config(tmp_path)
    settings = ["train.max_steps=9", "checkpoint.interval=2", "log.backends=[console,jsonl]"]
    settings.append(f"rollout.partial_max_rounds={rounds}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finished(run_job("train", config, f"run.dir={whole}", *settings, ranks=2))
    assert (metrics_of(whole)[6].get("dock/deferred", 0) > 0) == (rounds > 1)
    job = ("train", config, f"run.dir={killed}", *settings)
    if launched:
        # Under torchrun each rank hashes texts differently; ranks that are forked hash alike.
        kill_after_step(job_command(*job, ranks=2), killed, step=3)
    else:
        prepare = partial(die_after_steps, killed / "metrics.jsonl", 3)
        assert run_job(*job, ranks=2, prepare=prepare).returncode == -signal.SIGKILL
    assert len(metrics_of_started(killed)) < 9, "the job was done before it could be killed"
    resumed = finished(run_job("train", config, f"run.dir={killed}", *settings, ranks=2))
    assert "resumed from" in resumed.stdout
    assert [step["step"] for step in metrics_of(killed)] == list(range(1, 10))
    assert untimed(metrics_of(killed)) == untimed(metrics_of(whole))
    assert weights_digest(killed, 9) == weights_digest(whole, 9)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks_after", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_rollouts_that_were_kept_are_trained_on_after_a_crash(tmp_path, ranks_after):
    config, folder = inline_config(tmp_path), tmp_path / "run"
    settings = [f"run.dir={folder}", "checkpoint.interval=1", "checkpoint.keep_rollouts=true",
                "algo.kl_coef=0.1", "train.updates_per_step=2"]  # fmt: skip
    finished(run_job("train", config, *settings, "resources.generation.tensor=2", ranks=2))
    whole, digest = metrics_of(folder), weights_digest(folder, 3)
    stages = [span.stage for span in read_timeline(folder / "timeline").spans if (span.step, span.rank) == (3, 0)]
    waited = [name for name in stages if name in ("reference", "old_logprobs", "reward", "keep_rollouts", "advantage")]
    assert waited == ["reference", "old_logprobs", "reward", "keep_rollouts", "advantage"]
    # As if the job had died in the last update.
    shutil.rmtree(folder / "checkpoints" / "step_000003")
    resumed = finished(run_job("train", config, *settings, ranks=ranks_after))
    assert "resumed from" in resumed.stdout and "step 3 goes on with the rollouts in" in resumed.stdout
    again = metrics_of(folder)
    (before,), (after,) = untimed(whole[-1:]), untimed(again[-1:])
    # Between two ranks more is moved, and measured.
    of_ranks = ("perf/", "reshard/") if ranks_after == 2 else ("perf/", "reshard/", "dock/", "update/")
    assert [name for name in before.keys() - after.keys() if not name.startswith(of_ranks)] == []
    of_rows = [name for name in before if name.startswith(("completions/", "generation/", "reward", "mismatch/"))]
    assert len(of_rows) > 8 and {name: after[name] for name in of_rows} == {name: before[name] for name in of_rows}
    for name in ("loss", "grad_norm", "reward"):
        assert again[-1][name] == pytest.approx(whole[-1][name], rel=1e-5)
    if ranks_after == 2:
        assert weights_digest(folder, 3) == digest


def kill_after_step(command: list[str], folder: Path, *, step: int) -> None:
    """Start a job in a session of its own, and kill every process of it once `step` is logged."""
    job = subprocess.Popen(
        command, env=environment(), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    try:
        while not (folder / "metrics.jsonl").exists() or len(metrics_of_started(folder)) < step:
            assert job.poll() is None and time.monotonic() < deadline, "the job ended before it could be killed"
            time.sleep(0.01)
    finally:
        kill_session(job.pid)
        job.wait()


def kill_session(leader: int) -> None:
    """SIGKILL to every process whose session is the job's: torchrun gives its ranks process groups of their own."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    os.kill(int(entry.name), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


def metrics_of_started(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


def test_a_run_with_everything_on_ends_with_a_model_that_transformers_opens(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "run"
    job = finished(
        run_job(
            "train", inline_config(tmp_path), f"run.dir={folder}", "sft.max_steps=4", "sft.rows_per_step=16",
            "sft.optim.lr=1e-3", "algo.kl_coef=0.01", "train.updates_per_step=2", "train.epochs_per_step=2",
            "data.eval=synthetic://addition?low=0&high=9&count=5&split=test", "eval.interval=2",
            "eval.before_train=true", "reshard.verify=true",
        )
    )  # fmt: skip
    assert "held-out after step 0: mean reward" in job.stdout
    steps = metrics_of(folder)
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert {"kl", "mismatch/abs_mean", "clip_ratio/high_mean", "rewards/share_of_digits/mean"} <= steps[1].keys()
    assert ["eval/accuracy" in step for step in steps] == [True, False, True, True]
    summary = summary_of(folder)
    assert summary["verdict"] == "done" and summary["steps"] == 3
    for name in ("reward_first", "reward_last", "accuracy_before", "accuracy_after", "seconds"):
        assert isinstance(summary[name], float), name
    model = AutoModelForCausalLM.from_pretrained(summary["checkpoint"])
    stored = load_file(Path(summary["checkpoint"]) / "model.safetensors")
    assert torch.equal(model.model.norm.weight, stored["model.norm.weight"])
    assert AutoTokenizer.from_pretrained(summary["checkpoint"])("1+2=")["input_ids"]
    assert summary["sample_flow"]["num_response_items"] == 6
    assert steps[1]["dock/put_bytes/ref_logprobs/process"] > 0
    report = Path(summary["report"]).read_text()
    assert "Eq. 4: through each warehouse" in report
    assert "<svg" in report and "http://" not in report.replace("http://www.w3.org", "")


def test_a_checkpoint_is_evaluated_and_answers_prompts(tmp_path):
    config, run = inline_config(tmp_path), tmp_path / "run"
    finished(run_job("sft", config, f"run.dir={run}", "sft.max_steps=2", "sft.rows_per_step=8"))
    held_out = "data.eval=synthetic://addition?low=0&high=9&count=5&split=test"
    from_run, judged = [f"model.path={run}", "model.make=null", held_out], "reward.functions=[exact]"
    job = finished(run_job("eval", config, *from_run, judged, f"run.dir={tmp_path / 'eval'}", "eval.num_samples=4"))
    assert "pass@4" in job.stdout and "avg@4" in job.stdout
    [answers] = (tmp_path / "eval").glob("eval/run_step_000002_*/eval.jsonl")
    assert len(answers.read_text().splitlines()) == 5 * 4
    job = finished(run_job("generate", config, *from_run, f"run.dir={tmp_path / 'answers'}"))
    assert ['"response"' in line for line in job.stdout.splitlines()] == [True] * 5
    assert "config: not read by generate: data.train, rollout.prompts_per_step, rollout.num_generations" in job.stderr
    assert "generated 5/5 rows | " in job.stderr


def test_leaving_out_rows_without_advantage_gives_the_same_weights(tmp_path):
    config, dump = inline_config(tmp_path), tmp_path / "rollouts"
    reward = tmp_path / "first_digit.py"
    reward.write_text("def fn(completions, **columns):\n    return [float(text[:1] < '5') for text in completions]\n")
    settings = [f"reward.functions=[{reward}:fn]", "rollout.num_generations=2", "train.max_steps=2"]
    finished(run_job("train", config, *settings, f"run.dir={tmp_path / 'skip'}", f"debug.rollouts_to={dump}"))
    replay = [f"debug.rollouts_from={dump}", "train.skip_zero_advantage=false"]
    finished(run_job("train", config, *settings, f"run.dir={tmp_path / 'all'}", *replay))
    skipped, whole = metrics_of(tmp_path / "skip"), metrics_of(tmp_path / "all")
    assert 0 < skipped[0]["update/rows"] < whole[0]["update/rows"] == 16
    for name in ("loss", "grad_norm"):
        assert skipped[1][name] == pytest.approx(whole[1][name], rel=1e-5)
