"""The built-in rules find the final answer and compare it exactly."""

import json
import os
from pathlib import Path

import pytest

from spmdrl.engines.reward.answers import exact, is_right, marked_answer, math

SAME = [
    ("#### 18", "18"),
    ("It is #### 17\nno, it is\n#### 18\n", "... so\n#### 18"),
    ("#### 1,080", "1080"),
    ("#### $1,080.00.", "1,080"),
    ("#### 18 dollars", "18"),
    ("**#### 18**", "18"),
    ("#### \\boxed{18}", "18"),
    ("thus \\boxed{\\frac{1}{2}}.", "0.5"),
    ("thus \\boxed{\\dfrac{14}{3}}", "\\frac{14}{3}"),
    ("\\boxed{\\frac12}", "1/2"),
    ("\\boxed{3\\frac{1}{2}}", "3.5"),
    ("\\boxed{10,\\!080}", "10080"),
    ("\\boxed{90^\\circ}", "90"),
    ("\\boxed{15\\text{ cm}^2}", "15"),
    ("\\boxed{x = 5}", "5"),
    ("\\boxed{p-q}", "p - q"),
    ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3,\\frac{\\pi}{2})"),
    ("\\boxed{11\\sqrt2}", "11\\sqrt{2}"),
    ("\\boxed{Evelyn}", "\\text{Evelyn}"),
    ("first \\boxed{3} then \\boxed{4}", "4"),
    ("#### 3 but then \\boxed{4}", "4"),
    ("cut off \\boxed{18", "18"),
    ("The answer is 72.", "72"),
    ("She has -5 left", "-5"),
    ("She has \u22125 left", "-5"),
    ("a loss of -$5", "-5"),
    ("a loss of $-5", "-5"),
    ("48-24", "24"),
    ("48/2=24", "24"),
    ("0.20", "0.2"),
    (".5", "1/2"),
    ("It is 3/4 of it", "0.75"),
    ("1 1/2", "1.5"),
    ("50%", "50"),
    ("50%", "0.5"),
    ("50 percent", "50%"),
    ("1e3", "1000"),
    ("so\nEvelyn", "Evelyn"),
    ("864 \\mbox{ inches}^2", "864"),
]
DIFFERENT = [
    ("#### 17", "18"),
    ("", "18"),
    ("no number", "18"),
    ("####", "18"),
    ("#### 18\n#### 19", "18"),
    ("#### 1 2 3 18", "18"),
    ("\\boxed{2\\pi}", "2"),
    ("\\boxed{\\sqrt{51}}", "51"),
    ("\\boxed{3, 5, 7}", "7"),
    ("\\boxed{18} or \\boxed{19}", "18"),
    ("50%", "0.5%"),
    ("0.333", "1/3"),
    ("1/0", "0"),
    ("1,08", "108"),
    ("48-24", "-24"),
    ("9" * 5000, "18"),
    ("#### " + "9" * 5000, "9"),
    ("1e999999999", "1"),
]


@pytest.mark.parametrize(("completion", "reference"), SAME)
def test_math_gives_one_to_the_same_value(completion, reference):
    assert is_right(completion, reference)


@pytest.mark.parametrize(("completion", "reference"), DIFFERENT)
def test_math_gives_zero_to_another_value(completion, reference):
    assert not is_right(completion, reference)


def test_boxes_may_be_nested():
    assert marked_answer("\\boxed{\\frac{a_{1}}{b}} and \\boxed{x_{\\text{a}}}") == "x_{\\text{a}}"


def test_rules_take_trl_arguments_and_leave_out_rows_without_an_answer():
    assert math(["p"] * 3, ["#### 1", "2", "3"], answer=["1", 2, None], level=[1, 2, 3]) == [1.0, 1.0, None]
    assert exact(["p"] * 3, [" 1 ", "1.0", "x"], answer=["1", "1", None]) == [1.0, 0.0, None]


def test_a_long_text_is_read_quickly():
    assert not is_right("\\boxed{" * 500 + "1," * 20_000, "18")


@pytest.mark.real_data
def test_every_gsm8k_solution_is_right_by_its_own_row():
    path = os.environ.get("SPMDRL_GSM8K")
    if not path:
        pytest.skip("SPMDRL_GSM8K names no GSM8K file")
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    answers = [row["answer"] for row in rows]
    assert math([row["question"] for row in rows], answers, answer=answers) == [1.0] * len(rows)
    results = [answer.rpartition("####")[2].strip() for answer in answers]
    assert math(results, [f"so it is ${result}." for result in results], answer=answers) == [1.0] * len(rows)
