"""Whole runs by Muon: with the swap, stopped and resumed to the bit, on other ranks, and not by another optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.jobs import finished, inline_config, metrics_of, run_job, untimed, weights_digest

MUON = ["optim.name=muon", "optim.lr=3e-3", "reshard.swap=always", "checkpoint.interval=1", "checkpoint.keep_last=9"]


@pytest.mark.ranks
def test_a_run_by_muon_resumes_to_the_bit_and_by_no_other_optimizer(tmp_path: Path) -> None:
    words = [inline_config(tmp_path), *MUON]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finished(run_job("train", *words, "train.max_steps=3", f"run.dir={whole}", ranks=2))
    finished(run_job("train", *words, "train.max_steps=1", f"run.dir={parts}", ranks=2))
    shutil.copytree(parts, tmp_path / "other")
    refused = run_job("train", *words, "optim.name=adamw", f"run.dir={parts}", ranks=2)
    assert refused.returncode == 2 and "the optimizer was 'muon' and is None" in refused.stderr
    finished(run_job("train", *words, "train.max_steps=3", f"run.dir={parts}", ranks=2))
    assert weights_digest(parts, 3) == weights_digest(whole, 3)
    assert untimed(metrics_of(parts)) == untimed(metrics_of(whole))
    finished(run_job("train", *words, "train.max_steps=2", f"run.dir={tmp_path / 'other'}"))
    alone, together = metrics_of(tmp_path / "other")[1], metrics_of(whole)[1]
    assert alone["loss"] == pytest.approx(together["loss"], abs=1e-4)
    assert alone["grad_norm"] == pytest.approx(together["grad_norm"], rel=1e-3)
