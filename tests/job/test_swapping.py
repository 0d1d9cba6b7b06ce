"""Whole jobs with the training state swapped, kept, and wherever memory allows: the same numbers to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.jobs import finished, metrics_of, run_job, summary_of, tiny_config, untimed, weights_digest

MODES = ("auto", "always", "never")


def same_numbers(folder: Path) -> list[dict[str, float]]:
    """The metrics without times, and without those that describe the swap itself."""
    about_swap = ("reshard/", "mem/")
    return [
        {name: value for name, value in step.items() if not name.startswith(about_swap)}
        for step in untimed(metrics_of(folder))
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_mode_has_the_same_bits_also_when_it_is_resumed_in_another(tmp_path, num_ranks):
    config, runs = tiny_config(tmp_path), {mode: tmp_path / mode for mode in MODES}
    settings = ["algo.kl_coef=0.1", "checkpoint.interval=1", "checkpoint.keep_last=9", "reshard.verify=true"]
    for mode, folder in runs.items():
        mine = [f"run.dir={folder}", f"reshard.swap={mode}", f"reshard.swap_dir={tmp_path / 'swap'}"]
        screen = finished(run_job("train", config, *settings, *mine, ranks=num_ranks)).stdout
        assert screen.count("swap: ") == 1
    # Beside a CPU alone is there such a folder.
    assert not list((tmp_path / "swap").glob("*"))
    digests = {mode: [weights_digest(folder, step) for step in (1, 2, 3)] for mode, folder in runs.items()}
    assert digests["always"] == digests["never"] == digests["auto"]
    assert same_numbers(runs["always"]) == same_numbers(runs["never"])
    # A tiny model fits beside itself on any machine that runs these tests.
    assert [summary_of(folder)["swap"]["swaps"] for folder in runs.values()] == [False, True, False]
    swapped = {mode: sum(step.get("reshard/swapped_bytes", 0) for step in metrics_of(runs[mode])) for mode in MODES}
    assert swapped["auto"] == swapped["never"] == 0 < swapped["always"]
    # As if it had been killed in step 3, and its machine had more memory since.
    shutil.rmtree(runs["always"] / "checkpoints" / "step_000003")
    resumed = [f"run.dir={runs['always']}", "reshard.swap=never"]
    assert "after step 2" in finished(run_job("train", config, *settings, *resumed, ranks=num_ranks)).stdout
    assert weights_digest(runs["always"], 3) == digests["never"][2]
    assert not summary_of(runs["always"])["swap"]["swaps"]


@pytest.mark.cpu_only(reason="beside an accelerator state is swapped to pinned memory")
def test_a_folder_that_cannot_take_the_state_is_refused_with_its_key_and_not_used_without_a_swap(tmp_path):
    (tmp_path / "file").write_text("")
    config, folder = tiny_config(tmp_path), f"reshard.swap_dir={tmp_path / 'file' / 'swap'}"
    refused = run_job("train", config, f"run.dir={tmp_path / 'run'}", folder, "reshard.swap=always")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"can't be swapped to {tmp_path / 'file' / 'swap'}" in refused.stderr
    assert "point reshard.swap_dir at a folder" in refused.stderr
    finished(run_job("train", config, f"run.dir={tmp_path / 'run'}", folder, "reshard.swap=never", "train.max_steps=1"))
