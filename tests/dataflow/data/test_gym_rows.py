"""Rows of reasoning-gym are the same in every process, and scored by their tasks."""

import importlib.util

import pytest

from spmdrl.dataflow.data.data_rows import read_rows
from spmdrl.dataflow.data.gym_rows import gym_rows
from spmdrl.engines.reward.calls import RewardCall
from spmdrl.engines.reward.gym_tasks import gym_task, reasoning_gym
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.nouns.settings.data_config import DataConfig
from spmdrl.nouns.settings.reward_config import RewardConfig

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym: pip install -e '.[reasoning-gym]'"
)
SUMS = "reasoning_gym://chain_sum?max_terms=2&max_digits=1&size=4&seed=3"


@needs_package
def test_the_url_alone_decides_the_rows():
    # This task draws from a set of letters, whose order differs from process to process.
    rows = gym_rows(url := "reasoning_gym://isomorphic_strings?size=3")
    assert rows == gym_rows(url) != gym_rows(f"{url}&seed=1")
    assert [row["id"] for row in rows] == [0, 1, 2]


@needs_package
@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("chain_sun", "no task 'chain_sun'; did you mean 'chain_sum'?"),
        ("chain_sum?max_term=2", "chain_sum has no setting 'max_term'; did you mean 'max_terms'?"),
        ("chain_sum?min_terms=9&max_terms=2", "chain_sum refuses these settings: max_terms must be >= min_terms"),
        ('countdown?operators=["+","?"]', "countdown refuses these settings: "),
    ],
)
def test_a_task_or_setting_that_is_not_there_is_refused_with_the_nearest_one(url, problem):
    with pytest.raises(ValueError) as caught:
        gym_task(f"reasoning_gym://{url}")
    assert problem in str(caught.value)


@needs_package
def test_fractions_of_a_row_are_texts():
    row = gym_rows("reasoning_gym://gsm_symbolic?difficulty=1.0&size=15&seed=9101")[14]
    assert row["entry"]["metadata"]["variables"]["initial_fraction"] == "1/2"


@needs_package
def test_a_task_whose_scorer_needs_tuples_is_refused():
    with pytest.raises(ValueError, match="^reasoning_gym://arc_agi.size=1: the task's scorer needs entries with tuple"):
        gym_rows("reasoning_gym://arc_agi?size=1")


@needs_package
def test_reward_processes_score_by_the_task_what_is_tagged_or_else_the_whole_response():
    rows = read_rows(SUMS, DataConfig(train=SUMS))[0].rows
    right = [row.answer for row in rows]
    texts = [f" {right[0]}\n", f"a guess of 9 <answer>{right[1]}</answer>", f"<answer></answer>{right[2]}", "?"]
    columns = {name: [row.columns[name] for row in rows] for name in ("task", "entry", "answer")}
    call = RewardCall([row.prompt for row in rows], texts, [(1,)] * 4, columns)
    with RewardPool(RewardConfig(functions=("reasoning_gym",), timeout_seconds=60.0)) as pool:
        assert pool.columns_taken() == {"reasoning_gym": ["task", "entry"]}
        pool.submit({"all": call})
        assert pool.collect(["all"])[0].rewards == [1.0, 1.0, 0.0, 0.0]


@needs_package
def test_a_response_that_a_scorer_cannot_parse_is_wrong():
    (row,) = gym_rows(url := "reasoning_gym://prime_factorization?size=1")
    with pytest.raises(ValueError):
        gym_task(url).score_answer("1 2 3", row["entry"])
    assert reasoning_gym(["1 2 3", row["answer"]], [url] * 2, [row["entry"]] * 2) == [0.0, 1.0]


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="reasoning-gym is installed")
def test_a_missing_package_is_named_with_the_way_to_install_it():
    for fails in (lambda: gym_rows(SUMS), lambda: RewardPool(RewardConfig(functions=("reasoning_gym",)))):
        with pytest.raises(ValueError, match=r"needs reasoning-gym; `pip install -e '\.\[reasoning-gym\]'`"):
            fails()
