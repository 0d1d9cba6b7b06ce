"""Tiny models of each family, prompts of which some begin alike, and ways to run them through the native engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.native.paged import block_bytes_of
from spmdrl.engines.generation.native.row_memory import BlockCounts, added
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder
from spmdrl.engines.generation.protocol import PartialResponse, Request, Response
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import RandomWeights, decoder_config
from spmdrl.engines.models.mixers import StateKind
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from spmdrl.resources.mesh import GenerationMesh
from tests.engines.generation.support import TINY, prompt_of, request, run, small_rollout
from tests.support.chosen_device import chosen_device
from tests.support.made import latent_decoder

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 128}
FAMILIES = {
    "llama": replace(TINY, model_type="llama", qk_norm=False),
    "qwen2": replace(TINY, model_type="qwen2", qk_norm=False, attention_bias=True),
    "qwen3": TINY,
    "qwen3_moe": decoder_config(MakeConfig(model_type="qwen3_moe", first_k_dense_replace=1, **SIZES)),
    "deepseek_v3": latent_decoder(value_size=6, query_rank=8, **SIZES),
    "glm4_moe": decoder_config(MakeConfig(model_type="glm4_moe", **SIZES)),
    # Windows that all but one of the rows outgrow.
    "gpt_oss": decoder_config(MakeConfig(model_type="gpt_oss", sliding_window=6, **SIZES)),
    "gemma3_text": decoder_config(MakeConfig(model_type="gemma3_text", sliding_window=5, **SIZES)),
    "gemma4_text": decoder_config(MakeConfig(model_type="gemma4_text", sliding_window=5, **SIZES)),
    "qwen3_5_text": decoder_config(MakeConfig(model_type="qwen3_5_text", **SIZES)),
    "qwen3_next": decoder_config(MakeConfig(model_type="qwen3_next", **SIZES)),
}
# Log-probs of these large weights in chunks or steps of other sizes: 1e-5 on some processors, 5e-7 on others.
ROUNDING = {"atol": 5e-5, "rtol": 0}
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=14)
# Three begin alike, one of them with all of another.
PROMPTS = [prompt_of(9), (*prompt_of(9), *prompt_of(4)), prompt_of(1), (*prompt_of(9), *prompt_of(33)), prompt_of(23)]


@dataclass(frozen=True)
class Schedule:
    """A way to run the same rows."""

    rollout: dict[str, int]
    is_tight: bool = False
    """Whether the cache holds little more than the longest row."""
    one_by_one: bool = False
    """Whether requests come last first, one per step."""


SCHEDULES = {
    "at once": Schedule({}),
    "few slots": Schedule({"max_running_rows": 3}),
    "small chunks": Schedule({"max_prefill_tokens": 3}),
    "late arrivals": Schedule({"max_prefill_tokens": 16}, one_by_one=True),
    "preempted": Schedule({"max_prefill_tokens": 50}, is_tight=True),
    "all of it": Schedule({"max_prefill_tokens": 7, "max_running_rows": 8}, is_tight=True, one_by_one=True),
}


def weights_of(config: DecoderConfig) -> dict[str, Tensor]:
    weights = RandomWeights(config, seed=0)
    # Larger than the usual initial weights, so that the next token depends on the earlier ones.
    return {name: 4 * weights(name) for name in weights.names}


def engine_of(
    config: DecoderConfig,
    schedule: Schedule,
    mesh: GenerationMesh | None = None,
    recorder: ChoiceRecorder | None = None,
) -> NativeEngine:
    engine = NativeEngine(
        config, rollout_of(config, schedule, 1 if mesh is None else mesh.tensor.size), chosen_device(),
        torch.float32, mesh=mesh, recorder=recorder,
    )  # fmt: skip
    engine.load_weights(weights_of(config).items())
    engine.wake_cache()
    return engine


def rollout_of(config: DecoderConfig, schedule: Schedule, tensor: int) -> RolloutConfig:
    rollout = small_rollout(block_size=BLOCK_SIZE, **schedule.rollout)
    if not schedule.is_tight:
        return rollout
    block_bytes = block_bytes_of([mixer.state(tensor) for mixer in config.mixers], BLOCK_SIZE, torch.float32)
    num_blocks = 1 + -(-(max(map(len, PROMPTS)) + GREEDY.max_tokens - 1) // BLOCK_SIZE) + 3
    cache_bytes = num_blocks * block_bytes[StateKind()]
    if len(block_bytes) > 1:
        # Windows and slots for two rows and a prompt, which are half of the cache.
        counts = BlockCounts.of(list(block_bytes), rollout)
        held = added(*2 * [counts.held(1000)], counts.held(1000, rollout.max_prefill_tokens), [1] * len(block_bytes))
        pairs = zip(held, block_bytes.items(), strict=True)
        bounded = sum(count * size for count, (kind, size) in pairs if kind != StateKind())
        # A block more: the half is rounded down.
        cache_bytes = 2 * max(cache_bytes, bounded) + sum(block_bytes.values())
    return replace(rollout, kv_cache_gib=cache_bytes / 2**30)


def requests_with(sampling: SamplingParams) -> list[Request]:
    return [request(prompt, [2 * number, 2 * number + 1], sampling) for number, prompt in enumerate(PROMPTS)]


def responses_of(engine: NativeEngine, schedule: Schedule, requests: Sequence[Request]) -> dict[int, Response]:
    if not schedule.one_by_one:
        return run(engine, requests)
    responses = []
    for joining in requests[::-1]:
        engine.submit([joining])
        responses += engine.step()
    while engine.has_work:
        responses += engine.step()
    assert len(responses) == 2 * len(requests)
    return {response.row: response for response in responses}


def tokens_in(responses: dict[int, Response]) -> dict[int, tuple[int, ...]]:
    return {row: responses[row].token_ids for row in sorted(responses)}


def partial_of(response: Response) -> PartialResponse:
    return PartialResponse(response.token_ids, response.logprobs, response.versions, response.choices)


def rest_of(requests: Sequence[Request], aborted: Sequence[Response]) -> list[Request]:
    """The requests of the aborted rows, each with its tokens so far."""
    responses = {response.row: response for response in aborted}
    rest = []
    for whole in requests:
        left = [(row, seed) for row, seed in zip(whole.rows, whole.seeds, strict=True) if row in responses]
        if left:
            rows, seeds = zip(*left, strict=True)
            partial = tuple(partial_of(responses[row]) for row in rows)
            rest.append(replace(whole, rows=rows, seeds=seeds, partial=partial))
    return rest
