"""The whole loop in one process under pdb."""

from __future__ import annotations

import subprocess
import sys

from tests.support.jobs import ROOT, environment


def test_pdb_stops_inside_a_reward_function_of_the_quickstart(tmp_path):
    reward = tmp_path / "rewards.py"
    reward.write_text("def fn(completions, **columns):\n    breakpoint()\n    return [0.0] * len(completions)\n")
    command = [
        sys.executable, "-m", "pdb", "-m", "spmdrl", "train", "configs/debug/quickstart.yaml",
        f"run.dir={tmp_path / 'run'}", f"reward.functions=[{reward}:fn]", "sft.max_steps=1", "eval.before_train=false",
        "rollout.prompts_per_step=2",
    ]  # fmt: skip
    typed = "continue\np 'answers: %s' % len(completions)\nimport os; print('process', os.getpid())\nq\n"
    job = subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=100, env=environment(), cwd=ROOT, check=False
    )
    assert any(f"rewards.py({line})fn()" in job.stdout for line in (2, 3)), job.stdout[-2000:] + job.stderr[-2000:]
    assert "answers: 8" in job.stdout
