"""Synthetic rows are right, all different, the same every time, and disjoint between the splits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.data.synthetic import OPERATIONS, parse_synthetic, synthetic_rows

SIGNS = {"addition": "+", "subtraction": "-", "difference": "-", "multiplication": "*", "division": "/"}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_answer_is_right_and_every_question_different(operation):
    rows = synthetic_rows(f"synthetic://{operation}?low=0&high=30&count=300")
    assert len({row["id"] for row in rows}) == 300
    for row in rows:
        left, right = row["prompt"].rstrip("=").split(SIGNS[operation])
        expected = {
            "addition": lambda a, b: a + b,
            "subtraction": lambda a, b: a - b,
            "difference": lambda a, b: a - b,
            "multiplication": lambda a, b: a * b,
            "division": lambda a, b: a // b,
        }[operation](int(left), int(right))
        assert row["answer"] == str(expected)


def test_splits_are_disjoint_whatever_the_seed_and_the_order_of_the_numbers():
    def questions(split, seed, count):
        rows = synthetic_rows(f"synthetic://addition?high=40&count={count}&split={split}&seed={seed}")
        return {tuple(sorted(row["id"].split(":")[1:])) for row in rows}

    train = questions("train", 0, 1300) | questions("train", 1, 1300)
    assert train.isdisjoint(questions("test", 2, 100))


def test_the_url_alone_decides_the_rows():
    first = synthetic_rows("synthetic://addition?count=50&seed=3")
    assert first == synthetic_rows("synthetic://addition?count=50&seed=3")
    assert first != synthetic_rows("synthetic://addition?count=50&seed=4")


@given(st.integers(2000, 10**9), st.sampled_from(["train", "test"]), st.integers(0, 5))
def test_wide_ranges_give_their_count_too(high, split, seed):
    rows = synthetic_rows(f"synthetic://subtraction?low=-5&high={high}&count=20&split={split}&seed={seed}")
    assert len({row["id"] for row in rows}) == 20


def test_a_wide_range_of_differences_gives_a_great_count_too():
    assert len(synthetic_rows("synthetic://difference?high=1000000&count=20000&split=test")) == 20000


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("synthetic://additon", "did you mean 'addition'"),
        ("synthetic://addition?hihg=5", "did you mean 'high'"),
        ("synthetic://addition?high=many", "high=many.*int"),
        ("synthetic://addition?split=eval", "train or test"),
        ("synthetic://addition?low=5&high=4", "low <= high"),
        ("synthetic://addition?high=4&count=1000", "count=1000.*has only .* questions"),
        ("synthetic://addition?test_fraction=1.5", "test_fraction=1.5"),
    ],
)
def test_a_wrong_url_is_refused(url, message):
    with pytest.raises(ValueError, match=message):
        synthetic_rows(url)


def test_division_never_divides_by_zero():
    assert not parse_synthetic("synthetic://division").holds(3, 0)


def test_a_difference_is_never_negative():
    assert all(int(row["answer"]) >= 0 for row in synthetic_rows("synthetic://difference?high=30&count=300"))


def test_prompts_are_the_text_with_both_numbers_and_the_sign_in_it():
    text = "Calculate {left} {sign} {right}. Reply with the number only."
    rows = synthetic_rows(f"synthetic://difference?count=9&prompt={text}")
    plain = synthetic_rows("synthetic://difference?count=9")
    for row, other in zip(rows, plain, strict=True):
        left, right = other["prompt"].rstrip("=").split("-")
        assert row == other | {"prompt": f"Calculate {left} - {right}. Reply with the number only."}
    with pytest.raises(ValueError, match="prompt in a synthetic URL has no 'rigt'; did you mean 'right'"):
        synthetic_rows("synthetic://difference?prompt={left} and {rigt}")


def test_completions_are_the_text_with_prompt_and_answer_in_it():
    rows = synthetic_rows("synthetic://division?count=9&low=1&completion=<<{prompt}{answer}>>{answer}")
    assert all(row["completion"] == f"<<{row['prompt']}{row['answer']}>>{row['answer']}" for row in rows)
    assert "completion" not in synthetic_rows("synthetic://division?count=9&low=1")[0]
    with pytest.raises(ValueError, match="no 'answr'; did you mean 'answer'"):
        synthetic_rows("synthetic://division?completion={answr}")


def test_pairs_prefer_the_answer_to_one_that_is_wrong_by_a_little():
    rows = synthetic_rows("synthetic://addition?low=0&high=19&count=300&max_error=3")
    assert all(row["chosen"] == row["answer"] for row in rows)
    errors = [int(row["rejected"]) - int(row["answer"]) for row in rows]
    assert set(errors) == {-3, -2, -1, 1, 2, 3}
    plain = synthetic_rows("synthetic://addition?low=0&high=19&count=300")
    assert plain == [{name: row[name] for name in ("id", "prompt", "answer")} for row in rows]
    with pytest.raises(ValueError, match="max_error=-1"):
        synthetic_rows("synthetic://addition?max_error=-1")
