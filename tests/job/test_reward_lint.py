"""`spmdrl check --reward` finds rewards that leak, and has nothing against those that come with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.job.leaky_rewards import PLANTED
from tests.support.jobs import run_job, tiny_config

from spmdrl.dataflow.data.data_rows import RowNeeds, read_rows
from spmdrl.job.start.machine_check import CheckLine
from spmdrl.job.start.reward_lint import lint_rewards
from spmdrl.nouns.settings.data_config import DataConfig
from spmdrl.nouns.settings.reward_config import CodeConfig, RewardConfig

LEAKY = Path(__file__).with_name("leaky_rewards.py")
SUMS = [{"prompt": f"What is {a}+{b}?", "answer": str(a + b)} for a, b in ((2, 9), (14, 3), (8, 15), (30, 1), (5, 5))]
LETTERS = [{"prompt": "Which? A) 1 B) 2 C) 3", "answer": letter} for letter in "ABCB"]
FORMULAS = [{"prompt": f"Half of {n}x?", "answer": f"\\frac{{{n}x}}{{2}}"} for n in (1, 3, 5, 7)]
PROGRAMS = [
    {"prompt": f"+{n}", "code": f"def add{n}(x):\n    return x + {n}", "test_list": [f"assert add{n}(1) == {n + 1}"]}
    for n in (1, 2, 3)
]  # fmt: skip


def lint(tmp_path, rows, *functions: str, **settings) -> list[CheckLine]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    sources = read_rows(str(path), DataConfig(train=str(path)), needs=RowNeeds())
    return lint_rewards(RewardConfig(functions, **settings), sources, has_turns=False)


def failures(lines: list[CheckLine]) -> list[str]:
    return [line.text for line in lines if not line.passed]


@pytest.mark.parametrize(
    ("function", "rows"), [("exact", SUMS), ("number", SUMS), ("choice", LETTERS), ("math", FORMULAS), ("math", SUMS)]
)
def test_the_rules_of_the_package_have_no_failed_line(tmp_path, function, rows):
    if function == "math":
        pytest.importorskip("math_verify")
    lines = lint(tmp_path, rows, function)
    assert failures(lines) == [] and len(lines) >= 10


def test_the_reward_code_has_no_failed_line(tmp_path):
    assert failures(lint(tmp_path, PROGRAMS, "code", code=CodeConfig(test_seconds=2.0))) == []


# What must be in a failed line about each.
FINDINGS = {
    "rewards_empty": "an empty response scores as high",
    "anywhere": "many answers at once scores as high",
    "any_number": "another row's answer scores as high",
    "random_bonus": "when scored again; take randomness",
    "slow": "s, which training waits for",
    "first_is_better": "in the opposite order; score each",
    "length": "another row's answer scores as high",
    "raises_on_empty": "an empty response is crashed",
    "none_for_right": "references score 0, no more than anything else",
    "form_only": "another row's answer scores as high",
}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda function: function.__name__)
def test_a_planted_leak_is_found_with_its_fix(tmp_path, planted):
    is_slow = planted.__name__ == "slow"
    rows, seconds = (SUMS[:1], 1.0) if is_slow else (SUMS, 60.0)
    found = failures(lint(tmp_path, rows, f"{LEAKY}:{planted.__name__}", timeout_seconds=seconds))
    assert any(FINDINGS[planted.__name__] in text for text in found), found


def test_a_right_function_has_no_failed_line(tmp_path):
    assert failures(lint(tmp_path, SUMS, f"{LEAKY}:right")) == []


def test_the_verb_shows_the_lines_and_ends_with_1_where_one_failed(tmp_path):
    config = str(tiny_config(tmp_path))
    leaky = f"reward.functions=[{LEAKY}:any_number]"
    done = run_job("check", config, leaky, "--reward", f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED another row's answer scores as high" in done.stdout and "ok     references score" in done.stdout
    done = run_job("check", config, "reward.functions=[exact]", "--reward", f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout and "ok     versions, devices" in done.stdout
