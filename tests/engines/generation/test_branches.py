"""Rows of a group whose tokens are the same so far are fed once, and get what they get alone."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from spmdrl.engines.generation.native.forward import CachedDecoder
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.nouns.settings.rollout_config import SamplingParams
from tests.engines.generation.schedules import FAMILIES, ROUNDING, SCHEDULES, engine_of
from tests.engines.generation.support import awake_engine, prompt_of, request, run

PROMPT = prompt_of(7)
# Peaked, so that rows go on alike for a while.
PEAKED = SamplingParams(temperature=0.25, max_tokens=12, stop_token_ids=(3,))


def alone(sampling: SamplingParams, num_rows: int) -> list[Request]:
    """The rows of a group as requests of one row each."""
    return [request(PROMPT, [row], sampling) for row in range(num_rows)]


def num_prefixes(responses: Iterable[Response]) -> int:
    """Distinct beginnings behind which a token was drawn by decoding: all but the last token of each row ends one."""
    return len({one.token_ids[:stop] for one in responses for stop in range(1, len(one.token_ids))})


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each decoding step was fed."""
    counts: list[int] = []
    decode = CachedDecoder.decode

    def counted(self: CachedDecoder, tokens):
        counts.append(len(tokens))
        return decode(self, tokens)

    monkeypatch.setattr(CachedDecoder, "decode", counted)
    return counts


@pytest.mark.cpu_only(reason="steps that are captured have a place for each row")
@pytest.mark.parametrize("block_size", [4, 32])
def test_each_beginning_is_fed_once_and_rows_get_what_they_get_alone(fed, block_size) -> None:
    expected = run(awake_engine(block_size=block_size, max_running_rows=1), alone(PEAKED, 9))
    fed.clear()
    found = run(awake_engine(block_size=block_size), [request(PROMPT, range(9), PEAKED)])
    assert found == expected
    assert sum(fed) == num_prefixes(found.values()) < 0.8 * sum(len(one.token_ids) - 1 for one in found.values())
    assert len({one.token_ids for one in found.values()}) > 2


@pytest.mark.cpu_only(reason="steps that are captured have a place for each row")
def test_greedy_rows_are_one_to_their_end(fed) -> None:
    found = run(awake_engine(), [request(PROMPT, range(6), SamplingParams(temperature=0, max_tokens=9))])
    assert len({one.token_ids for one in found.values()}) == 1
    assert fed == [1] * 8


def test_rows_that_leave_each_other_take_their_own_blocks_where_few_are_left() -> None:
    requests = [request(PROMPT, range(9), PEAKED), request(prompt_of(5), range(9, 14), PEAKED)]
    expected = run(awake_engine(), requests)
    [block_bytes] = awake_engine()._cache.block_bytes.values()
    found = run(awake_engine(kv_cache_gib=9 * block_bytes / 2**30), requests)
    for row, one in expected.items():
        assert found[row].token_ids == one.token_ids
        # Rows that had to wait are computed from their beginnings.
        torch.testing.assert_close(found[row].logprobs, one.logprobs, **ROUNDING)


def test_each_row_of_a_branch_records_the_experts_of_its_tokens() -> None:
    def answers(requests: list[Request]) -> dict[int, Response]:
        return run(engine_of(FAMILIES["qwen3_moe"], SCHEDULES["at once"], recorder=ChoiceRecorder()), requests)

    found, expected = answers([request(PROMPT, range(6), PEAKED)]), answers(alone(PEAKED, 6))
    for row, one in expected.items():
        assert found[row].token_ids == one.token_ids
        torch.testing.assert_close(found[row].logprobs, one.logprobs, **ROUNDING)
        assert found[row].choices is not None and torch.equal(found[row].choices, one.choices)
