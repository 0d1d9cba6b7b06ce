"""Rows that an engine is given to score, beside what it generates."""

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
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from tests.engines.generation.support import TINY, awake_engine, make_engine, prompt_of, request, run, small_rollout
from tests.support.chosen_device import chosen_device

ROWS = [[5, 6, 7, 8, 9, 10], [11, 12], list(range(4, 40))]


def weights_of(config: DecoderConfig) -> dict[str, torch.Tensor]:
    """Larger than the usual initial weights, so that the next token depends on the earlier ones."""
    weights = RandomWeights(config, seed=0)
    return {name: 4 * weights(name) for name in weights.names}


@pytest.mark.on_device
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
@torch.no_grad()
def test_scores_are_the_logprobs_of_a_full_sequence_forward(family):
    make = MakeConfig(
        model_type=family, hidden_size=32, num_hidden_layers=2, intermediate_size=48, max_position_embeddings=64
    )
    config = decoder_config(make)
    decoder = Decoder(config)
    decoder.load_state_dict(weights_of(config))
    engine = NativeEngine(config, small_rollout(), chosen_device(), torch.float32)
    engine.load_weights(weights_of(config).items())
    engine.wake_cache()
    for row, scored in zip(ROWS, engine.score(ROWS), strict=True):
        tokens_T = torch.tensor(row)
        attend = PackedCausalAttention(offsets_of([len(row)]))
        logits_TV = decoder(tokens_T, torch.arange(len(row)), attend, F.linear)
        expected = logits_TV[:-1].log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]
        assert scored.dtype == torch.float32
        torch.testing.assert_close(scored.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_scores_are_the_logprobs_of_generation_and_scoring_changes_nothing_that_follows():
    engine = awake_engine()
    asked = [request(prompt_of(9), [0, 1], SamplingParams(max_tokens=8))]
    generated = run(engine, asked)
    held = engine.memory_bytes()
    scored = engine.score([[*prompt_of(9), *generated[row].token_ids] for row in (0, 1)])
    for row in (0, 1):
        assert scored[row][-8:].tolist() == pytest.approx(generated[row].logprobs, abs=1e-5)
    assert engine.memory_bytes() == held and engine.num_unfinished == 0
    asked_anew = [request(prompt_of(9), [2, 3], SamplingParams(max_tokens=8), seeds=[0, 1])]
    assert [answer.token_ids for answer in run(engine, asked_anew).values()] == [
        answer.token_ids for answer in generated.values()
    ]


def test_a_sleeping_engine_scores_nothing():
    with pytest.raises(RuntimeError, match="a sleeping engine can't score rows"):
        make_engine(RolloutConfig(), TINY).score(ROWS)
