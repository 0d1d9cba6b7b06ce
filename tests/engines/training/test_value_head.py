"""Critics and reward models: the engine with a value head, against transformers and on ranks against one process."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import hf_config_dict, parameter_shapes, read_config
from spmdrl.engines.models.hf.model_weights import WeightFiles, WeightSource, WithNewHead, write_weights
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.packed_rows import LossFunction, LossTerms, MicroBatch, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import offsets_of, whole_slice
from spmdrl.nouns.roles import Rating
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.engines.training.tiny import CONFIG, OPTIM, make_engine, make_rows, relative_difference
from tests.support.ranks import run_ranks

# Of a policy whose head is its embedding; 12 can be cut in two.
VALUE_CONFIG = dataclasses.replace(CONFIG, intermediate_size=12, tied_head=True).with_value_head()
UNCLIPPED = dataclasses.replace(OPTIM, max_grad_norm=math.inf)
PADDING = 0
ROW_LENGTHS = [5, 1, 12, 7]


def value_engine(
    world: World,
    rating: Rating,
    source: WeightSource,
    *,
    config: DecoderConfig = VALUE_CONFIG,
    layout: UpdateLayout | None = None,
    max_tokens: int = 13,
) -> TrainingEngine:
    mesh = build_update_mesh(fit_update_layout(layout or UpdateLayout(), world.size), world.device, world.rank)
    training = TrainingConfig(max_tokens_per_microbatch=max_tokens)
    engine = TrainingEngine(config, training, UNCLIPPED, mesh, world.device, rating=rating, compute_dtype=torch.float32)
    engine.load(source)
    return engine


def token_error(values_R: Tensor, micro: MicroBatch) -> LossTerms:
    """Squared error of a critic's values against the response tokens' weights."""
    return LossTerms(((values_R - 10.0 * micro.response["weights"]) ** 2).sum() / 20.0, {})


def row_error(values_B: Tensor, micro: MicroBatch) -> LossTerms:
    """Squared error of a reward model's values against the rows' numbers."""
    row_B = values_B.new_zeros(micro.num_rows).index_put((micro.row_of_response_R,), micro.response["row"].float())
    return LossTerms(((values_B - row_B / 7.0) ** 2).sum() / 20.0, {})


LOSSES: dict[Rating, LossFunction] = {"token_values": token_error, "row_values": row_error}


def classifier(folder: Path, name: str, num_labels: int = 1) -> Any:
    """A random transformers classifier, also saved in `folder`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(
        vocab_size=CONFIG.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        classifier_dropout=0.0,
        num_labels=num_labels,
        pad_token_id=PADDING,
    )
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(folder)
    return model


def unpadded_rows() -> TokenRows:
    generator = torch.Generator().manual_seed(1)
    lengths_B = torch.tensor(ROW_LENGTHS)
    return TokenRows(
        tokens_T=torch.randint(PADDING + 1, CONFIG.vocab_size, (sum(ROW_LENGTHS),), generator=generator),
        offsets=offsets_of(lengths_B),
        prompt_lengths_B=(lengths_B + 1) // 2,
    )


def row_tokens(rows: TokenRows) -> list[Tensor]:
    return list(rows.tokens_T.split(rows.lengths_B.tolist()))


def test_row_values_have_parity_with_sequence_classification_of_transformers(world, tmp_path):
    model, rows = classifier(tmp_path, "Qwen3ForSequenceClassification"), unpadded_rows()
    padded = torch.nn.utils.rnn.pad_sequence(row_tokens(rows), batch_first=True, padding_value=PADDING)
    with torch.no_grad():
        expected_B = model(padded, attention_mask=(padded != PADDING).long()).logits.squeeze(1)
    engine = value_engine(world, "row_values", WeightFiles(tmp_path), config=read_config(tmp_path))
    torch.testing.assert_close(engine.values(rows).cpu(), expected_B, rtol=1e-4, atol=1e-4)
    assert expected_B.std() > 0.1


def test_token_values_have_parity_with_token_classification_of_transformers(world, tmp_path):
    model, rows = classifier(tmp_path, "LlamaForTokenClassification"), unpadded_rows()
    assert not model.score.bias.any()
    with torch.no_grad():
        expected = [
            model(tokens[None]).logits[0, prompt_length - 1 : -1, 0]
            for tokens, prompt_length in zip(row_tokens(rows), rows.prompt_lengths_B.tolist(), strict=True)
        ]
    engine = value_engine(world, "token_values", WeightFiles(tmp_path), config=read_config(tmp_path))
    torch.testing.assert_close(engine.values(rows).cpu(), torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_what_we_write_of_a_value_model_has_parity_in_transformers(world, tmp_path):
    transformers = pytest.importorskip("transformers")
    weights, rows = RandomWeights(VALUE_CONFIG, seed=0), unpadded_rows()
    (tmp_path / "config.json").write_text(json.dumps(hf_config_dict(VALUE_CONFIG, torch.float32)))
    write_weights(tmp_path, ((name, weights(name)) for name in weights.names))
    assert read_config(tmp_path) == VALUE_CONFIG
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        expected_B = torch.cat([model.eval()(tokens[None]).logits[0] for tokens in row_tokens(rows)])
    torch.testing.assert_close(value_engine(world, "row_values", weights).values(rows).cpu(), expected_B)


def test_a_classifier_of_two_labels_is_refused(tmp_path):
    classifier(tmp_path, "Qwen3ForSequenceClassification", num_labels=2)
    with pytest.raises(ValueError, match="with 2 labels, but a value head gives one number"):
        read_config(tmp_path)


def test_a_bias_that_would_be_left_out_is_refused(world, tmp_path):
    model = classifier(tmp_path, "LlamaForTokenClassification")
    torch.nn.init.constant_(model.score.bias, 0.5)
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    with pytest.raises(ValueError, match=r"score.bias in .* is \[0.5\]"):
        value_engine(world, "token_values", WeightFiles(tmp_path), config=config)
    value_engine(world, "token_values", WithNewHead(WeightFiles(tmp_path)), config=config)


def test_a_head_that_does_not_fit_the_question_is_told_so(world):
    critic = value_engine(world, "token_values", RandomWeights(VALUE_CONFIG, seed=0))
    with pytest.raises(RuntimeError, match="has a value head, which gives no log-probs"):
        critic.score(make_rows())
    with pytest.raises(RuntimeError, match="is a policy, which has no value head"):
        make_engine(world).values(make_rows())
    with pytest.raises(ValueError, match="has a value head and can.t generate"):
        NativeEngine(VALUE_CONFIG, RolloutConfig(), world.device.torch_device, torch.float32)


def test_a_critic_starts_from_a_language_model_at_zero_and_learns(world):
    policy = dataclasses.replace(CONFIG, intermediate_size=12, tied_head=True)
    engine = value_engine(world, "token_values", WithNewHead(RandomWeights(policy, seed=0)))
    rows = make_rows()
    assert not engine.values(rows).any()
    losses = [engine.update(rows, token_error).loss for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert engine.named_shards()["score.weight"].tensor.any()


@pytest.mark.parametrize("rating", LOSSES)
def test_in_the_exact_mode_a_row_has_the_same_values_whatever_is_rated_beside_it(world, exact_mode, rating):
    # No vector register divides this width.
    config, rows = dataclasses.replace(VALUE_CONFIG, hidden_size=50), make_rows(30)
    packed, cut = (
        value_engine(world, rating, RandomWeights(config, seed=0), config=config, max_tokens=max_tokens)
        for max_tokens in (1000, 13)
    )
    values = packed.values(rows)
    assert torch.equal(cut.values(rows), values)
    every = range(len(rows))
    # The last two as two ranks would divide them.
    for members in (*([row] for row in every), every[::2], every[1::2]):
        index = rows.response_index(members) if rating == "token_values" else list(members)
        assert torch.equal(packed.values(rows.select(members)), values[index])


def test_a_rating_that_the_head_cannot_give_is_refused(world):
    with pytest.raises(ValueError, match="rating logprobs needs a vocab head, but the model's is a value head"):
        value_engine(world, "logprobs", RandomWeights(VALUE_CONFIG, seed=0))
    with pytest.raises(ValueError, match="rating row_values needs a value head, but the model's is a vocab head"):
        value_engine(world, "row_values", RandomWeights(CONFIG, seed=0), config=CONFIG)


def test_a_value_head_that_is_the_embedding_is_refused():
    with pytest.raises(ValueError, match=r"with_value_head\(\)"):
        dataclasses.replace(CONFIG, tied_head=True, head="value")


def regression(world: World, rating: Rating, layout: UpdateLayout) -> tuple[float, dict[str, Tensor], Tensor]:
    """One update's loss and whole gradient, and the values before it."""
    engine, rows = value_engine(world, rating, RandomWeights(VALUE_CONFIG, seed=0), layout=layout), make_rows()
    values = engine.values(rows).cpu()
    accumulated = engine.accumulate(rows, LOSSES[rating])
    assert accumulated.num_microbatches > 1
    gathered = engine.model.gather_whole(engine.model.named_gradients(), torch.float32)
    gradients = {name: gradient.to("cpu", copy=True) for name, gradient in gathered}
    return engine.step(accumulated).loss, gradients, values


def regressions(world: World, layouts: list[UpdateLayout]) -> list[tuple[float, dict[str, Tensor], Tensor]]:
    return [regression(world, rating, layout) for layout in layouts for rating in LOSSES]


@pytest.mark.on_device
@pytest.mark.ranks
def test_value_regression_on_cut_ranks_equals_one_process(world):
    layouts = [UpdateLayout(tensor=2), UpdateLayout(context=2, context_kind="ring"), UpdateLayout(pipeline=2)]
    expected = regressions(world, [UpdateLayout()]) * len(layouts)
    for found in run_ranks(2, regressions, layouts):
        for (loss, gradients, values), (one_loss, one_gradients, one_values) in zip(found, expected, strict=True):
            assert math.isclose(loss, one_loss, rel_tol=1e-5)
            torch.testing.assert_close(values, one_values, rtol=1e-5, atol=1e-5)
            assert set(gradients) == set(one_gradients) == set(parameter_shapes(VALUE_CONFIG))
            for name, gradient in gradients.items():
                assert one_gradients[name].any(), name
                assert relative_difference(gradient, one_gradients[name]) < 1e-5, name


def test_a_new_value_head_starts_small():
    head = RandomWeights(VALUE_CONFIG, seed=0).read(whole_slice("score.weight", (1, VALUE_CONFIG.hidden_size)))
    assert 0 < head.abs().max() < 0.1
