"""`number` finds the final number and compares it exactly; rules take TRL's arguments."""

import json
import os
from pathlib import Path

import pytest

from spmdrl.engines.reward.answers import exact, math, number
from spmdrl.engines.reward.final_answer import marked_answer
from spmdrl.engines.reward.number import is_same_number, parse_number

SAME = [
    ("#### 18", "18"),
    ("It is #### 17\nno, it is\n#### 18\n", "... so\n#### 18"),
    ("#### 1,080", "1080"),
    ("#### $1,080.00.", "1,080"),
    ("#### 18 dollars", "18"),
    ("#### 18 pieces of candy", "18"),
    ("**#### 18**", "18"),
    ("#### \\boxed{18}", "18"),
    ("thus \\boxed{\\frac{1}{2}}.", "0.5"),
    ("\\boxed{\\frac12}", "1/2"),
    ("\\boxed{\\frac{5}{-7}}", "-5/7"),
    ("\\boxed{3\\frac{1}{2}}", "3.5"),
    ("\\boxed{10,\\!080}", "10080"),
    ("\\boxed{x = 5}", "5"),
    ("\\boxed{+7}", "7"),
    ("\\boxed{{5}}", "5"),
    ("\\boxed{2 \\times 10^3}", "2000"),
    ("\\boxed{2*10^3}", "2000"),
    ("\\boxed{0.\\overline{3}}", "1/3"),
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
]
DIFFERENT = [
    ("#### 17", "18"),
    ("", "18"),
    ("no number", "18"),
    ("####", "18"),
    ("#### 18\n#### 19", "18"),
    ("#### 1 2 3 18", "18"),
    ("\\boxed{4*5}", "45"),
    ("\\boxed{2 3}", "23"),
    ("\\boxed{2*10^3}", "210"),
    ("\\boxed{5\\text{ or }6}", "56"),
    ("\\boxed{3 not}", "3"),
    ("\\boxed{2\\pi}", "2"),
    ("\\boxed{\\sqrt{51}}", "51"),
    ("\\boxed{3, 5, 7}", "7"),
    ("\\boxed{18} or \\boxed{19}", "19"),
    ("\\boxed{y = 5}", "x = 5"),
    ("50%", "0.5%"),
    ("0.333", "1/3"),
    ("1/0", "0"),
    ("1,08", "108"),
    ("48-24", "-24"),
    ("9" * 5000, "18"),
    ("#### " + "9" * 5000, "9"),
    ("1e999999999", "1"),
    ("1 \\times 10^{99999999}", "1"),
]


@pytest.mark.parametrize(("completion", "reference"), SAME)
def test_number_gives_one_to_the_same_value(completion, reference):
    assert is_same_number(completion, reference)


@pytest.mark.parametrize(("completion", "reference"), DIFFERENT)
def test_number_gives_zero_to_another_value(completion, reference):
    assert not is_same_number(completion, reference)


def test_boxes_may_be_nested():
    assert marked_answer("\\boxed{\\frac{a_{1}}{b}} and then \\boxed{x_{\\text{a}}}") == "x_{\\text{a}}"


@pytest.mark.parametrize("text", ["2 3", "4*5", "x", "n", "3 + 4", "5 or 6", "1,08", "\\frac{1}{0}", "", "$", "{}"])
def test_what_is_no_single_number_is_none(text):
    assert parse_number(text) is None


def test_rules_take_trl_arguments_and_leave_out_rows_without_an_answer():
    assert number(["p"] * 3, ["#### 1", "2", "3"], answer=["1", 2, None], level=[1, 2, 3]) == [1.0, 1.0, None]
    assert exact(["p"] * 3, [" 1 ", "1.0", "x"], answer=["1", "1", None]) == [1.0, 0.0, None]


def test_a_reference_that_is_no_number_is_an_error_of_its_row():
    first, second = number(["p"] * 2, ["1", "x"], answer=["1", "x"])
    assert first == 1.0
    assert isinstance(second, ValueError) and "the reference 'x' isn't a number; use the reward math" in str(second)


def test_math_judges_rows_by_math_verify():
    pytest.importorskip("math_verify", reason="needs pip install -e '.[math]'")
    completions = [r"\boxed{2*3}", r"\boxed{N}", "$\\frac{2}{4}$", "x"]
    assert math(["p"] * 4, completions, answer=["6", "n", "0.5", None]) == [1.0, 0.0, 1.0, None]


def test_a_long_text_is_read_quickly():
    assert not is_same_number("\\boxed{" * 500 + "1," * 20_000, "18")


@pytest.mark.real_data
def test_every_gsm8k_solution_is_right_by_its_own_row():
    path = os.environ.get("SPMDRL_GSM8K")
    if not path:
        pytest.skip("SPMDRL_GSM8K names no GSM8K file")
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    answers = [row["answer"] for row in rows]
    assert number([row["question"] for row in rows], answers, answer=answers) == [1.0] * len(rows)
    results = [answer.rpartition("####")[2].strip() for answer in answers]
    assert number(results, [f"so it is ${result}." for result in results], answer=answers) == [1.0] * len(rows)
    others = results[1:] + results[:1]
    wrong = [one == other for one, other in zip(results, others, strict=True)]
    assert number(results, [f"#### {other}" for other in others], answer=answers) == list(map(float, wrong))
