"""Three steps of the engine equal three steps of transformers' model with torch's own AdamW."""

from __future__ import annotations

import math

import pytest
import torch

from spmdrl.engines.training.update.optimizer import learning_rate
from tests.engines.training.tiny import (
    CONFIG,
    OPTIM,
    TEMPERATURE,
    SeededWeights,
    make_engine,
    make_rows,
    relative_difference,
    weighted_nll,
    whole_weights,
)

transformers = pytest.importorskip("transformers")


def transformers_model() -> torch.nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=CONFIG.intermediate_size,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_size,
        max_position_embeddings=CONFIG.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
        rms_norm_eps=CONFIG.rms_eps,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.load_state_dict(SeededWeights().tensors)
    return model


def plain_loss(model: torch.nn.Module, temperature: float) -> torch.Tensor:
    """`weighted_nll`, row by row on full logits."""
    rows = make_rows()
    bounds, response_bounds = rows.offsets.tolist(), rows.response_offsets.tolist()
    total = torch.zeros(())
    for row, prompt_length in enumerate(rows.prompt_lengths_B.tolist()):
        tokens = rows.tokens_T[bounds[row] : bounds[row + 1]]
        all_logprobs = (model(tokens[None]).logits[0, prompt_length - 1 : -1] / temperature).log_softmax(-1)
        logprobs = all_logprobs.gather(1, tokens[prompt_length:, None]).squeeze(1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        weights = rows.response["weights"][response_bounds[row] : response_bounds[row + 1]]
        total = total - (weights * (logprobs + 0.1 * entropy)).sum()
    return total


def test_three_steps_equal_a_plain_training_loop(world):
    engine, model = make_engine(world, max_tokens=25), transformers_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, eps=OPTIM.eps, weight_decay=0.0)
    for step in range(3):
        result = engine.update(make_rows(), weighted_nll)
        loss = plain_loss(model, TEMPERATURE)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.max_grad_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(OPTIM, step, num_steps=100)
        optimizer.step()
        assert math.isclose(result.loss, float(loss.detach()), rel_tol=1e-5)
        assert math.isclose(result.grad_norm, float(norm), rel_tol=1e-5)
    trained = dict(model.named_parameters())
    for name, weight in whole_weights(engine).items():
        assert relative_difference(weight, trained[name].detach()) < 1e-5, name
        assert not torch.equal(weight, SeededWeights().tensors[name])
