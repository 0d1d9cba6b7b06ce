"""The native engine on sparse layers and latent attention, whose values are smaller than keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.engines.models.make_model import RandomWeights, decoder_config
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.nouns.settings.rollout_config import SamplingParams
from tests.engines.generation.support import request, run, small_rollout
from tests.support.chosen_device import chosen_device
from tests.support.made import latent_decoder

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 128}
SPARSE = decoder_config(MakeConfig(model_type="qwen3_moe", first_k_dense_replace=1, **SIZES))
LATENT = latent_decoder(value_size=6, query_rank=8, **SIZES)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
every_family = pytest.mark.parametrize("config", [SPARSE, LATENT], ids=["qwen3_moe", "deepseek_v3"])


def weights_of(config: DecoderConfig) -> dict[str, torch.Tensor]:
    weights = RandomWeights(config, seed=0)
    # Larger than the usual initial weights, so that the next token depends on the earlier ones.
    values = {name: 4 * weights(name) for name in weights.names}
    if BIAS in values:
        values[BIAS] = torch.linspace(-1, 1, len(values[BIAS]))
    return values


def awake_engine(config: DecoderConfig, dtype: torch.dtype = torch.float32, **rollout: object) -> NativeEngine:
    engine = NativeEngine(config, small_rollout(**rollout), chosen_device(), dtype)
    engine.load_weights(weights_of(config).items())
    engine.wake_cache()
    return engine


@every_family
def test_groups_get_the_logprobs_of_a_full_sequence_forward(config: DecoderConfig) -> None:
    decoder = Decoder(config)
    decoder.load_state_dict(weights_of(config))
    prompts, sampling = [(5, 6, 7, 8, 9, 10), (11,), tuple(range(4, 17))], SamplingParams(max_tokens=20)
    requests = [request(prompt, [3 * i, 3 * i + 1, 3 * i + 2], sampling) for i, prompt in enumerate(prompts)]
    responses = run(awake_engine(config, max_running_rows=7), requests)
    assert len({response.token_ids for response in responses.values()}) == 9
    for row, response in responses.items():
        prompt = prompts[row // 3]
        tokens_T = torch.tensor([*prompt, *response.token_ids])
        with torch.no_grad():
            attend = PackedCausalAttention(offsets_of([len(tokens_T)]))
            logits_TV = decoder(tokens_T, torch.arange(len(tokens_T)), attend, F.linear)
        expected = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, tokens_T[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-4, rtol=1e-4)


@every_family
def test_a_slept_engine_with_its_weights_back_gives_the_same_tokens(config: DecoderConfig) -> None:
    engine = awake_engine(config)
    requests = [request((5, 6, 7), [0, 1], SamplingParams(max_tokens=8))]
    before = run(engine, requests)
    engine.sleep()
    assert engine.memory_bytes() == {"generation_weights": 0, "kv_cache": 0}
    for name, weight in engine.wake_weights().items():
        weight.copy_(weights_of(config)[name])
    engine.wake_cache()
    assert run(engine, requests) == before


def test_the_correction_bias_is_a_weight_and_stays_float32() -> None:
    engine = awake_engine(LATENT, torch.bfloat16)
    weights = engine.wake_weights()
    assert set(weights) == set(engine.weight_shapes()) == set(weights_of(LATENT))
    assert {name for name, weight in weights.items() if weight.dtype is not torch.bfloat16} == {BIAS}
    assert torch.equal(weights[BIAS].cpu(), torch.linspace(-1, 1, 8))
    assert len(run(engine, [request((5, 6), [0], SamplingParams(max_tokens=3))])[0].token_ids) == 3


def test_cached_values_take_their_own_size() -> None:
    # Keys of 8 + 4 and values of 6 in each of 4 heads; 2 layers of blocks of 4 tokens.
    block_bytes = 2 * 4 * 4 * (12 + 6) * 4
    engine = awake_engine(LATENT, kv_cache_gib=5 * block_bytes / 2**30)
    assert engine.memory_bytes()["kv_cache"] == 5 * block_bytes
