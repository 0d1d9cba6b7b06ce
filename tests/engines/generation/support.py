"""A tiny engine, its weights, and a loop that runs it to the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Decode, GenerationEngine, Request, Response, SamplingParams
from spmdrl.engines.generation.rollout_config import RolloutConfig
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.making.make_model import RandomWeights

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


def make_engine(rollout: RolloutConfig, config: DecoderConfig = TINY, decode: Decode | None = None) -> NativeEngine:
    """An engine that sleeps."""
    return NativeEngine(config, rollout, torch.device("cpu"), torch.float32, decode=decode)


def wake(engine: NativeEngine, seed: int = 0) -> NativeEngine:
    weights = RandomWeights(TINY, seed)
    # Larger than the usual initial weights, so that the next token depends on the earlier ones.
    engine.load_weights((name, 4 * weights(name)) for name in engine.weight_shapes())
    engine.wake_cache()
    return engine


def awake_engine(**rollout: object) -> NativeEngine:
    return wake(make_engine(RolloutConfig(**{"block_size": 4, **rollout})))


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


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(TINY.vocab_size, (length,), generator=generator).tolist())
