"""The compiled decoding step gives what the plain one gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from spmdrl.engines.generation.expert_choices import ChoiceRecorder
from spmdrl.engines.generation.native import compiled
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Response, SamplingParams
from spmdrl.engines.generation.rollout_config import RolloutConfig
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.resources.layout import GenerationLayout
from spmdrl.resources.mesh import GenerationMesh, build_generation_mesh
from spmdrl.resources.world import World
from tests.engines.generation.schedules import FAMILIES, GREEDY, requests_with, tokens_in, weights_of
from tests.engines.generation.support import run
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.cpu_only(reason="it compiles for the CPU")

# Rows that end one by one, so that steps have any number of rows.
SAMPLED = SamplingParams(max_tokens=14, stop_token_ids=(3, 4, 5))


def made(config: DecoderConfig, mesh: GenerationMesh | None = None, **rollout: int) -> NativeEngine:
    recorder = None if config.moe is None else ChoiceRecorder()
    settings = RolloutConfig(block_size=4, **rollout)
    return NativeEngine(config, settings, torch.device("cpu"), torch.float32, mesh=mesh, recorder=recorder)


def fill(engine: NativeEngine, scale: float = 1.0) -> NativeEngine:
    engine.load_weights((name, scale * weight) for name, weight in weights_of(engine._config).items())
    engine.wake_cache()
    return engine


@pytest.mark.parametrize("packs", [True, False])
def test_any_number_of_rows_and_new_weights(packs) -> None:
    config = replace(FAMILIES["qwen2"], num_layers=1)
    plain, engine = made(config), made(config, compile=True, pack_weights=packs)
    for scale in (1.0, -1.0):
        fill(plain, scale), fill(engine, scale)
        for sampling in (GREEDY, SAMPLED):
            requests = requests_with(sampling)
            expected, found = (run(which, requests) for which in (plain, engine))
            assert_alike(found, expected)
        plain.sleep(), engine.sleep()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "draft_tokens"), [("qwen3_moe", 0), ("deepseek_v3", 6)])
def test_sparse_layers_choose_the_experts_that_they_choose_without_a_graph(family, draft_tokens) -> None:
    # Two of the layers are sparse.
    config = replace(FAMILIES[family], num_layers=3)
    # Smaller, as what is rounded otherwise grows from layer to layer.
    plain, engine = fill(made(config), 0.5), made(config, compile=True, draft_tokens=draft_tokens, draft_match=1)
    fill(engine, 0.5)
    for sampling in (GREEDY, SAMPLED):
        expected, found = (run(which, requests_with(sampling)) for which in (plain, engine))
        assert_alike(found, expected)
        assert all(found[row].choices.equal(expected[row].choices) for row in expected)
    assert bool(engine.take_draft_counts()[0]) == bool(draft_tokens)


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_that_share_experts_each_have_a_graph() -> None:
    config = FAMILIES["qwen3_moe"]
    expected = run(fill(made(config)), requests_with(SAMPLED))
    found: dict[int, Response] = {}
    for one in run_ranks(2, shared_experts_answers, config):
        found |= one
    assert_alike(found, expected)
    assert all(found[row].choices.equal(expected[row].choices) for row in expected)


def shared_experts_answers(world: World, config: DecoderConfig) -> dict[int, Response]:
    """Responses to this rank's prompts: to one, which ends first, or to all others."""
    mesh = build_generation_mesh(GenerationLayout(expert=2), world.device, world.size, world.rank)
    engine = fill(made(config, mesh, compile=True))
    first, *others = requests_with(SAMPLED)
    engine.submit([first] if world.rank == 0 else others)
    responses: list[Response] = []
    while engine.has_work:
        responses += engine.step()
    return {response.row: response for response in responses}


def assert_alike(found: dict[int, Response], expected: dict[int, Response]) -> None:
    assert tokens_in(found) == tokens_in(expected)
    for row, response in found.items():
        torch.testing.assert_close(response.logprobs, expected[row].logprobs, atol=1e-4, rtol=0)


def test_engines_share_no_graph() -> None:
    """Neither of two models of different sizes in one process runs the other's."""
    llama = replace(FAMILIES["llama"], num_layers=1)
    configs = [llama, replace(llama, intermediate_size=64)]
    engines = [fill(made(config, compile=True)) for config in configs]
    expected = [tokens_in(run(fill(made(config)), requests_with(GREEDY))) for config in configs]
    assert expected[0] != expected[1]
    for _ in range(2):
        assert [tokens_in(run(engine, requests_with(GREEDY))) for engine in engines] == expected


def test_what_cannot_be_compiled_is_refused_with_a_way_out(monkeypatch) -> None:
    layout = GenerationLayout(tensor=2, expert=2)
    with pytest.raises(ValueError, match="generation.tensor is 2.* set rollout.compile to false, or .*tensor to 1"):
        compiled.check_compiles(layout)

    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton isn't installed.*pip install triton"):
        compiled.check_compiler(torch.device("cuda"))
    compiled.check_compiler(torch.device("xpu"))

    def fail() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fail)
    with pytest.raises(ValueError, match="no C.. compiler was found: install g.."):
        made(FAMILIES["qwen3"], compile=True)
