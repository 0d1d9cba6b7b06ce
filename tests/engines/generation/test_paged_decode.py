"""Decoding that reads pages where they lie gives what decoding that copies them out gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.ops import TABLE
from spmdrl.nouns.settings.rollout_config import SamplingParams
from tests.engines.generation.schedules import FAMILIES, SCHEDULES, engine_of, requests_with, responses_of, tokens_in

SAMPLED = SamplingParams(max_tokens=14, stop_token_ids=(3, 4, 5))


@pytest.mark.parametrize("schedule", ["at once", "all of it"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_read_where_they_lie(
    family: str, schedule: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(how: str):
        return responses_of(engine_of(FAMILIES[family], SCHEDULES[how]), SCHEDULES[how], requests_with(SAMPLED))

    with monkeypatch.context() as copying:
        copying.setitem(TABLE["paged_attention"], device.type, plain.paged_attention)
        expected, calls = finish("at once"), []

    def paged_attention(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return own(*arguments)

    own = TABLE["paged_attention"].get(device.type, plain.paged_attention)
    monkeypatch.setitem(TABLE["paged_attention"], device.type, paged_attention)
    found = finish(schedule)
    assert calls and all(tables.dtype == lengths.dtype == torch.int32 for _, _, _, tables, lengths, *_ in calls)
    assert tokens_in(found) == tokens_in(expected)
    for row, response in found.items():
        torch.testing.assert_close(response.logprobs, expected[row].logprobs, atol=1e-4, rtol=0)
