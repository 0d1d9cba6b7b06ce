"""What the vLLM engine decides before it calls vLLM; the engine itself is in test_vllm_engine.py."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

import spmdrl.engines.generation.vllm_engine  # noqa: F401
from spmdrl.engines.generation.vllm_cpu import check_sizes, default_cache_bytes
from spmdrl.engines.generation.vllm_engine import gives_unfiltered, logprobs_mode
from spmdrl.engines.models.make_model import decoder_config
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams

SPARSE = decoder_config(
    MakeConfig(model_type="qwen3_moe", hidden_size=128, num_attention_heads=4, moe_intermediate_size=64)
)


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


def test_barred_ids_are_counted_in_where_the_temperature_admits_it():
    assert logprobs_mode(RolloutConfig(), bars_ids=True) == "raw_logprobs"
    assert logprobs_mode(RolloutConfig(temperature=0.7), bars_ids=True) == "processed_logprobs"


def test_filters_with_a_temperature_are_refused():
    with pytest.raises(ValueError, match="rollout.temperature is 0.7 with rollout.top_p 0.9"):
        logprobs_mode(RolloutConfig(temperature=0.7, top_p=0.9))


def test_requests_of_another_kind_than_the_training_rollouts_are_told_apart():
    assert not gives_unfiltered("processed_logprobs", SamplingParams(top_k=5))
    assert not gives_unfiltered("raw_logprobs", SamplingParams(temperature=0.5))
    assert gives_unfiltered("raw_logprobs", SamplingParams(temperature=0))


def test_sizes_that_the_cpu_build_has_no_kernel_for_are_refused():
    check_sizes(SPARSE, 2, [32, 64])
    with pytest.raises(ValueError, match="head size is 32, but vLLM's attention on CPU has"):
        check_sizes(SPARSE, 1, [64, 128])
    with pytest.raises(ValueError, match="an expert is 64 wide and cut in 4"):
        check_sizes(SPARSE, 4, [32, 64])
    with pytest.raises(ValueError, match="keeps a gpt_oss's experts as they were loaded first"):
        check_sizes(decoder_config(MakeConfig(model_type="gpt_oss")), 1, [32, 64])


def test_the_cache_on_cpu_holds_the_rows_that_run_at_once_within_a_gibibyte():
    config = replace(SPARSE, max_positions=129)
    assert default_cache_bytes(config, 10, max_running_rows=4) == 4 * 2 * 128 * 10
    assert default_cache_bytes(config, 1 << 20, max_running_rows=100) == 1 << 30
    assert default_cache_bytes(config, 1 << 25, max_running_rows=100) == 2 * 128 << 25
