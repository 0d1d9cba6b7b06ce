"""W&B and TensorBoard get the configuration, labels and samples of a run beside its numbers."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.nouns.settings.log_config import LogConfig
from spmdrl.observability.log import MetricsLog, SampleRecord, TrackedRun
from tests.support.jobs import ROOT, environment, finished, metrics_of, run_job, tiny_config

RUN = TrackedRun("run 7", "sums", lambda: {"optim": {"lr": 1e-3}, "seed": 0})
HOSTILE = "12\x1b[2J </script> ![x](http://x/y.png)\n# head"


def _sample(step: int, row: int) -> SampleRecord:
    return SampleRecord(
        step=step, row=row, prompt="3+4=", response=HOSTILE, answer="7", reward=1.0, parts={}, verdict="scored",
        advantage=0.5, mismatch=None, version=0, tokens=[],
    )  # fmt: skip


def _write(folder: Path, backend: str) -> None:
    log = MetricsLog(folder, [backend], run=RUN)
    log.truncate_after(-1)
    for step in (1, 2):
        log.write_samples(step, [_sample(step, row) for row in (0, 5)])
        log.write(step, {"reward": step / 2, "rewards/exact/mean": float("nan")})
    log.close()


def test_tensorboard_has_scalars_config_labels_and_samples(tmp_path: Path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _write(tmp_path, "tensorboard")
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()

    def texts(tag: str) -> list[tuple[int, str]]:
        return [(one.step, one.tensor_proto.string_val[0].decode()) for one in events.Tensors(f"{tag}/text_summary")]

    assert [(one.step, one.value) for one in events.Scalars("reward")] == [(1, 0.5), (2, 1.0)]
    [(_, config)], [(_, labels)] = texts("config"), texts("run")
    assert json.loads(config) == RUN.config()
    assert json.loads(labels) == {"name": "run 7", "project": "sums"}
    assert [step for step, _ in texts("samples/0")] == [1, 2] and "row: 5" in texts("samples/1")[0][1]
    # Every line is indented: markdown of a policy stays text.
    assert all(line.startswith("    ") for line in texts("samples/0")[0][1].splitlines())
    assert "\x1b" not in texts("samples/0")[0][1] and "\\x1b[2J" in texts("samples/0")[0][1]


def with_wandb_standin() -> None:
    sys.path.insert(0, str(ROOT / "tests/support/wandb_standin"))


def test_a_job_sends_config_labels_and_samples_to_wandb_and_goes_on_in_the_same_run(tmp_path: Path, monkeypatch):
    calls = tmp_path / "calls.jsonl"
    monkeypatch.setenv("WANDB_STANDIN_FILE", str(calls))
    labels = ["log.project=sums"]
    settings = ["log.backends=[jsonl,wandb]", *labels, f"run.dir={tmp_path / 'run 7'}", "checkpoint.interval=1"]
    for num_steps in (2, 3):
        steps = f"train.max_steps={num_steps}"
        job = run_job("train", tiny_config(tmp_path), *settings, steps, prepare=with_wandb_standin)
        assert "wandb fails" not in finished(job).stderr
    made = [json.loads(line) for line in calls.read_text().splitlines()]
    first, second = [line["init"] for line in made if "init" in line]
    assert first["id"] == second["id"] and (first["project"], first["name"]) == ("sums", "run 7")
    assert first["config"]["optim"]["lr"] == 1e-3 and second["config"]["train"]["max_steps"] == 3
    logs = [line for line in made if "log" in line]
    assert [line["step"] for line in logs if "reward" in line["log"]] == [1, 2, 3]
    tables = {line["step"]: line["log"]["samples"] for line in logs if "samples" in line["log"]}
    assert set(tables) == {1} and tables[1]["columns"][:4] == ["step", "row", "prompt", "response"]
    assert len(tables[1]["data"]) == 8 and made[-1] == {"finish": True}


@pytest.mark.slow
def test_the_real_wandb_takes_them_offline(tmp_path: Path):
    pytest.importorskip("wandb")
    code = (
        "from tests.observability.test_trackers import _write; from pathlib import Path; import sys;"
        "_write(Path(sys.argv[1]), 'wandb')"
    )
    paths = f"{ROOT / 'src'}:{ROOT}"
    env = environment(WANDB_MODE="offline", WANDB_SILENT="true", PYTHONPATH=paths, HOME=str(tmp_path))
    job = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, env=env, timeout=120,
        cwd=tmp_path, check=False,
    )  # fmt: skip
    assert job.returncode == 0 and "fails" not in job.stderr, job.stderr[-2000:]
    [kept] = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = kept.read_bytes()
    assert all(word in content for word in (b"sums", b"reward", b"samples"))


COUNTS = """
import json
from pathlib import Path

class Counts:
    def start(self, config):
        self.file = Path(config["run"]["dir"]).with_suffix(".counts").open("a")
        self.write(["start", config["run"]["name"], config["log"]["project"], config["optim"]["lr"]])

    def log(self, metrics, step):
        self.write(["log", step, sorted(metrics)[0], metrics["reward"]])
        assert step != 2, "not this one"

    def finish(self):
        self.write(["finish"])

    def write(self, line):
        print(json.dumps(line), file=self.file, flush=True)
"""


def test_a_class_of_the_users_gets_config_and_metrics_by_three_methods(tmp_path: Path):
    (tmp_path / "mine.py").write_text(COUNTS)
    settings = [f"log.backends=[jsonl, '{tmp_path}/mine.py:Counts']", "log.project=sums", f"run.dir={tmp_path / 'run'}"]
    job = finished(run_job("train", tiny_config(tmp_path), *settings))
    start, *logs, end = [json.loads(line) for line in (tmp_path / "run.counts").read_text().splitlines()]
    assert start == ["start", "run", "sums", 1e-3] and end == ["finish"]
    rewards = [metrics["reward"] for metrics in metrics_of(tmp_path / "run")]
    assert [(line[1], line[3]) for line in logs] == list(enumerate(rewards, 1))
    assert "mine.py:Counts fails (AssertionError: not this one); the run goes on without it" in job.stderr
    refused = run_job("train", tiny_config(tmp_path), f"log.backends=['{tmp_path}/mine.py:Count']")
    assert refused.returncode == 2 and "has no class 'Count'; did you mean 'Counts'?" in refused.stderr


def written_by(backend: str, folder: Path, **variables: str) -> None:
    code = (
        "from tests.observability.test_trackers import _write; from pathlib import Path; import sys;"
        f"_write(Path(sys.argv[1]), '{backend}')"
    )
    paths = os.pathsep.join([f"{ROOT / 'src'}", f"{ROOT}", *filter(None, [os.environ.get("PYTHONPATH")])])
    env = environment(PYTHONPATH=paths, HOME=str(folder), **variables)
    (folder / "run").mkdir(exist_ok=True)
    job = subprocess.run(
        [sys.executable, "-c", code, str(folder / "run")], capture_output=True, text=True, env=env, timeout=300,
        cwd=folder, check=False,
    )  # fmt: skip
    assert job.returncode == 0 and "fails" not in job.stderr, job.stderr[-2000:]


@pytest.mark.slow
def test_the_real_mlflow_goes_on_in_the_same_run(tmp_path: Path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for _ in range(2):
        written_by("mlflow", tmp_path, MLFLOW_TRACKING_URI=store)
    client = mlflow.MlflowClient(tracking_uri=store)
    [run] = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert run.info.run_name == "run 7" and run.data.params["optim.lr"] == "0.001"
    assert {(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "reward")} == {(1, 0.5), (2, 1)}
    assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_the_real_trackio_takes_them(tmp_path: Path):
    pytest.importorskip("trackio")
    written_by("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    [kept] = (tmp_path / "trackio").glob("sums*.db")
    rows = sqlite3.connect(kept).execute("select step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(metrics)["reward"]) for step, metrics in rows] == [(1, 0.5), (2, 1.0)]


def test_settings_of_services_are_checked():
    with pytest.raises(ValueError, match="log.project is empty"):
        LogConfig(project=" ")
