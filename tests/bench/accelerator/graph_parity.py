"""Decoding steps as graphs beside the same steps started kernel by kernel: log-probs of what they draw, and time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from spmdrl.verbs.doctor.device_verbs import device_seconds
from spmdrl.verbs.doctor.stage_run import Scale, StageRun
from tests.bench.accelerator.decoding import random_engine
from tests.bench.harness.bench_models import QWEN_0_5B, TINY

# In nats, between a token's log-prob when it was drawn and when its whole row is rated; attention sums otherwise there.
_LARGEST_DISTANCE = {torch.float32: 1e-3, torch.bfloat16: 0.02}


@dataclass(frozen=True)
class GraphSizes:
    """Rows that end one after another, so that steps shrink through all sizes."""

    model: DecoderConfig
    num_rows: int
    prompt_length: int
    tokens_per_row: int
    """more in each row than in the last"""


_SIZES: dict[Scale, GraphSizes] = {
    "full": GraphSizes(QWEN_0_5B, 96, 64, 2),
    "small": GraphSizes(TINY, 9, 8, 1),
}


def check_graphs(run: StageRun) -> None:
    """Each rank decodes rows of its own with whole weights."""
    sizes, device = _SIZES[run.scale], run.device
    requests, answers = _requests(sizes), {}
    for name, graphs in (("graphs", True), ("eager", False)):
        rollout = RolloutConfig(max_running_rows=sizes.num_rows, cuda_graphs=graphs, kv_cache_gib=_cache_gib(sizes))
        engine = random_engine(sizes.model, rollout, device)
        answers[name] = _answer(engine, requests)
        distance = _distance(engine, requests, answers[name])
        run.figures[f"{name}_logprob_distance"] = distance
        run.require(
            distance <= _LARGEST_DISTANCE[device.compute_dtype],
            f"{name}: log-probs of tokens drawn are {distance:.3g} nats off those of whole rows on average",
        )
        # What is captured stays until the engine sleeps.
        run.figures[f"{name}_seconds"] = device_seconds(lambda engine=engine: _answer(engine, requests), device)
        engine.sleep()
        device.empty_cache()
    pairs = zip(answers["graphs"].values(), answers["eager"].values(), strict=True)
    # Products of other sizes round otherwise, so a few rows may part in 16 bits.
    run.figures["equal_rows"] = sum(one.token_ids == other.token_ids for one, other in pairs) / sizes.num_rows
    run.figures["times_as_fast"] = run.figures["eager_seconds"] / run.figures["graphs_seconds"]


def _cache_gib(sizes: GraphSizes) -> float:
    model, block_size = sizes.model, RolloutConfig().block_size
    num_tokens = sizes.num_rows * (sizes.prompt_length + sizes.num_rows * sizes.tokens_per_row + 2 * block_size)
    return num_tokens * sum(mixer.state(1).token_size for mixer in model.mixers) * 4 / 2**30


def _requests(sizes: GraphSizes) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.num_rows, sizes.prompt_length)
    prompts = torch.randint(sizes.model.vocab_size, shape, generator=generator).tolist()
    return [
        Request((row,), tuple(prompt), (row,), SamplingParams(max_tokens=(row + 1) * sizes.tokens_per_row))
        for row, prompt in enumerate(prompts)
    ]


def _answer(engine: NativeEngine, requests: list[Request]) -> dict[int, Response]:
    engine.submit(requests)
    responses: list[Response] = []
    while engine.has_work:
        responses += engine.step()
    return {response.row: response for response in sorted(responses, key=lambda response: response.row)}


def _distance(engine: NativeEngine, requests: list[Request], answers: dict[int, Response]) -> float:
    """Mean distance of log-probs; not a number where any isn't finite."""
    rated = engine.score([(*request.prompt_ids, *answers[request.rows[0]].token_ids) for request in requests])
    distances = [
        (logprobs[-len(response.logprobs) :].cpu() - torch.tensor(response.logprobs)).abs()
        for logprobs, response in zip(rated, answers.values(), strict=True)
    ]
    return torch.cat(distances).mean().item()
