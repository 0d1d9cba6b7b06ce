"""A tiny engine, its weights, and a loop that runs it to the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Decode, GenerationEngine, Request, Response
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from tests.support.chosen_device import chosen_device, chosen_kind
from tests.support.tuned import TunedRollout

TINY = DecoderConfig(
    model_type="qwen3",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    rms_eps=1e-6,
    rope_theta=10000.0,
    qk_norm=True,
    attention_bias=False,
    tied_head=True,
    max_positions=128,
)


def small_rollout(**settings: Any) -> RolloutConfig:
    """Small blocks, and a small cache where it is allocated whole: a test has several engines awake."""
    if chosen_kind() != "cpu":
        # Graphs end a response one step later; tests of them ask for them.
        settings = {"kv_cache_gib": 2**-8, "cuda_graphs": False, **settings}
    return TunedRollout(**{"block_size": 4, **settings})


def make_engine(rollout: RolloutConfig, config: DecoderConfig = TINY, decode: Decode | None = None) -> NativeEngine:
    """An engine that sleeps."""
    return NativeEngine(config, rollout, chosen_device(), torch.float32, decode=decode)


def wake(engine: NativeEngine, seed: int = 0) -> NativeEngine:
    weights = RandomWeights(TINY, seed)
    # Larger than the usual initial weights, so that the next token depends on the earlier ones.
    engine.load_weights((name, 4 * weights(name)) for name in engine.weight_shapes())
    engine.wake_cache()
    return engine


def awake_engine(**rollout: object) -> NativeEngine:
    return wake(make_engine(small_rollout(**rollout)))


def request(
    prompt: Sequence[int], rows: Sequence[int], sampling: SamplingParams, seeds: Sequence[int] | None = None
) -> Request:
    return Request(tuple(rows), tuple(prompt), tuple(rows if seeds is None else seeds), sampling)


def run(engine: GenerationEngine, requests: Sequence[Request]) -> dict[int, Response]:
    """Submit, step to the end, and return the responses by row."""
    engine.submit(requests)
    responses: dict[int, Response] = {}
    while engine.num_unfinished:
        for response in engine.step():
            assert response.row not in responses
            responses[response.row] = response
    return responses


def assert_same_answers(found: dict[int, Response], expected: dict[int, Response]) -> None:
    """Equal on a CPU; elsewhere attention may round a row's log-probs by what is beside it."""
    if chosen_kind() == "cpu":
        assert found == expected
        return
    assert {row: response.token_ids for row, response in found.items()} == {
        row: response.token_ids for row, response in expected.items()
    }
    for row, response in found.items():
        torch.testing.assert_close(response.logprobs, expected[row].logprobs, atol=1e-5, rtol=0)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(TINY.vocab_size, (length,), generator=generator).tolist())
