"""The advice about a split of ranks, from the seconds of steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmdrl.job.rollouts.rank_split import split_line


def steps(folder: Path, **seconds: float) -> Path:
    # The first one compiles.
    lines = [{"step": 1, "time/step": 99.0, **dict.fromkeys(map("time/{}".format, seconds), 0.0)}]
    lines += [{"step": step, **{f"time/{name}": value for name, value in seconds.items()}} for step in (2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("num_training", "num_generating", "waits", "advice"),
    [
        # 6 ranks busy for 2 of 8 s, 2 for all: 12 and 16 rank-seconds, of 8 ranks 4.6 for generation.
        (6, 2, (6.0, 0.0), "waited 75% of the time, those that generate 0%: resources.ranks.generation=5 is nearer"),
        (4, 4, (0.0, 0.5), "waited 0% of the time, those that generate 6%: which is as even as can be"),
    ],
)
def test_waits_name_a_more_even_split(tmp_path, num_training, num_generating, waits, advice):
    folder = steps(tmp_path, step=8.0, wait_for_generation=waits[0], wait_for_update=waits[1])
    line = split_line(folder, num_training, num_generating, are_apart=True)
    assert line is not None
    assert line.endswith(advice)


def test_a_run_of_ranks_that_do_both_names_an_even_split(tmp_path):
    folder = steps(tmp_path, step=8.0, generation=5.0, reward=1.0, update=2.0)
    # 48 of 64 rank-seconds generate: 6 of 8 ranks take 8 s for them, as 2 do for the other 16.
    line = split_line(folder, 8, 8, are_apart=False)
    assert line is not None
    assert "generated and rewarded for 6 s: with rollout.lag=1 and resources.ranks.generation=6 both" in line


def test_nothing_is_said_without_steps_of_that_form(tmp_path):
    assert split_line(tmp_path / "none", 2, 2, are_apart=False) is None
    folder = steps(tmp_path, step=8.0, generation=5.0)
    assert split_line(folder, 2, 2, are_apart=True) is None
    assert split_line(folder, 1, 1, are_apart=False) is None
