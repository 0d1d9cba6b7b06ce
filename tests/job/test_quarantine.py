"""A prompt that costs two processes of its reward is never tried a third time, on any rank or after a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.jobs import finished, metrics_of, run_job, tiny_config

REWARD = """
import os, signal, time
from pathlib import Path

def wedged(prompts, completions, **columns):
    if prompts[0] == "3+3=":
        with open(Path(__file__).with_name("wedged"), "a") as file:
            file.write("call\\n")
        COST
    return [float(len(text)) for text in completions]
"""


def wedged_so_far(folder: Path) -> int:
    return len((folder / "wedged").read_text().splitlines())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "cost", "verdict", "reason"),
    [
        (2, "time.sleep(60)", "timed_out", "reward.timeout_seconds"),
        (1, "os.kill(os.getpid(), signal.SIGKILL)", "crashed", "SIGKILL"),
    ],
    ids=["wedges on one of two ranks", "kills"],
)
def test_a_prompt_that_costs_two_processes_is_put_in_quarantine(tmp_path, ranks, cost, verdict, reason):
    config = tiny_config(tmp_path)
    (tmp_path / "wedge.py").write_text(REWARD.replace("COST", cost))
    rows = [{"id": f"row {n}", "prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [
        f"run.dir={tmp_path / 'run'}", f"data.train={tmp_path / 'rows.jsonl'}", "rollout.prompts_per_step=4",
        f"reward.functions=[{tmp_path / 'wedge.py'}:wedged]", "reward.timeout_seconds=0.5", "reward.max_error_rate=1",
        "reward.call_level=group", "checkpoint.interval=1",
    ]  # fmt: skip
    finished(run_job("train", config, *settings, "train.max_steps=1", ranks=ranks))
    assert wedged_so_far(tmp_path) == 1
    # A strike of before a restart counts.
    job = finished(run_job("train", config, *settings, "train.max_steps=3", ranks=ranks))
    assert wedged_so_far(tmp_path) == 2 and "prompt row 3 is in quarantine" in job.stdout
    finished(run_job("train", config, *settings, "train.max_steps=4", ranks=ranks))
    assert wedged_so_far(tmp_path) == 2, "nor after a restart"
    steps = metrics_of(tmp_path / "run")
    assert [step.get(f"reward/errors/{verdict}") for step in steps] == [4, 4, None, None]
    assert [step.get("reward/quarantined") for step in steps] == [None, None, 4, 4]
    lines = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["step"], line["quarantined"]) for line in lines] == [(1, False), (2, True)]
    assert all(line["prompt"] == "row 3" and line["text"] == "3+3=" for line in lines)
    assert reason in lines[0]["reason"], lines[0]


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "hangs"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_a_prompt_that_hangs_the_job_twice_does_not_a_third_time(tmp_path: Path, ranks: int, hangs: int) -> None:
    config = tiny_config(tmp_path)
    (tmp_path / "wedge.py").write_text(REWARD.replace("COST", "time.sleep(600)"))
    rows = [{"id": f"row {n}", "prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # The watchdog is quicker than the reward's own timeout.
    settings = [
        f"run.dir={tmp_path / 'run'}", f"data.train={tmp_path / 'rows.jsonl'}", "rollout.prompts_per_step=4",
        f"reward.functions=[{tmp_path / 'wedge.py'}:wedged]", "reward.timeout_seconds=600", "reward.max_error_rate=1",
        "reward.call_level=group", "reward.workers=1", "resources.stage_timeout_seconds=3", "train.max_steps=2",
    ]  # fmt: skip
    for ended in range(1, 1 + hangs):
        job = run_job("train", config, *settings, ranks=ranks)
        assert job.returncode != 0 and "reward calls" in job.stderr, job.stdout + job.stderr
        assert wedged_so_far(tmp_path) == ended
    if hangs == 1:
        strikes = tmp_path / "run" / "quarantine.jsonl"
        strikes.write_text(2 * strikes.read_text())
    job = finished(run_job("train", config, *settings, ranks=ranks))
    assert wedged_so_far(tmp_path) == hangs and "prompt row 3 is in quarantine" in job.stdout
    assert [step.get("reward/quarantined") for step in metrics_of(tmp_path / "run")] == [4, 4]
    lines = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["step"], line["ended_job"]) for line in lines] == [("row 3", 1, True)] * 2
    assert all("waits for" in line["reason"] for line in lines), lines
