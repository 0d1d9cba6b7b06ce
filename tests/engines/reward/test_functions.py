"""Reward functions are called in the form they were written for, and what they return is checked."""

import sys
from pathlib import Path

import pytest

from spmdrl.engines.reward.calls import FunctionScores, RewardCall, combine, with_part
from spmdrl.engines.reward.functions import function_names, load_functions, needs_answer, score
from spmdrl.nouns.settings.reward_config import CodeConfig
from spmdrl.runtime.workers.verdict import Verdict

POISONS = Path(__file__).with_name("poisons.py")


def scores_of(spec: str, *completions: str, prompts=None, **columns):
    (function,) = load_functions([spec], CodeConfig())
    call = RewardCall(prompts or ["p"] * len(completions), completions, [(1, 2)] * len(completions), columns)
    return score(function, call)


def test_verl_functions_are_called_once_a_row_and_fail_alone():
    scores = scores_of(f"{POISONS}:compute_score", "1", "2", "raise", answer=["1", "1", "1"], data_source=["a"] * 3)
    assert scores.values == [1.0, 0.0, None]
    assert scores.verdicts == [Verdict.SCORED, Verdict.WRONG, Verdict.CRASHED]
    assert scores.error is not None and "row 2: ValueError: no score" in scores.error


def test_a_dict_without_score_is_malformed_and_a_score_of_none_is_none():
    scores = scores_of(f"{POISONS}:without_score", "malformed", "none", answer=["1", "1"])
    assert scores.verdicts == [Verdict.MALFORMED, Verdict.LEFT_OUT]
    assert scores.error is not None and "a dict without 'score'; keys: acc, reward" in scores.error


def test_a_part_that_comes_later_is_added_to_what_functions_gave_and_none_of_it_takes_the_reward_away():
    verdicts = [Verdict.SCORED, Verdict.LEFT_OUT, Verdict.CRASHED, Verdict.WRONG]
    result = combine("key", {"fn": FunctionScores([1.0, None, None, 0.0], verdicts)}, [1.0])
    added = with_part(result, "model", [0.5, 0.5, 0.5, None], 2.0)
    assert added.rewards == [2.0, 1.0, None, None] and added.parts["model"] == [0.5, 0.5, 0.5, None]
    assert added.verdicts == [Verdict.SCORED, Verdict.SCORED, Verdict.CRASHED, Verdict.LEFT_OUT]


def test_async_functions_are_awaited():
    assert scores_of(f"{POISONS}:slow_but_together", "a", "b").values == [1.0, 1.0]


def test_columns_and_token_ids_reach_the_function_by_name():
    assert scores_of(f"{POISONS}:parts_with_columns", "a", "b", level=[5, 7], other=[0, 0]).values == [7.0, 9.0]


def test_a_missing_column_is_named():
    scores = scores_of(f"{POISONS}:needs_hint", "a", answer=["1"])
    assert scores.verdicts == [Verdict.CRASHED]
    assert scores.error is not None and "it needs ['hint'], but the rows have the columns ['answer']" in scores.error


def test_conversational_prompts_have_completions_as_messages():
    scores = scores_of(f"{POISONS}:text_of_messages", "hi", prompts=[[{"role": "user", "content": "say hi"}]])
    assert scores.values == [1.0]


def test_module_functions_load_by_name():
    assert scores_of("spmdrl.engines.reward.answers:exact", " 4 ", answer=["4"]).values == [1.0]


def test_a_misspelled_rule_is_met_with_the_nearest_one():
    with pytest.raises(ValueError, match="did you mean 'math'"):
        load_functions(["maths"], CodeConfig())


def test_math_without_its_package_is_refused_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[math\]'"):
        load_functions(["math"], CodeConfig())


def test_a_reward_too_large_to_be_summed_is_an_error_of_its_row():
    scores = scores_of(f"{POISONS}:as_written", "1e308", "1e15", "-2e15", "-1e15")
    assert scores.values == [None, 1e15, None, -1e15]
    assert scores.verdicts == [Verdict.MALFORMED, Verdict.SCORED, Verdict.MALFORMED, Verdict.SCORED]
    assert scores.error is not None and "row 0: it gave 1e+308, but a reward is at most 1e+15" in scores.error


def test_a_weighted_sum_too_large_is_an_error_of_its_row():
    scores = FunctionScores([1e15, 1.0], [Verdict.SCORED, Verdict.SCORED])
    result = combine("key", {"fn": scores}, [1e300])
    assert result.rewards == [None, None]
    assert result.verdicts == [Verdict.MALFORMED] * 2
    assert result.error is not None and "row 0: the weighted sum is inf" in result.error


def test_a_row_that_a_rule_gives_up_on_is_timed_out_and_leaves_the_others():
    pytest.importorskip("math_verify", reason="needs pip install -e '.[math]'")
    scores = scores_of("math", "\\boxed{3^{1000000}}", "\\boxed{3}", answer=["3", "3"])
    assert scores.values == [None, 1.0]
    assert scores.verdicts == [Verdict.TIMED_OUT, Verdict.SCORED]


def test_names_are_short_unless_two_functions_share_one():
    assert function_names(["math", "a.b:fn"]) == ("math", "fn")
    assert function_names(["a:fn", "b:fn"]) == ("a:fn", "b:fn")
    assert needs_answer(["a:fn", "math"])
    assert not needs_answer(["a:fn"])


def test_a_call_with_uneven_columns_is_refused():
    with pytest.raises(ValueError, match="column 'answer'"):
        RewardCall(["p"], ["c"], [(1,)], {"answer": []})
