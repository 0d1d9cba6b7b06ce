"""The verb `replay`: rows of a run again in one process, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from random import Random

import pytest
from markupsafe import escape

from spmdrl.cli.command_line import main
from tests.support.jobs import ROOT, environment, finished, inline_config, run_job

STEPS = ("train.max_steps=4", "checkpoint.interval=2", "checkpoint.keep_last=9")
THE_SAME = (
    "the same to the bit as the run recorded: number of tokens, tokens, generator's log-probs, reward, advantages, "
    "trainer's log-probs, loss terms"
)


@pytest.mark.ranks
def test_rows_of_two_ranks_come_again_to_the_bit_and_a_changed_setting_shows(tmp_path):
    config, run = inline_config(tmp_path), tmp_path / "run"
    finished(run_job("train", config, *STEPS, f"run.dir={run}", ranks=2))
    rows = [f"--row={row}" for row in range(0, 32, 3)]
    report = tmp_path / "rows.json"
    again = finished(run_job("replay", run, "--step=3", *rows, f"--json={report}"))
    assert again.stdout.count(THE_SAME) == len(rows), again.stdout
    written = json.loads(report.read_text())["rows"]
    assert [row["row"] for row in written] == list(range(0, 32, 3))
    for row in written:
        # With one update per step the ratio is 1, and the loss is its own gradient.
        assert [token["loss"] for token in row["tokens"]] == pytest.approx([t["gradient"] for t in row["tokens"]])
        assert len(row["group_rewards"]) == 4 and row["group_rewards"][str(row["row"])] == row["reward"]
    page = (run / "report_step_000003.html").read_text()
    assert page.index("<h2>Step 3 again</h2>") < page.index("<h2>Curves</h2>") and page.count(escape(THE_SAME)) == len(
        rows
    )
    assert f"<td>{written[1]['tokens'][0]['generator']:.7g}</td>" in page
    warmer = run_job("replay", run, "--step=3", *rows, "rollout.temperature=1.5")
    assert warmer.returncode == 1 and "DIFFERS from what the run recorded: " in warmer.stdout
    refused = run_job("replay", run, "--step=4", "--row=0")
    assert refused.returncode == 2
    assert "step 4 can't be replayed to the bit" in refused.stderr and "steps that can be: 3, 5" in refused.stderr


@pytest.mark.ranks
def test_rows_with_turns_come_again_behind_steps_that_are_done_again(tmp_path):
    config, run = inline_config(tmp_path), tmp_path / "run"
    turns = ("environment.function=calculator", 'rollout.stop=["="]')
    finished(run_job("train", config, *STEPS, *turns, "algo.name=ppo", "critic={}", f"run.dir={run}"))
    again = finished(run_job("replay", run, "--step=4", *[f"--row={row}" for row in range(8)]))
    assert again.stdout.count("the same to the bit as the run recorded") == 8, again.stdout
    assert "steps 3 to 4 in one process" in again.stderr


RUNS = {
    "two ranks": (2, "checkpoint.interval=1"),
    "turns and a critic": (1, "environment.function=calculator", 'rollout.stop=["="]', "algo.name=ppo", "critic={}"),
    "two updates per step": (1, "train.epochs_per_step=2", "rollout.temperature=0.7"),
}


@pytest.mark.ranks
@pytest.mark.slow
def test_fifty_random_rows_of_three_runs_come_again_to_the_bit(tmp_path):
    random, num_same = Random(0), 0
    for number, (ranks, *settings) in enumerate(RUNS.values()):
        run = tmp_path / f"run_{number}"
        finished(run_job("train", inline_config(tmp_path), *STEPS, *settings, f"run.dir={run}", ranks=ranks))
        # Right after a checkpoint, and a step later.
        chosen = random.sample([(step, row) for step in (3, 4) for row in range(32)], 16 + (number > 0))
        for step in sorted({step for step, _ in chosen}):
            rows = [f"--row={row}" for of_step, row in chosen if of_step == step]
            again = finished(run_job("replay", run, f"--step={step}", *rows))
            num_same += again.stdout.count("the same to the bit as the run recorded")
    assert num_same == 50


@pytest.mark.slow
def test_pdb_stops_before_generation_reward_and_loss(tmp_path):
    config, run = inline_config(tmp_path), tmp_path / "run"
    finished(run_job("train", config, "train.max_steps=1", f"run.dir={run}"))
    command = [sys.executable, "-m", "spmdrl", "replay", str(run), "--step", "1", "--row", "5", "--pdb"]
    job = subprocess.run(
        command, input="c\np 'answers: %d' % len(call.completions)\nc\np tuple(terms.logprobs_R.shape)\nc\n",
        capture_output=True, text=True, timeout=100, env=environment(), cwd=ROOT, check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr[-2000:]
    stops = [line for line in job.stdout.splitlines() if "--- before" in line]
    assert ["generation" in stops[0], "the reward" in stops[1], "the loss" in stops[2]] == [True] * 3
    assert "answers: 1" in job.stdout and THE_SAME in job.stdout


def test_what_cannot_be_replayed_is_refused_in_one_line(tmp_path, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", str(tmp_path), "--step", "3", "--row", "0"]) == 2
    assert "has no config.resolved.yaml" in capsys.readouterr().err
    (tmp_path / "config.resolved.yaml").write_text("")
    assert main(["replay", str(tmp_path), "--step", "0", "--row", "0"]) == 2
    assert "--step is 0, but steps count from 1" in capsys.readouterr().err
