"""Benchmarks are read as they lie on a hub, and their right answers score one by the rule that their page names."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spmdrl.dataflow.data.data_rows import Row, RowNeeds, read_rows
from spmdrl.dataflow.data.records import BadRows
from spmdrl.engines.reward.answers import choice, math, number
from spmdrl.nouns.settings.data_config import DataConfig, data_sources

GSM8K = {"question": "3 boxes of {6} pens?", "answer": "3 * 6 = <<3*6=18>>18\n#### 18"}
MATH500 = {
    "problem": "Solve $x^2 = 2$, $x > 0$.", "solution": "So $x = \\boxed{\\sqrt{2}}$.", "answer": "\\sqrt{2}",
    "subject": "Algebra", "level": 2, "unique_id": "test/algebra/1.json",
}  # fmt: skip
AIME_UPPER = {"ID": "2024-I-1", "Problem": "Find $m + n$.", "Solution": "It is \\boxed{033}.", "Answer": 33}
AIME_LOWER = {"id": 60, "problem": "Find $m + n$.", "solution": "It is \\boxed{33}.", "answer": "033", "year": "2024"}
GPQA = {
    "Question": "Which level is split?\n", "Correct Answer": " 2p\n", "Incorrect Answer 1": "1s",
    "Incorrect Answer 2": "2s, by {A}", "Incorrect Answer 3": "3s", "Record ID": "rec1", "Pre-Revision Question": "?",
}  # fmt: skip


def written(path: Path, *rows: dict[str, Any]) -> str:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(path: str, needs: RowNeeds | None = None, **settings: Any) -> list[Row]:
    (part,) = read_rows(path, DataConfig(**settings), needs=needs or RowNeeds(answer=True))
    return list(part.rows)


@pytest.mark.parametrize(
    ("form", "row", "rule", "prompt", "right", "wrong", "learnt"),
    [
        ("gsm8k", GSM8K, number, '3 boxes of {6} pens?\n\nThink step by step, and write the final answer after "####".',
         "So 3 * 6.\n#### 18", "#### 19", None),
        ("math500", MATH500, math,
         "Solve $x^2 = 2$, $x > 0$.\n\nThink step by step, and put the final answer in \\boxed{}.",
         "Thus \\boxed{2^{1/2}}.", "Thus \\boxed{2}.", "So $x = \\boxed{\\sqrt{2}}$."),
        ("aime", AIME_UPPER, number, "Find $m + n$.\n\nThink step by step, and put the final answer in \\boxed{}.",
         "\\boxed{33}", "\\boxed{3}", "It is \\boxed{033}."),
        ("aime", AIME_LOWER, number, "Find $m + n$.\n\nThink step by step, and put the final answer in \\boxed{}.",
         "\\boxed{33}", "\\boxed{3}", "It is \\boxed{33}."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_a_benchmark_has_its_prompt_and_its_answer(tmp_path, form, row, rule, prompt, right, wrong, learnt, suffix):
    (read,) = rows_of(written(tmp_path / f"test{suffix}", row), format=form)
    assert read.prompt == prompt and read.completion == learnt
    assert rule([""] * 2, [right, wrong], answer=[read.answer] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_choices_are_shuffled_by_the_question_alone(tmp_path, suffix):
    rows = [{**GPQA, "Question": f"Which of {number}?"} for number in range(400)]
    read = rows_of(written(tmp_path / f"all{suffix}", *rows), format="gpqa")
    for row in read:
        question, choices, _ = row.prompt.split("\n\n")
        lines = dict(line.split(") ", 1) for line in choices.splitlines())
        assert question.startswith("Which of") and list(lines) == list("ABCD")
        assert lines[row.answer] == "2p" and sorted(lines.values()) == ["1s", "2p", "2s, by {A}", "3s"]
        assert row.columns["answer"] == row.answer and row.columns["Record ID"] == "rec1"
    # Each letter is right for a quarter, within four standard deviations.
    assert all(abs(count - 100) < 4 * 75**0.5 for count in Counter(row.answer for row in read).values())
    part = rows_of(written(tmp_path / f"part{suffix}", *rows[300:]), format="gpqa")
    assert [row.prompt for row in part] == [row.prompt for row in read[300:]]


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("gsm8k", "question, answer, the answer with '####' in it"),
        ("math500", "problem, answer"),
        ("aime", r"problem\|Problem\|question, answer\|Answer"),
        ("gpqa", "Question, Correct Answer, Incorrect Answer 1, Incorrect Answer 2, Incorrect Answer 3"),
    ],
)
def test_another_format_is_refused_with_the_columns_found_and_wanted(tmp_path, form, wanted):
    path = written(tmp_path / "other.jsonl", *[{"text": "a", "label": "b"}] * 3)
    problem = (
        f"none of the 3 rows .* format {form} has the columns {wanted}; this one's are text, label: set data.format"
    )
    with pytest.raises(BadRows, match=problem):
        rows_of(path, format=form)


@pytest.mark.parametrize(
    ("form", "row", "problem"),
    [
        ("gsm8k", {**GSM8K, "answer": "18"}, "the answer with '####' in it"),
        ("gsm8k", {**GSM8K, "question": [{"role": "user", "content": "a"}]}, r"'question' is \[.* but must be text"),
        ("math500", {**MATH500, "problem": " "}, "'problem' is ' ', but must be text"),
        ("aime", {**AIME_LOWER, "answer": ""}, "'answer' is empty"),
        ("gpqa", {**GPQA, "Incorrect Answer 2": ""}, "'Incorrect Answer 2' is ''"),
        ("gpqa", {**GPQA, "Incorrect Answer 3": None}, "this one's are Question"),
        ("gpqa", {**GPQA, "Incorrect Answer 3": "2p "}, "two letters would be right"),
    ],
)
def test_a_row_that_cannot_be_asked_or_judged_is_bad(tmp_path, form, row, problem):
    with pytest.raises(BadRows, match=problem):
        rows_of(written(tmp_path / "bad.jsonl", row), format=form)


def test_a_path_has_a_format_of_its_own(tmp_path):
    paths = [
        {"path": written(tmp_path / "gsm8k.jsonl", GSM8K), "weight": 1, "format": "gsm8k"},
        {"path": written(tmp_path / "gpqa.csv", GPQA), "weight": 2},
    ]
    first, second = read_rows(paths, DataConfig(train=paths, format="gpqa"), needs=RowNeeds(answer=True))
    assert first.rows[0].answer.endswith("#### 18") and second.rows[0].answer in "ABCD"
    assert "prompt in 'Question', answer in 'Correct Answer'" in second.summary
    plain = [{"path": paths[0]["path"], "format": "auto"}]
    (bare,) = read_rows(plain, DataConfig(train=plain, format="gpqa"))
    assert bare.rows[0].prompt == GSM8K["question"]


def test_formats_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="data.eval: the format of a.csv is 'gqpa', but must be one of auto, gsm8k"):
        data_sources([{"path": "a.csv", "format": "gqpa"}], "data.eval")
    with pytest.raises(ValueError, match="data.answer_key is 'a', but data.format aime has columns of its own"):
        DataConfig(format="aime", answer_key="a")


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("Answer: B", "B"), ("**Answer: B**", "B"), ("Answer: (B) 12 m", "B"), ("the answer is $B$.", "B"),
        ("\\boxed{\\text{(B)}}", "B"), ("Answer: A\nNo.\nAnswer: b", "B"), ("It is so.\n(B)", "B"), ("B) 12 m", "B"),
        ("#### B", "B"), ("Answer: A", "A"), ("Answer: B or C", None), ("Answer: B, C", None), ("12 m", None),
        ("", None), ("A car", None), ("I think so", None),
    ],
)  # fmt: skip
def test_a_choice_is_the_letter_that_a_completion_ends_with(completion, letter):
    scores = choice([""] * 10, [completion] * 10, answer=list("ABCDEFGHIJ"))
    assert scores == [float(one == letter) for one in "ABCDEFGHIJ"]


def test_a_reference_that_is_no_letter_is_an_error_of_its_row():
    (problem,) = choice([""], ["B"], answer=["12 m"])
    assert isinstance(problem, ValueError) and "isn't a choice's letter" in str(problem)
