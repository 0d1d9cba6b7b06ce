"""Guesses change nothing but the number of steps: tokens, log-probs, versions and expert choices are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmdrl.engines.generation.expert_choices import ChoiceRecorder
from spmdrl.engines.generation.native.graphs.graph_steps import wants_graphs
from spmdrl.engines.generation.protocol import PartialResponse, Request, Response, SamplingParams
from spmdrl.engines.generation.rollout_config import RolloutConfig
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.resources.layout import GenerationLayout
from spmdrl.resources.mesh import lone_generation_mesh
from tests.engines.generation.schedules import (
    FAMILIES,
    PROMPTS,
    ROUNDING,
    SCHEDULES,
    Schedule,
    engine_of,
    requests_with,
    responses_of,
    weights_of,
)
from tests.engines.generation.support import TINY, make_engine, prompt_of, request, run, small_rollout

SAMPLED = SamplingParams(max_tokens=14, stop_token_ids=(3, 4))
GREEDY = SamplingParams(temperature=0, max_tokens=14)


def drafting(schedule: Schedule, **settings: int) -> Schedule:
    return replace(schedule, rollout=schedule.rollout | {"draft_tokens": 6, "draft_match": 1, **settings})


def repeating(config: DecoderConfig) -> dict[str, Tensor]:
    """Weights by which most tokens, but not all, are the one before them once more."""
    weights = weights_of(config)
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] = torch.ones_like(weights[name])
        elif "down_proj" in name or "o_proj" in name:
            weights[name] *= 0.002 if "down_proj" in name else 0.02
    assert config.tied_head
    weights["model.embed_tokens.weight"] *= 4
    return weights


def engine_that_repeats(config: DecoderConfig, schedule: Schedule, recorder: ChoiceRecorder | None = None):
    engine = engine_of(config, schedule, lone_generation_mesh(), recorder)
    engine.sleep()
    engine.load_weights(repeating(config).items())
    engine.wake_cache()
    return engine


def assert_equal(found: dict[int, Response], expected: dict[int, Response]) -> None:
    assert {row: (one.token_ids, one.finish, one.versions) for row, one in found.items()} == {
        row: (one.token_ids, one.finish, one.versions) for row, one in expected.items()
    }
    for row, response in found.items():
        torch.testing.assert_close(response.logprobs, expected[row].logprobs, **ROUNDING)


@pytest.mark.on_device
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_drafts(family: str, schedule: str) -> None:
    config = FAMILIES[family]
    for sampling in (SAMPLED, GREEDY):
        at_once, how = SCHEDULES["at once"], drafting(SCHEDULES[schedule])
        expected = responses_of(engine_that_repeats(config, at_once), at_once, requests_with(sampling))
        engine = engine_that_repeats(config, how)
        assert_equal(responses_of(engine, how, requests_with(sampling)), expected)
        if schedule == "at once":
            guessed, right = engine.take_draft_counts()
            assert 20 < right <= guessed and (right < guessed or sampling is GREEDY)
            assert engine.take_draft_counts() == (0, 0)


@pytest.mark.cpu_only(reason="other devices round a row by what is beside it")
def test_log_probs_are_the_same_to_the_bit_on_a_cpu() -> None:
    requests = requests_with(SAMPLED)
    expected, found = (
        run(engine_that_repeats(TINY, how), requests) for how in (SCHEDULES["at once"], drafting(Schedule({})))
    )
    assert {row: one.logprobs for row, one in found.items()} == {row: one.logprobs for row, one in expected.items()}


def test_a_row_takes_over_what_its_group_wrote() -> None:
    """The second of two greedy rows of a prompt takes fewer steps than the first, which repeats nothing."""
    sampling, steps = replace(GREEDY, max_tokens=40), []
    engine = engine_of(TINY, Schedule({"max_running_rows": 9, "draft_tokens": 8, "draft_match": 2}))
    whole = run(engine_of(TINY, Schedule({})), [request(PROMPTS[0], [0], sampling)])[0]
    begun = PartialResponse(whole.token_ids[:-4], whole.logprobs[:-4], whole.versions[:-4])
    engine.submit([Request((0, 1), PROMPTS[0], (7, 8), sampling, (begun, PartialResponse((), (), ())))])
    ended = []
    while engine.has_work:
        ended += engine.step()
        steps.append(len(ended))
    assert [response.token_ids for response in ended] == [whole.token_ids] * 2
    assert len(steps) < 20, "steps of a row of 40 tokens"


def test_guesses_take_only_the_places_of_rows_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_that_repeats(TINY, Schedule({"draft_tokens": 8, "draft_match": 1, "max_running_rows": 10}))
    fed, decode = [], engine._forward.decode
    monkeypatch.setattr(engine._forward, "decode", lambda tokens: fed.append(len(tokens)) or decode(tokens))
    run(engine, requests_with(GREEDY))
    assert 1 < max(fed) <= 10


@pytest.mark.cpu_only(reason="a guess costs a CPU more than other devices, so that fewer are made")
def test_rows_that_are_guessed_wrongly_are_left_alone_and_sooner_the_more_of_them_run() -> None:
    # At such a temperature every token is about as likely.
    random = SamplingParams(temperature=100.0, max_tokens=100)
    guesses_a_token = {}
    for num_rows in (4, 32):
        engine = engine_of(TINY, Schedule({"draft_tokens": 8, "draft_match": 1, "max_running_rows": 256}))
        run(engine, [request(prompt_of(9), list(range(num_rows)), random)])
        guessed, right = engine.take_draft_counts()
        assert right < 0.1 * guessed
        guesses_a_token[num_rows] = guessed / (100 * num_rows)
    assert guesses_a_token[32] < 0.05 and guesses_a_token[32] < guesses_a_token[4] < 0.4


def test_stop_strings_end_a_row_in_the_midst_of_guesses() -> None:
    def text(tokens: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)

    def answered(sampling: SamplingParams, **settings: int) -> dict[int, Response]:
        engine = make_engine(small_rollout(**settings), decode=text)
        engine.load_weights(repeating(TINY).items())
        engine.wake_cache()
        return run(engine, requests_with(sampling))

    sampling = replace(SAMPLED, max_tokens=40)
    sampling = replace(sampling, stop_strings=(text(answered(sampling)[0].token_ids)[8:12],))
    expected = answered(sampling)
    assert any(one.finish == "stop" for one in expected.values())
    assert_equal(answered(sampling, draft_tokens=8, draft_match=1), expected)


def test_expert_choices_are_those_of_the_tokens_that_stay() -> None:
    config = FAMILIES["qwen3_moe"]

    def answered(how: Schedule) -> dict[int, Response]:
        return run(engine_that_repeats(config, how, ChoiceRecorder()), requests_with(SAMPLED))

    expected, found = answered(Schedule({})), answered(drafting(Schedule({})))
    assert_equal(found, expected)
    for row, response in found.items():
        assert response.choices.equal(expected[row].choices)


def test_an_aborted_row_goes_on_with_drafts() -> None:
    (one,) = requests = [request(PROMPTS[0], [0, 1, 2, 3], replace(SAMPLED, stop_token_ids=()))]
    expected = run(engine_that_repeats(TINY, Schedule({})), requests)
    engine = engine_that_repeats(TINY, drafting(Schedule({})))
    engine.submit(requests)
    assert not [*engine.step(), *engine.step(), *engine.step()]
    left = {response.row: response for response in engine.abort()}
    begun = tuple(PartialResponse(left[row].token_ids, left[row].logprobs, left[row].versions) for row in one.rows)
    assert_equal(run(engine, [replace(one, partial=begun)]), expected)


def test_steps_with_guesses_are_not_captured_as_graphs() -> None:
    device, layout = torch.device("cuda"), GenerationLayout()
    assert not wants_graphs(RolloutConfig(draft_tokens=4), TINY, layout, device)
    with pytest.raises(ValueError, match="cuda_graphs is true, but rollout.draft_tokens is 4"):
        wants_graphs(RolloutConfig(draft_tokens=4, cuda_graphs=True), TINY, layout, device)
