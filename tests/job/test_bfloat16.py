"""Whole jobs with bfloat16 layers: what moves, what is reported, what checkpoints hold, and resuming to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.jobs import finished, inline_config, metrics_of, run_job
from torch import Tensor

BFLOAT16 = "model.dtype=bfloat16"


def trainer_files(folder: Path, step: int) -> list[bytes]:
    """What the trainer of each rank wrote."""
    files = sorted((folder / "checkpoints" / f"step_{step:06d}" / "trainer").iterdir())
    return [file.read_bytes() for file in files]


def exported(folder: Path, step: int) -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors")


def master_weights(folder: Path, step: int) -> dict[str, Tensor]:
    """The trainer's weights of a run of one rank."""
    (file,) = (folder / "checkpoints" / f"step_{step:06d}" / "trainer").iterdir()
    return {key.removeprefix("weight/"): held for key, held in load_file(file).items() if key.startswith("weight/")}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=[pytest.mark.ranks, pytest.mark.slow])])
def test_a_run_resumes_to_the_bit_whatever_the_dtype_of_its_exported_weights(tmp_path, ranks):
    config, whole, parted = inline_config(tmp_path), tmp_path / "whole", tmp_path / "parted"
    settings = [BFLOAT16, "checkpoint.interval=1", "checkpoint.keep_last=9", "algo.kl_coef=0.1"]
    finished(run_job("train", config, *settings, f"run.dir={whole}", ranks=ranks))
    finished(
        run_job(
            "train", config, *settings, f"run.dir={parted}", "checkpoint.dtype=float32", "reshard.swap=always",
            "reshard.verify=true", ranks=ranks,
        )
    )  # fmt: skip
    # As if it had been killed in step 3; what follows is exported in bfloat16 again.
    shutil.rmtree(parted / "checkpoints" / "step_000003")
    assert "after step 2" in finished(run_job("train", config, *settings, f"run.dir={parted}", ranks=ranks)).stdout
    assert [trainer_files(parted, step) for step in (2, 3)] == [trainer_files(whole, step) for step in (2, 3)]
    assert {weight.dtype for weight in exported(parted, 2).values()} == {torch.float32}
    assert {weight.dtype for weight in exported(parted, 3).values()} == {torch.bfloat16}
    if ranks == 1:
        masters, narrow, wide = master_weights(whole, 2), exported(whole, 2), exported(parted, 2)
        assert masters.keys() == narrow.keys() == wide.keys()
        for name, master in masters.items():
            assert torch.equal(wide[name], master) and torch.equal(narrow[name], master.bfloat16())
        assert any(not torch.equal(narrow[name].float(), masters[name]) for name in masters)


@pytest.mark.ranks
@pytest.mark.parametrize("executor", ["exact", pytest.param("allgather", marks=pytest.mark.slow)])
def test_two_ranks_move_half_the_bytes_of_float32_and_report_how_far_the_engines_are_apart(tmp_path, executor):
    config, runs = inline_config(tmp_path), {dtype: tmp_path / dtype for dtype in ("float32", "bfloat16")}
    settings = ["reshard.swap=always", f"reshard.executor={executor}", "reshard.verify=true", "train.max_steps=1"]
    for dtype, folder in runs.items():
        finished(run_job("train", config, *settings, f"model.dtype={dtype}", f"run.dir={folder}", ranks=2))
    (wide,), (narrow,) = (metrics_of(folder) for folder in runs.values())
    assert 2 * narrow["reshard/bytes"] == wide["reshard/bytes"] > 0
    # What the trainer keeps is float32 in both.
    assert narrow["reshard/swapped_bytes"] == wide["reshard/swapped_bytes"] > 0
    assert wide["mismatch/abs_mean"] < 1e-5 and narrow["mismatch/abs_mean"] < 1e-2
    # All tokens may agree, rounded so coarsely, but not with float32.
    assert abs(narrow["entropy"] - wide["entropy"]) > 1e-6
    assert wide["mismatch/probe_abs_max"] < 1e-4 and narrow["mismatch/probe_abs_max"] < 0.1


def test_the_supervised_start_hands_on_float32_weights(tmp_path):
    settings = [BFLOAT16, "sft.max_steps=1", "train.max_steps=1", f"run.dir={tmp_path / 'run'}"]
    finished(run_job("train", inline_config(tmp_path), *settings))
    warm_start = tmp_path / "run" / "warm_start"
    handed_on, masters = exported(warm_start, 1), master_weights(warm_start, 1)
    assert all(torch.equal(handed_on[name], master) for name, master in masters.items())
    assert {weight.dtype for weight in exported(tmp_path / "run", 1).values()} == {torch.bfloat16}
