"""A run goes on with fewer ranks than it began with: the same rows in the same order, and the same loss."""

from __future__ import annotations

import pytest
from tests.support.jobs import finished, metrics_of, run_job, tiny_config

from spmdrl.observability.jsonl import read_jsonl
from spmdrl.observability.log import SAMPLES_FILE

PAIRS = "data.train=synthetic://addition?low=0&high=9&count=40&max_error=5"
SETTINGS = {
    "train": ("train.max_steps={}", "rollout={{prompts_per_step: 4, num_generations: 4, max_completion_length: 8}}"),
    "sft": ("sft={{max_steps: {}, rows_per_step: 6}}",),
    "preferences": (PAIRS, "preferences={{max_steps: {}, rows_per_step: 7}}"),
}


def settings_of(verb, folder, name, num_steps):
    settings = [setting.format(num_steps) for setting in SETTINGS[verb]]
    return [tiny_config(folder), *settings, "log.samples_per_step=1000", f"run.dir={folder / name}"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("verb", SETTINGS)
def test_a_run_that_goes_on_with_half_the_ranks_and_then_with_one_learns_the_same(tmp_path, verb):
    finished(run_job(verb, *settings_of(verb, tmp_path, "whole", 3), ranks=4))
    for num_steps, ranks in ((1, 4), (2, 2), (3, 1)):
        job = finished(run_job(verb, *settings_of(verb, tmp_path, "parts", num_steps), ranks=ranks))
        assert ("resumed from" in job.stdout) == (num_steps > 1)
    whole, parts = (metrics_of(tmp_path / name) for name in ("whole", "parts"))
    assert [step["step"] for step in parts] == [step["step"] for step in whole]
    for one, other in zip(parts, whole, strict=True):
        names = [name for name in ("loss", "grad_norm", "reward") if name in other]
        assert "loss" in names or other["step"] == 0
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], abs=1e-6)
    rows = [
        [
            (one["step"], one["row"], one["prompt"], one["response"])
            for one in read_jsonl(tmp_path / name / SAMPLES_FILE)
        ]
        for name in ("whole", "parts")
    ]
    assert sorted(rows[0]) == sorted(rows[1])
    assert len(rows[0]) == (3 * 16 if verb == "train" else 0)
