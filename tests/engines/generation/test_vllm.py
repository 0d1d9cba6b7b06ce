"""What the vLLM engine decides before it calls vLLM; the engine itself needs vLLM and isn't run here."""

from __future__ import annotations

import sys

import pytest

import spmdrl.engines.generation.vllm  # noqa: F401
from spmdrl.engines.generation.protocol import RolloutConfig, SamplingParams
from spmdrl.engines.generation.vllm import gives_unfiltered, logprobs_mode


def test_importing_the_engine_does_not_import_vllm():
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("rollout", "mode"),
    [
        (RolloutConfig(), "processed_logprobs"),
        (RolloutConfig(temperature=0.7), "processed_logprobs"),
        (RolloutConfig(temperature=0, top_p=0.9), "processed_logprobs"),
        (RolloutConfig(top_p=0.9), "raw_logprobs"),
        (RolloutConfig(top_k=20, min_p=0.1), "raw_logprobs"),
    ],
)
def test_the_logprobs_mode_gives_unfiltered_logprobs(rollout: RolloutConfig, mode: str):
    assert logprobs_mode(rollout) == mode


def test_filters_with_a_temperature_are_refused():
    with pytest.raises(ValueError, match="rollout.temperature is 0.7 with rollout.top_p 0.9"):
        logprobs_mode(RolloutConfig(temperature=0.7, top_p=0.9))


def test_requests_of_another_kind_than_the_training_rollouts_are_told_apart():
    assert not gives_unfiltered("processed_logprobs", SamplingParams(top_k=5))
    assert not gives_unfiltered("raw_logprobs", SamplingParams(temperature=0.5))
    assert gives_unfiltered("raw_logprobs", SamplingParams(temperature=0))
