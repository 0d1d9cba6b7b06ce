"""launch/smollm2.sh: its questions, and a short run of the whole."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.support.jobs import ROOT, summary_of

from spmdrl.config.config import load_config
from spmdrl.dataflow.data.data_rows import Row, RowNeeds, read_rows

CONFIG = ROOT / "configs/grpo/smollm2_arithmetic.yaml"


def questions(rows: list[Row]) -> set[tuple[str, ...]]:
    """Operation and both numbers; a + b and b + a are one question."""
    split = [row.id.split(":") for row in rows]
    return {(name, *(sorted(pair) if name in ("addition", "multiplication") else pair)) for name, *pair in split}


def test_it_asks_500_held_out_questions_that_are_never_trained_on() -> None:
    data = load_config([CONFIG], []).value.data
    train, held_out = (
        [row for part in read_rows(paths, data, needs=RowNeeds(answer=True)) for row in part.rows]
        for paths in (data.train, data.eval)
    )
    assert len(held_out) == 500 and not questions(train) & questions(held_out)
    form = re.compile(r"Calculate \d+ [-+*] \d+\. Reply with the number only\.")
    assert all(isinstance(row.prompt, str) and form.fullmatch(row.prompt) for row in (*train, *held_out))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(
    not (ROOT / ".venv-smollm2/installed-gguf").is_file(), reason="its environment isn't made: bash launch/smollm2.sh"
)
def test_the_whole_script_trains_and_shows_answers_by_transformers(tmp_path: Path) -> None:
    few = [f"synthetic://{name}?high=20&count=2&split=test" for name in ("addition", "difference")]
    settings = ["train.max_steps=1", "rollout.prompts_per_step=2", "rollout.num_generations=2", f"data.eval={few}"]
    command = ["bash", "launch/smollm2.sh", *settings, f"run.dir={tmp_path / 'run'}"]
    job = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    assert summary_of(tmp_path / "run")["verdict"] == "done"
    assert len(re.findall(r"^(addition|difference):\d+:\d+ .*(right|wrong)", job.stdout, re.MULTILINE)) == 4
