"""The native engine records the experts that its tokens went to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder
from spmdrl.engines.models.decoder import Decoder
from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.nouns.settings.model_sizes import MoeConfig
from spmdrl.nouns.settings.rollout_config import SamplingParams
from tests.engines.generation.support import TINY, prompt_of, request, run, small_rollout
from tests.support.chosen_device import chosen_device

SPARSE = replace(
    TINY,
    model_type="qwen3_moe",
    num_layers=3,
    moe=MoeConfig(num_experts=8, experts_per_token=2, intermediate_size=16, dense_layers=(1,)),
)


def weights_of(engine: NativeEngine) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in engine.weight_shapes().items()}


@pytest.mark.parametrize("slots", [2, 64])
def test_responses_bring_the_experts_that_one_forward_over_the_row_chooses(slots: int):
    rollout = small_rollout(max_running_rows=slots)
    engine = NativeEngine(SPARSE, rollout, chosen_device(), torch.float32, recorder=ChoiceRecorder())
    weights = weights_of(engine)
    engine.load_weights(weights.items())
    engine.wake_cache()
    sampling = SamplingParams(max_tokens=6, stop_token_ids=tuple(range(10)))
    prompts = [prompt_of(length) for length in (1, 3, 9)]
    requests = [request(prompt, range(3 * n, 3 * n + 3), sampling) for n, prompt in enumerate(prompts)]
    responses = run(engine, requests)
    decoder = Decoder(SPARSE)
    decoder.load_state_dict(weights, strict=False)
    for row, response in responses.items():
        fed = [*prompts[row // 3], *response.token_ids[:-1]]
        recorder, offsets = ChoiceRecorder(), torch.tensor([0, len(fed)])
        attend = PackedCausalAttention(offsets)
        decoder(torch.tensor(fed), torch.arange(len(fed)), attend, lambda hidden, head: hidden, recorder)
        assert response.choices is not None and response.choices.dtype == torch.int16
        assert torch.equal(response.choices, recorder.take().flatten())
