from __future__ import annotations

import math

import pytest
import torch

from spmdrl.engines.parallel.weight_cuts import chunk_of
from spmdrl.engines.training.updater import clip_gradients, learning_rate, squared_norm
from spmdrl.nouns.settings.training_config import OptimConfig


def rates(config: OptimConfig, num_steps: int) -> list[float]:
    return [learning_rate(config, step, num_steps=num_steps) for step in range(num_steps + 1)]


def test_warmup_rises_linearly_and_then_stays():
    assert rates(OptimConfig(lr=4.0, warmup_steps=4), 6) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0]


def test_a_share_of_all_steps_is_a_warmup_of_that_many_rounded_up():
    assert rates(OptimConfig(lr=4.0, warmup_ratio=0.3), 10) == rates(OptimConfig(lr=4.0, warmup_steps=3), 10)
    assert rates(OptimConfig(lr=4.0, warmup_ratio=0.31), 10) == rates(OptimConfig(lr=4.0, warmup_steps=4), 10)
    with pytest.raises(ValueError, match="warmup_steps is 3 and warmup_ratio 0.1, but both set the length"):
        OptimConfig(warmup_steps=3, warmup_ratio=0.1)


def test_linear_falls_to_zero_at_the_last_step():
    assert rates(OptimConfig(lr=4.0, warmup_steps=1, schedule="linear"), 5) == [4.0, 4.0, 3.0, 2.0, 1.0, 0.0]


def test_cosine_is_at_half_in_the_middle():
    values = rates(OptimConfig(lr=2.0, schedule="cosine"), 8)
    assert values[0] == 2.0 and math.isclose(values[4], 1.0) and abs(values[8]) < 1e-12
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("max_norm", [0.5, 100.0, math.inf])
def test_clipping_equals_torchs(max_norm):
    ours = [torch.linspace(-1, 1, 7), torch.ones(2, 3), torch.empty(0)]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in ours]
    for parameter, gradient in zip(parameters, ours, strict=True):
        parameter.grad = gradient.clone()
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    assert math.isclose(math.sqrt(squared_norm(ours)), norm, rel_tol=1e-6)
    clip_gradients(ours, norm=norm, max_norm=max_norm)
    for parameter, gradient in zip(parameters, ours, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_the_rows_a_rank_holds_are_those_of_torch_chunk():
    for num_rows in range(1, 12):
        for num_ranks in range(1, 8):
            chunks = [chunk.tolist() for chunk in torch.arange(num_rows).chunk(num_ranks)]
            chunks += [[]] * (num_ranks - len(chunks))
            held = [list(range(*chunk_of(num_rows, num_ranks, rank))) for rank in range(num_ranks)]
            assert held == chunks
