"""The compiled decoding step gives what the plain one gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from spmdrl.engines.generation.native import compiled
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import SamplingParams
from spmdrl.engines.generation.rollout_config import RolloutConfig
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.resources.layout import GenerationLayout
from tests.engines.generation.schedules import FAMILIES, GREEDY, requests_with, tokens_in, weights_of
from tests.engines.generation.support import run

pytestmark = pytest.mark.cpu_only(reason="it compiles for the CPU")

# Rows that end one by one, so that steps have any number of rows.
SAMPLED = SamplingParams(max_tokens=14, stop_token_ids=(3, 4, 5))


def made(config: DecoderConfig, **rollout: bool) -> NativeEngine:
    return NativeEngine(config, RolloutConfig(block_size=4, **rollout), torch.device("cpu"), torch.float32)


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
            assert tokens_in(found) == tokens_in(expected)
            for row, response in found.items():
                torch.testing.assert_close(response.logprobs, expected[row].logprobs, atol=1e-4, rtol=0)
        plain.sleep(), engine.sleep()


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
    with pytest.raises(ValueError, match="rollout.compile is true, but the model is sparse.*rollout.compile to false"):
        made(FAMILIES["qwen3_moe"], compile=True)
    layout = GenerationLayout(tensor=2)
    with pytest.raises(ValueError, match="resources.generation.tensor is 2"):
        compiled.check_compiles(FAMILIES["qwen3"], layout)

    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton isn't installed.*pip install triton"):
        compiled.check_compiler(torch.device("cuda"))
    compiled.check_compiler(torch.device("xpu"))

    def fail() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fail)
    with pytest.raises(ValueError, match="no C.. compiler was found: install g.."):
        made(FAMILIES["qwen3"], compile=True)
