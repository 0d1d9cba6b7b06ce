"""An answer that was cut off goes on as if it had not been; after a failed step too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder
from spmdrl.engines.generation.protocol import PartialResponse, Request, Response
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from tests.engines.generation.schedules import (
    FAMILIES,
    GREEDY,
    ROUNDING,
    SCHEDULES,
    engine_of,
    requests_with,
    responses_of,
    rest_of,
)
from tests.engines.generation.support import awake_engine, prompt_of, request, run, wake
from tests.support.chosen_device import chosen_device

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=14, stop_token_ids=(3,))


def run_in_rounds(engine: NativeEngine, requests: Sequence[Request], steps_each: int) -> dict[int, Response]:
    """Abort after every few steps and hand in the rest again."""
    responses: dict[int, Response] = {}
    for _ in range(40):
        engine.submit(requests)
        for _ in range(steps_each):
            responses |= {response.row: response for response in engine.step()}
        requests = rest_of(requests, engine.abort())
        if not requests:
            break
    return responses


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_aborted_again_and_again_equal_uninterrupted_ones(schedule, sampling) -> None:
    config, requests = FAMILIES["qwen3"], requests_with(sampling)
    whole = responses_of(engine_of(config, SCHEDULES["at once"]), SCHEDULES["at once"], requests)
    # As many steps as small chunks and a tight cache take to bring any row further.
    rounds = run_in_rounds(engine_of(config, schedule), requests, steps_each=22)
    assert rounds.keys() == whole.keys()
    for row, response in rounds.items():
        assert (response.token_ids, response.finish) == (whole[row].token_ids, whole[row].finish)
        torch.testing.assert_close(response.logprobs, whole[row].logprobs, **ROUNDING)


def test_tokens_keep_their_versions_and_logprobs_over_an_abort() -> None:
    engine = awake_engine()
    engine.version = 3
    engine.submit([request(prompt_of(6), [5, 6], SAMPLED)])
    engine.step()
    aborted = engine.abort()
    assert all(response.versions == (3, 3) for response in aborted)
    engine.version = 4
    resumed = run(engine, rest_of([request(prompt_of(6), [5, 6], SAMPLED)], aborted))
    for before in aborted:
        after = resumed[before.row]
        assert after.logprobs[:2] == before.logprobs
        assert after.versions == (3, 3) + (4,) * (len(after.token_ids) - 2)


def test_a_partial_response_must_be_whole_and_one_a_row() -> None:
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs and 2 versions"):
        PartialResponse((1, 2), (-1.0,), (0, 0))
    with pytest.raises(ValueError, match="2 rows and 1 partial responses"):
        replace(request(prompt_of(3), [0, 1], GREEDY), partial=(PartialResponse((), (), ()),))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_recorded_experts_are_those_of_an_undisturbed_row(schedule) -> None:
    config, requests = FAMILIES["qwen3_moe"], requests_with(SAMPLED)
    plain = responses_of(
        engine_of(config, SCHEDULES["at once"], recorder=ChoiceRecorder()), SCHEDULES["at once"], requests
    )
    disturbed = responses_of(engine_of(config, schedule, recorder=ChoiceRecorder()), schedule, requests)
    aborted = run_in_rounds(engine_of(config, schedule, recorder=ChoiceRecorder()), requests, steps_each=22)
    for row, response in plain.items():
        assert response.choices is not None
        for other in (disturbed[row], aborted[row]):
            assert torch.equal(other.choices, response.choices)


def test_experts_recorded_before_an_abort_are_kept_under_other_weights() -> None:
    engine = engine_of(FAMILIES["qwen3_moe"], SCHEDULES["at once"], recorder=ChoiceRecorder())
    requests = [request(prompt_of(6), [0, 1], GREEDY)]
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    before = engine.abort()
    for name, weight in engine.wake_weights().items():
        if name.endswith("gate.weight"):
            weight.neg_()
    resumed = run(engine, rest_of(requests, before))
    unkept = [replace(part, choices=None) for part in before]
    anew = run(engine, rest_of(requests, unkept))
    for old in before:
        assert old.choices is not None
        assert torch.equal(resumed[old.row].choices[: len(old.choices)], old.choices)
        assert not torch.equal(anew[old.row].choices[: len(old.choices)], old.choices)
        assert resumed[old.row].choices.shape == anew[old.row].choices.shape


@pytest.mark.on_device
def test_after_a_failed_step_abort_returns_the_tokens_and_the_engine_works_again() -> None:
    requests = [request(prompt_of(length), [2 * length, 2 * length + 1], GREEDY) for length in (6, 9)]
    whole = run(awake_engine(), requests)
    engine = awake_engine(max_running_rows=3)
    engine.submit(requests)
    engine.step()
    engine.step()
    engine.wake_weights()["model.layers.0.self_attn.v_proj.weight"].fill_(float("nan"))
    with pytest.raises(RuntimeError, match="aren't finite"):
        engine.step()
    for use in (engine.step, lambda: engine.submit([request(prompt_of(3), [0], SAMPLED)])):
        with pytest.raises(RuntimeError, match="its last step failed; abort"):
            use()
    aborted = engine.abort()
    assert [len(response.token_ids) for response in aborted] == [3, 3, 3, 0]
    # The cache had keys and values that aren't finite, and masked ones count as 0 only if they are.
    wake(engine)
    resumed = run(engine, rest_of(requests, aborted))
    assert {row: response.token_ids for row, response in resumed.items()} == {
        row: response.token_ids for row, response in whole.items()
    }


def test_a_failing_submit_leaves_the_engine_as_it_was() -> None:
    engine = awake_engine(kv_cache_gib=3e-5)
    fits, too_long = request(prompt_of(5), [0], GREEDY), request(prompt_of(100), [1], GREEDY)
    with pytest.raises(ValueError, match="row 1 can need"):
        engine.submit([fits, too_long])
    assert not engine.num_unfinished
    assert run(engine, [fits])[0] == run(awake_engine(), [fits])[0]


def test_a_cache_too_small_for_two_blocks_is_refused() -> None:
    engine = NativeEngine(FAMILIES["qwen3"], RolloutConfig(kv_cache_gib=1e-6), chosen_device(), torch.float32)
    engine.wake_weights()
    with pytest.raises(ValueError, match="rollout.kv_cache_gib 1e-06 leaves 1073 bytes for the KV cache"):
        engine.wake_cache()
