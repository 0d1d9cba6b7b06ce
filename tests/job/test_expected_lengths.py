"""Whole jobs that come back to prompts which they have seen, and deal them by how long their responses were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.support.jobs import finished, inline_config, metrics_of, run_job, untimed, weights_digest

from spmdrl.dataflow.samples.balancing.length_history import LENGTHS

# Two epochs and a half.
STEPS = 5
SETTINGS = ("data.train=synthetic://addition?low=0&high=9&count=16", f"train.max_steps={STEPS}")


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_that_is_resumed_in_its_second_epoch_deals_as_the_whole_one_and_ends_with_the_same_bits(tmp_path: Path):
    settings = [inline_config(tmp_path), *SETTINGS, f"run.dir={tmp_path / 'run'}", "checkpoint.interval=3"]
    finished(run_job("train", *settings, ranks=2))
    checkpoints = tmp_path / "run" / "checkpoints"
    whole, digest = metrics_of(tmp_path / "run"), weights_digest(tmp_path / "run", STEPS)
    known = (checkpoints / f"step_{STEPS:06d}" / LENGTHS).read_text()
    assert len(json.loads(known)["means"]) == 16
    shutil.rmtree(checkpoints / f"step_{STEPS:06d}")
    assert "resumed from" in finished(run_job("train", *settings, ranks=2)).stdout
    assert untimed(metrics_of(tmp_path / "run")) == untimed(whole)
    assert weights_digest(tmp_path / "run", STEPS) == digest
    assert (checkpoints / f"step_{STEPS:06d}" / LENGTHS).read_text() == known


@pytest.mark.ranks
def test_tokens_are_the_same_whichever_replica_draws_them_and_costs_are_dealt_more_evenly_than_numbers(tmp_path: Path):
    answers, imbalances = {}, {}
    for balance in ("cost", "rows"):
        folder = tmp_path / balance
        # The policy hardly moves, so that all that differs is who generates what, beside which rows, in which order.
        finished(
            run_job(
                "train", inline_config(tmp_path), *SETTINGS, f"run.dir={folder}", f"dock.balance={balance}",
                "optim.lr=1e-30", "log.samples_per_step=1000", ranks=2,
            )
        )  # fmt: skip
        rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        answers[balance] = {(row["step"], row["row"]): row["response"] for row in rows}
        imbalances[balance] = [step["generation/imbalance"] for step in metrics_of(folder)]
    assert answers["cost"] == answers["rows"] and len(answers["cost"]) == 32 * STEPS
    assert min(imbalances["cost"] + imbalances["rows"]) >= 1
    assert imbalances["cost"][:2] == imbalances["rows"][:2] and imbalances["cost"][2:] != imbalances["rows"][2:]
