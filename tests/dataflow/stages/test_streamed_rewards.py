"""Rewards are requested as responses end, each once, and come back for the right rows."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from tests.dataflow.stages import noted
from tests.engines.generation.support import awake_engine, prompt_of

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.reward import StreamedRewards
from spmdrl.dataflow.stages.rollout.requests import EndedResponses, run_requests
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.nouns.settings.reward_config import RewardConfig
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.runtime.workers.verdict import Outcome, Verdict

GROUP_SIZE = 4
NOTED = ("tests.dataflow.stages.noted:checksum",)
PROMPTS = [Prompt(str(number), prompt_of(3 + number), "", None, {}, "p") for number in range(3)]


def text_of(token_ids) -> str:
    return " ".join(map(str, token_ids))


def score_of(response: Response) -> float:
    return noted.checksum([""], [response.token_ids])[0]


def ended(group: int, **texts: str) -> EndedResponses:
    """Members by their letters, a to d."""
    members = {
        "abcd".index(letter): Response(0, tuple(text.encode()), (), "stop", ()) for letter, text in texts.items()
    }
    return EndedResponses(group, PROMPTS[0], GROUP_SIZE, members)


def spelled(token_ids) -> str:
    return bytes(token_ids).decode()


@pytest.mark.parametrize("level", ["response", "group"])
def test_a_generated_group_is_scored_as_its_responses_end_or_as_a_whole(level):
    noted.CALLS.clear()
    engine = awake_engine()
    sampling = SamplingParams(max_tokens=30, stop_token_ids=tuple(range(8)))
    requests = [
        Request(tuple(range(first, first + GROUP_SIZE)), PROMPTS[number].prompt_ids, (5, 6, 7, 8), sampling)
        for number, first in enumerate(range(0, len(PROMPTS) * GROUP_SIZE, GROUP_SIZE))
    ]
    answers: list[dict[int, Response]] = [{} for _ in PROMPTS]
    early = 0
    with RewardPool(RewardConfig(NOTED, isolation="inline", call_level=level)) as pool:
        rewards = StreamedRewards(pool, text_of)
        for by_request in run_requests(engine, requests):
            ended_now = [
                EndedResponses.of(number, PROMPTS[number], GROUP_SIZE, responses)
                for number, responses in by_request.items()
            ]
            for one in ended_now:
                answers[one.group] |= one.by_member
            before = len(noted.CALLS)
            rewards.begin(ended_now)
            are_whole = [len(answers[one.group]) == GROUP_SIZE for one in ended_now]
            if level == "group":
                assert len(noted.CALLS) - before == sum(are_whole)
            else:
                texts = [[text_of(one.by_member[at].token_ids) for at in sorted(one.by_member)] for one in ended_now]
                assert noted.CALLS[before:] == texts
            early += are_whole.count(False)
        calls = list(noted.CALLS)
        results = rewards.collect(range(len(PROMPTS)))
    assert early > 0, "no response ended before the last of its group"
    assert Counter(text for call in calls for text in call) == Counter(
        text_of(response.token_ids) for by_member in answers for response in by_member.values()
    )
    for by_member, result in zip(answers, results, strict=True):
        assert result.rewards == [score_of(by_member[member]) for member in range(GROUP_SIZE)]
    if level == "group":
        assert [len(call) for call in calls] == [GROUP_SIZE] * len(PROMPTS)


def test_a_child_scores_a_response_while_the_rest_of_its_group_goes_on(tmp_path):
    function, seen = tmp_path / "watched.py", tmp_path / "seen"
    function.write_text(
        "from pathlib import Path\n"
        "def fn(completions, **columns):\n"
        f"    Path({str(seen)!r}).write_text(completions[0])\n"
        "    return [1.0] * len(completions)\n"
    )
    with RewardPool(RewardConfig((f"{function}:fn",), isolation="process")) as pool:
        rewards = StreamedRewards(pool, spelled)
        rewards.begin([ended(7, c="first")])
        deadline = time.monotonic() + 20
        while not (seen.exists() and seen.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen.read_text() == "first"
        rewards.begin([ended(7, a="second", b="third", d="fourth")])
        assert rewards.collect([7])[0].rewards == [1.0] * GROUP_SIZE


def test_members_keep_their_rewards_parts_and_verdicts_in_whatever_order_they_end(tmp_path):
    function = tmp_path / "letters.py"
    function.write_text(
        "def first(completions, **columns):\n"
        "    return [None if text == 'none' else float(ord(text[0]) - ord('a')) for text in completions]\n"
        "def size(completions, **columns):\n"
        "    return [float('inf') if text == 'bad' else float(len(text)) for text in completions]\n"
    )
    config = RewardConfig((f"{function}:first", f"{function}:size"), isolation="inline")
    with RewardPool(config) as pool:
        rewards = StreamedRewards(pool, spelled)
        rewards.begin([ended(1, d="eee")])
        rewards.begin([ended(2, a="c", b="c", c="c", d="c")])
        rewards.begin([ended(1, c="none", a="bad")])
        rewards.begin([ended(1, b="a")])
        other, result = rewards.collect([2, 1])
    assert other.rewards == [3.0] * GROUP_SIZE
    assert result.rewards == [None, 1.0, 4.0, 7.0]
    assert result.parts == {"first": [1.0, 0.0, None, 4.0], "size": [None, 1.0, 4.0, 3.0]}
    assert result.verdicts == [Verdict.MALFORMED, Verdict.SCORED, Verdict.SCORED, Verdict.SCORED]
    assert "isn't finite" in result.error


def test_a_rows_reward_is_what_its_turns_earned_and_what_its_end_or_the_functions_gave(tmp_path):
    (tmp_path / "size.py").write_text(
        "def size(completions, **columns):\n"
        "    return [None if text == 'none' else float(len(text.strip('-'))) for text in completions]\n"
    )
    earned = (0.5, 0.0, -0.25)

    def taking_turns(text: str, outcome: Outcome | None = None) -> Response:
        return Response(0, tuple(text.encode()), (), "stop", (), turns=(1,) * len(text), turn_rewards=earned,
                        outcome=outcome)  # fmt: skip

    given = ["abc", "none", "---", "end", "zero", "lost"]
    outcomes = [Outcome(2.0, Verdict.SCORED), Outcome(0.0, Verdict.WRONG), Outcome(None, Verdict.CRASHED, "lost")]
    members = dict(enumerate(map(taking_turns, given, [None, None, None, *outcomes])))
    with RewardPool(RewardConfig((f"{tmp_path / 'size.py'}:size",), isolation="inline")) as pool:
        rewards = StreamedRewards(pool, spelled)
        rewards.begin([EndedResponses(1, PROMPTS[0], len(members), members)])
        (result,) = rewards.collect([1])
    assert result.rewards == [3.25, None, 0.25, 2.25, 0.25, None]
    assert result.parts["size"] == [3.0, None, 0.0, None, None, None], "the functions' own means don't change"
    scored, left_out, crashed = Verdict.SCORED, Verdict.LEFT_OUT, Verdict.CRASHED
    assert result.verdicts == [scored, left_out, scored, scored, scored, crashed]


def test_a_repeated_response_is_scored_once_and_groups_wait_until_they_are_collected():
    noted.CALLS.clear()
    with RewardPool(RewardConfig(NOTED, isolation="inline")) as pool:
        rewards = StreamedRewards(pool, spelled)
        rewards.begin([ended(1, a="x", b="y")])
        rewards.begin([ended(2, a="1", b="2", c="3", d="4")])
        assert len(rewards.collect([2])[0].rewards) == GROUP_SIZE
        # The next step passes on a pending group's ended responses again, then those that end in it.
        rewards.begin([ended(1, a="x", b="y")])
        rewards.begin([ended(1, a="x", c="z", d="w")])
        assert len(rewards.collect([1])[0].rewards) == GROUP_SIZE
    assert noted.CALLS == [["x", "y"], ["1", "2", "3", "4"], ["z", "w"]]
