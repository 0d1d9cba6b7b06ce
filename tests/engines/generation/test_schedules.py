"""Whatever the schedule, a row gets the same tokens: those of transformers' `generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import hf_config_dict, stored_forms
from spmdrl.engines.models.hf.model_weights import write_weights
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.resources.layout import GenerationLayout
from spmdrl.resources.mesh import build_generation_mesh
from spmdrl.resources.world import World
from tests.engines.generation.schedules import (
    FAMILIES,
    GREEDY,
    PROMPTS,
    ROUNDING,
    SCHEDULES,
    engine_of,
    requests_with,
    responses_of,
    tokens_in,
    weights_of,
)
from tests.support.ranks import run_ranks

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=14, stop_token_ids=(3,))
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def generate(folder: Path, config: DecoderConfig) -> dict[int, tuple[int, ...]]:
    """What transformers answers to the prompts, greedily."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config_dict(config, torch.float32)))
    write_weights(folder, weights_of(config).items(), forms=stored_forms(config))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = {}
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY.max_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        expected[2 * number] = expected[2 * number + 1] = tuple(tokens[0, len(prompt) :].tolist())
    return expected


@pytest.fixture(scope="module")
def expected_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[int, tuple[int, ...]]]]:
    folder = tmp_path_factory.mktemp("models")
    yield {family: generate(folder / family, config) for family, config in FAMILIES.items()}


@each_schedule
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_generate(family, schedule, expected_of) -> None:
    engine = engine_of(FAMILIES[family], schedule)
    assert len(set(expected_of[family].values())) >= 4
    assert tokens_in(responses_of(engine, schedule, requests_with(GREEDY))) == expected_of[family]


@each_schedule
def test_sampled_rows_are_the_same_in_every_schedule(schedule) -> None:
    config, requests = FAMILIES["qwen3"], requests_with(SAMPLED)
    expected = responses_of(engine_of(config, SCHEDULES["at once"]), SCHEDULES["at once"], requests)
    responses = responses_of(engine_of(config, schedule), schedule, requests)
    assert tokens_in(responses) == tokens_in(expected)
    assert len({response.token_ids for response in responses.values()}) > 6
    for row, response in responses.items():
        torch.testing.assert_close(response.logprobs, expected[row].logprobs, **ROUNDING)
        assert response.finish == expected[row].finish


def test_a_tight_cache_preempts_rows_and_a_roomy_one_does_not() -> None:
    preempted = {}
    for name in ("at once", "preempted"):
        engine = engine_of(FAMILIES["qwen3"], SCHEDULES[name])
        engine.submit(requests_with(SAMPLED))
        ran, preempted[name] = set(), set()
        while engine.num_unfinished:
            ended = {response.row for response in engine.step()}
            ran |= set(engine._steps.scheduler.running)
            preempted[name] |= ran - set(engine._steps.scheduler.running) - ended
            ran -= ended
    assert not preempted["at once"] and len(preempted["preempted"]) > 1


@pytest.mark.ranks
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_text",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4_text")
        ),
    ],
)
def test_tensor_parallel_ranks_schedule_alike(family, expected_of) -> None:
    for tokens in run_ranks(2, answers_of_tensor_ranks, family):
        assert tokens == dict.fromkeys(SCHEDULES, expected_of[family])


def answers_of_tensor_ranks(world: World, family: str) -> dict[str, dict[int, tuple[int, ...]]]:
    mesh = build_generation_mesh(GenerationLayout(tensor=2), world.device, world.size, world.rank)
    return {
        name: tokens_in(responses_of(engine_of(FAMILIES[family], schedule, mesh), schedule, requests_with(GREEDY)))
        for name, schedule in SCHEDULES.items()
    }


@pytest.mark.ranks
def test_replicas_that_share_experts_need_not_have_chunks_at_the_same_time(expected_of) -> None:
    busy, idle = run_ranks(2, answers_of_expert_ranks)
    expected = expected_of["qwen3_moe"]
    assert busy == {row: expected[row] for row in range(2, 10)} and idle == {row: expected[row] for row in range(2)}


def answers_of_expert_ranks(world: World) -> dict[int, tuple[int, ...]]:
    mesh = build_generation_mesh(GenerationLayout(expert=2), world.device, world.size, world.rank)
    schedule = replace(SCHEDULES["preempted"], rollout={"max_prefill_tokens": 5})
    engine = engine_of(FAMILIES["qwen3_moe"], schedule, mesh)
    requests = requests_with(GREEDY)
    engine.submit(requests[:1] if mesh.replica else requests[1:])
    responses = []
    while engine.has_work:
        responses += engine.step()
    return tokens_in({response.row: response for response in responses})
