"""Whole jobs and their folder: one job at a time, and a start that is refused touches nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.support.jobs import begin_job, finished, inline_config, run_job, summary_of
from tests.support.ranks import end

from spmdrl.engines.training.checkpoints.manifest import Manifest, describe_file, read_manifest
from spmdrl.job.run import run_folder
from spmdrl.runtime.supervision.holder import held

SLOW_REWARD = """
import time

def fn(completions, **columns):
    time.sleep(4)
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A finished run of 3 steps with a checkpoint at each of the last two, and its config."""
    folder = tmp_path_factory.mktemp("finished")
    config = inline_config(folder)
    finished(run_job("train", config, f"run.dir={folder / 'run'}", "checkpoint.interval=1"))
    return config, folder / "run"


@pytest.fixture
def run_copy(finished_run, tmp_path):
    shutil.copytree(finished_run[1], tmp_path / "run")
    return finished_run[0], tmp_path / "run"


def digests(folder: Path) -> dict[str, str]:
    """Of all files but the lock's."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def refused(job: subprocess.CompletedProcess[str]) -> str:
    assert job.returncode == 2, job.stdout + job.stderr
    assert "Traceback" not in job.stderr
    assert job.stderr.count("spmdrl: ") == 1, job.stderr
    return job.stderr


def wait_less() -> None:
    """Take a holder that is still there at the second look for one that stays."""
    run_folder.WAIT_SECONDS = 0.2


REFUSED = [
    pytest.param(["seed=1"], "seed was 0 and is 1", id="another seed"),
    pytest.param(["model.make.hidden_size=64"], "hidden_size is 32, not 64", id="another model made"),
    pytest.param(["resume=2", "rollout.num_generations=2"], "num_generations was 4 and is 2", id="another size"),
    pytest.param(["resume=1"], "steps that can: [2, 3]", id="no such checkpoint"),
    pytest.param(["resume=alway"], "auto goes on from the newest checkpoint", id="a misspelt word"),
    pytest.param(["resources.device=cuda"], "resources.device is 'cuda'", id="no such device"),
    pytest.param(["train.max_steps=many"], "train.max_steps", id="a broken config"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_a_start_that_is_refused_touches_no_file_of_a_finished_run(run_copy, settings, words):
    config, folder = run_copy
    before = digests(folder)
    assert words in refused(run_job("train", config, f"run.dir={folder}", *settings))
    assert digests(folder) == before


def test_a_checkpoint_of_another_model_is_refused_with_the_sizes_that_differ(run_copy, tmp_path):
    config, folder = run_copy
    other = tmp_path / "other"
    finished(run_job("train", config, f"run.dir={other}", "model.make.hidden_size=64", "train.max_steps=1"))
    before = digests(folder)
    job = run_job("train", config, f"run.dir={folder}", "model.make=null", f"model.path={other / 'initial_model'}")
    assert "the model's hidden_size was 32 and is 64" in refused(job)
    assert digests(folder) == before


def test_a_checkpoint_whose_tensors_are_broken_inside_right_digests_is_passed_over(run_copy):
    config, folder = run_copy
    newest = folder / "checkpoints" / "step_000003"
    rewrite(newest, "trainer/shards_00000.safetensors", b"\x08\0\0\0\0\0\0\0{} abcd")
    job = finished(run_job("train", config, f"run.dir={folder}", "checkpoint.interval=1"))
    assert "damaged checkpoint passed over" in job.stdout and "step_000003" in job.stdout
    assert "step_000002 after step 2" in job.stdout and "step 3/3" in job.stdout


def test_settings_that_change_at_resume_are_said_and_both_configurations_kept(run_copy):
    config, folder = run_copy
    settings = ["checkpoint.interval=1", "train.max_steps=4", "optim.lr=2e-3"]
    job = finished(run_job("train", config, f"run.dir={folder}", *settings))
    assert "optim.lr was 0.001 until step 3 and is 0.002 from here" in job.stdout
    assert "run.dir was" not in job.stdout
    assert "lr: 0.001 " in (folder / "config.resolved.step_000003.yaml").read_text()
    assert "lr: 0.002 " in (folder / "config.resolved.yaml").read_text()
    again = finished(run_job("train", config, f"run.dir={folder}", *settings))
    assert f"{folder} holds a finished run, and nothing is trained; go on with a higher train.max_steps" in again.stdout
    assert " was " not in again.stdout
    kept = (folder / "config.resolved.yaml").read_bytes()
    other = finished(run_job("train", config, f"run.dir={folder}", *settings[:2], "optim.lr=5e-3"))
    assert "optim.lr was 0.002 in all of the run: 0.005 has no effect" in other.stdout
    assert "from here" not in other.stdout and (folder / "config.resolved.yaml").read_bytes() == kept
    assert "after step 3: optim.lr 0.001 → 0.002" in (folder / "report.html").read_text()


def test_a_run_that_was_killed_is_said_to_have_been(run_copy):
    config, folder = run_copy
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"verdict": "running"}))
    report = run_job("report", folder)
    assert report.returncode == 0 and "killed" in (folder / "report.html").read_text()
    job = finished(run_job("train", config, f"run.dir={folder}", "checkpoint.interval=1"))
    assert "the previous job ended without a message after step 3 at 20" in job.stdout
    assert summary_of(folder)["verdict"] == "done"


@pytest.mark.ranks
def test_a_job_in_a_folder_that_another_process_holds_is_refused_on_all_its_ranks(tmp_path):
    folder = tmp_path / "run"
    with held(folder):
        job = run_job("train", inline_config(tmp_path), f"run.dir={folder}", ranks=2, prepare=wait_less)
        error = refused(job)
    assert f"in use by process {os.getpid()} on " in error and "set run.dir to another" in error


@pytest.mark.ranks
@pytest.mark.slow
def test_a_second_job_in_a_folder_is_refused_and_does_not_disturb_the_first(tmp_path):
    config, folder = inline_config(tmp_path), tmp_path / "run"
    reward = tmp_path / "slow.py"
    reward.write_text(SLOW_REWARD)
    settings = [f"run.dir={folder}", f"reward.functions=[{reward}:fn]", "train.max_steps=50"]
    first = begin_job("train", config, *settings)
    try:
        deadline = time.monotonic() + 90
        while not (folder / "metrics.jsonl").exists():
            assert first.exitcode is None and time.monotonic() < deadline
            time.sleep(0.05)
        before = (folder / "metrics.jsonl").read_bytes()
        second = run_job("train", config, f"run.dir={folder}", ranks=2)
        assert f"in use by process {first.pid} on " in second.stderr and "set run.dir to another" in second.stderr
        assert second.returncode == 2 and "Traceback" not in second.stderr
        assert first.exitcode is None and (folder / "metrics.jsonl").read_bytes().startswith(before)
        # Reading is free.
        assert run_job("report", folder).returncode == 0
        assert "still running" in (folder / "report.html").read_text()
    finally:
        end(first, grace_seconds=0.0)


def test_a_run_is_evaluated_by_its_newest_sound_model(run_copy, tmp_path):
    config, folder = run_copy
    for step in (3, 2):
        weights = folder / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4] + b"flip")
        held_out = "data.eval=synthetic://addition?low=0&high=9&count=3&split=test"
        asked = [f"run.dir={tmp_path / 'eval'}", "model.make=null", f"model.path={folder}", held_out]
        job = run_job("eval", config, *asked)
        assert "damaged checkpoint passed over" in job.stderr and f"step_{step:06d}" in job.stderr
        if step == 3:
            [summary] = (tmp_path / "eval").glob("eval/*_step_000002_*/eval.summary.json")
            assert json.loads(summary.read_text())
        else:
            assert f"every checkpoint of {folder} is damaged" in job.stderr and job.returncode == 2


@pytest.mark.parametrize("verb", ["eval", pytest.param("generate", marks=pytest.mark.slow)])
def test_two_jobs_that_write_the_same_answers_take_turns(run_copy, verb):
    config, folder = run_copy
    held_out = "data.eval=synthetic://addition?low=0&high=9&count=3&split=test"
    settings = [f"run.dir={folder}", held_out]
    with held(folder, f"{verb}.lock"):
        before = digests(folder)
        assert "is in use by process" in refused(run_job(verb, config, *settings, prepare=wait_less))
        assert digests(folder) == before
    # Training in the same folder is no hindrance, as it writes other files.
    with held(folder):
        finished(run_job(verb, config, *settings))


@pytest.mark.parametrize(
    "kind", ["a flipped bit", "broken inside right digests", pytest.param("another run's", marks=pytest.mark.slow)]
)
def test_kept_rollouts_that_are_damaged_are_generated_anew_or_refused(tmp_path, kind):
    config, folder = inline_config(tmp_path), tmp_path / "run"
    settings = [f"run.dir={folder}", "checkpoint.interval=1", "checkpoint.keep_rollouts=true"]
    finished(run_job("train", config, *settings, "train.max_steps=2"))
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    kept = folder / "rollouts" / "step_000002"
    if kind == "a flipped bit":
        path = kept / "node_0000.safetensors"
        path.write_bytes(path.read_bytes()[:-4] + b"flip")
    elif kind == "another run's":
        rewrite(kept, "identity.json", json.dumps({"seed": 5}).encode())
    else:
        rewrite(kept, "node_0000.safetensors", b"\x08\0\0\0\0\0\0\0{}      ")
    job = run_job("train", config, *settings, "train.max_steps=2")
    assert "Traceback" not in job.stderr
    if kind == "broken inside right digests":
        assert job.returncode == 2 and "delete that folder" in job.stderr
    else:
        assert job.returncode == 0 and "are not taken up: " in job.stdout


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """Give a file of a checkpoint other content, and its manifest the digest of that."""
    (folder / name).write_bytes(content)
    manifest = read_manifest(folder)
    files = {**manifest.files, name: describe_file(folder / name)}
    (folder / "manifest.json").write_text(Manifest(manifest.step, files).to_json())


@pytest.mark.parametrize("kind", ["a file", "below a file", "in a folder that nothing can be made in"])
def test_a_folder_that_can_not_be_written_to_is_refused_by_its_key(tmp_path, kind):
    (tmp_path / "file").write_text("")
    folder = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "run"}.get(kind, Path("/proc/run"))
    error = refused(run_job("train", inline_config(tmp_path), f"run.dir={folder}"))
    assert f"run.dir makes {folder} the run's folder, but it can't be written to" in error
