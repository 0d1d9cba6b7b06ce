"""Adapters compute and learn what merged weights would, under every layout, and nothing else is trained."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.adapter_files import WithNewAdapters
from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.checkpoints.trainer_state import trainer_state
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.settings.model_config import LoraConfig
from spmdrl.nouns.settings.model_sizes import DeltaSizes, KeySizes, MoeConfig, WindowConfig
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.bench.layouts.layout_cases import UnevenWeights
from tests.engines.training.tiny import (
    CONFIG,
    LATENT,
    OPTIM,
    make_rows,
    part_of,
    relative_difference,
    weighted_nll,
    whole_weights,
)
from tests.support.ranks import run_ranks

LORA = LoraConfig(rank=3, alpha=6.0)
# Biases of summed projections are shared out over tensor ranks, and a tied head is held twice by a pipeline.
DENSE = replace(
    CONFIG, model_type="llama", qk_norm=False, attention_bias=True, mlp_bias=True, tied_head=True, intermediate_size=16,
    num_layers=4, lora=LORA,
)  # fmt: skip
SPARSE = replace(
    CONFIG, model_type="qwen3_moe", intermediate_size=16, lora=LORA,
    moe=MoeConfig(4, 2, 16, normalize=True, dense_layers=(0,)),
)  # fmt: skip
HYBRID = replace(
    CONFIG, model_type="qwen3_5_text", intermediate_size=16, attention_gate=True, lora=LORA,
    delta=DeltaSizes((0,), num_key_heads=2, num_value_heads=4, key_size=4, value_size=4, conv_width=3),
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "sparse": SPARSE,
    "latent": replace(LATENT, lora=LORA),
    "untied": replace(DENSE, tied_head=False),
    "hybrid": HYBRID,
    "shared keys": replace(
        DENSE, window=WindowConfig(3, layers=(0, 2)), full=KeySizes(6, num_kv_heads=1, are_values=True), v_norm=True
    ),
}
ON_TWO = [
    ("dense", UpdateLayout(shard=2)),
    ("dense", UpdateLayout(data=2, shard=1)),
    ("dense", UpdateLayout(shard=1, tensor=2)),
    ("latent", UpdateLayout(shard=1, tensor=2)),
    ("shared keys", UpdateLayout(shard=1, tensor=2)),
    ("dense", UpdateLayout(shard=1, context=2)),
    ("dense", UpdateLayout(shard=1, context=2, context_kind="ulysses")),
    ("dense", UpdateLayout(shard=1, pipeline=2)),
    ("dense", UpdateLayout(shard=1, pipeline=2, pipeline_schedule="interleaved", pipeline_chunks=2)),
    ("untied", UpdateLayout(shard=1, pipeline=2, pipeline_schedule="zbv", pipeline_chunks=2)),
    ("sparse", UpdateLayout(shard=2, expert=2)),
    ("hybrid", UpdateLayout(shard=2)),
    ("hybrid", UpdateLayout(shard=1, tensor=2)),
    ("hybrid", UpdateLayout(shard=1, context=2)),
]
ON_FOUR = [
    ("dense", UpdateLayout(shard=1, tensor=4)),
    ("dense", UpdateLayout(shard=2, pipeline=2, pipeline_schedule="zero_bubble", pipeline_chunks=2)),
    ("sparse", UpdateLayout(shard=2, tensor=2, expert=2)),
    ("dense", UpdateLayout(data=2, shard=2)),
    # Two ranks for each head of queries and keys.
    ("hybrid", UpdateLayout(shard=1, tensor=4)),
]


def build(world: World, config: DecoderConfig, layout: UpdateLayout, **options) -> TrainingEngine:
    mesh = build_update_mesh(fit_update_layout(layout, world.size), world.device, world.rank)
    options = {"compute_dtype": torch.float32} | options
    return TrainingEngine(config, TrainingConfig(max_tokens_per_microbatch=30), OPTIM, mesh, world.device, **options)


def engine_of(world: World, model: str, layout: UpdateLayout | None = None, **options) -> TrainingEngine:
    """A model whose adapters aren't 0."""
    config = MODELS[model]
    engine = build(world, config, layout or UpdateLayout(), **options)
    engine.load(UnevenWeights(config))
    return engine


class Given:
    """A weight source of whole tensors."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors

    def read(self, wanted: WeightSlice) -> Tensor:
        return part_of(self.tensors[wanted.name], wanted)


def gradient_and_logprobs(engine: TrainingEngine) -> tuple[dict[str, Tensor], Tensor]:
    """The whole gradient of rows that are dealt over the data ranks, and the log-probs of all rows. Collective."""
    rows, axis = make_rows(12), engine.mesh.data
    engine.accumulate(rows.select(list(range(12))[axis.rank :: axis.size]), weighted_nll)
    whole = engine.model.gather_whole(engine.model.named_gradients(), torch.float32)
    gradient = {name: one.to("cpu", torch.float64, copy=True) for name, one in whole}
    engine.drop_gradients()
    return gradient, engine.score(rows).logprobs_R.cpu()


def expected_of(world: World, model: str) -> tuple[dict[str, Tensor], Tensor]:
    """What a model without adapters, whose weights have them merged, gives: by the chain rule, with W = W0 + s B A."""
    engine = engine_of(world, model)
    merged = build(world, replace(MODELS[model], lora=None), UpdateLayout())
    merged.load(Given(whole_weights(engine)))
    gradient, logprobs_R = gradient_and_logprobs(merged)
    weights = {name: shard.tensor.double().cpu() for name, shard in engine.named_shards().items()}
    expected = {}
    for name in weights:
        if match := re.fullmatch(r"(.*)\.lora_([AB])\.weight", name):
            of_weight = LORA.scale * gradient[f"{match[1]}.weight"]
            up, down = (weights[f"{match[1]}.lora_{letter}.weight"] for letter in "AB")
            expected[name] = down.T @ of_weight if match[2] == "A" else of_weight @ up.T
    return expected, logprobs_R


def of_layouts(world: World, cases: list[tuple[str, UpdateLayout]]) -> list[tuple[dict[str, Tensor], Tensor]]:
    return [gradient_and_logprobs(engine_of(world, model, layout)) for model, layout in cases]


def assert_as_merged(found: tuple[dict[str, Tensor], Tensor], expected: tuple[dict[str, Tensor], Tensor]) -> None:
    (gradient, logprobs_R), (expected_gradient, expected_logprobs_R) = found, expected
    torch.testing.assert_close(logprobs_R, expected_logprobs_R, rtol=1e-5, atol=1e-5)
    for name, values in gradient.items():
        if name in expected_gradient:
            assert expected_gradient[name].any()
            assert relative_difference(values, expected_gradient[name]) < 1e-4, name
        else:
            assert not values.any(), name


@pytest.mark.parametrize("model", MODELS)
def test_adapters_have_the_loss_and_the_gradient_of_merged_weights(world, model):
    assert_as_merged(gradient_and_logprobs(engine_of(world, model)), expected_of(world, model))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ON_TWO, id="2 ranks", marks=pytest.mark.on_device),
        pytest.param(ON_FOUR, id="4 ranks", marks=pytest.mark.slow),
    ],
)
def test_adapters_learn_the_same_under_every_layout(world, cases):
    num_ranks = 2 if cases is ON_TWO else 4
    expected = {model: expected_of(world, model) for model in {model for model, _ in cases}}
    for answers in run_ranks(num_ranks, of_layouts, cases, timeout=240):
        for (model, layout), found in zip(cases, answers, strict=True):
            try:
                assert_as_merged(found, expected[model])
            except AssertionError as error:
                raise AssertionError(f"{model} under {layout}") from error


def adapter_gradients(world: World, cases: list[tuple[str, UpdateLayout]], dtype: torch.dtype) -> list[Tensor]:
    """The gradient of all adapters, where layers and the weights beside adapters are of this dtype."""
    found = []
    for model, layout in cases:
        gradient, _ = gradient_and_logprobs(engine_of(world, model, layout, compute_dtype=dtype))
        found.append(torch.cat([one.flatten() for name, one in gradient.items() if ".lora_" in name]))
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_adapters_of_bfloat16_layers_are_as_near_to_the_gradient_under_every_layout(world):
    alone = [("dense", UpdateLayout()), ("sparse", UpdateLayout())]
    # Schedules of a pipeline and forms of context parallelism round alike.
    cases = [case for case in ON_TWO if case[0] in dict(alone) and case[1].context_kind == "ring"]
    cases = [(model, layout) for model, layout in cases if layout.pipeline_schedule == "1f1b"]
    exact, rounded = (adapter_gradients(world, alone, dtype) for dtype in (torch.float32, torch.bfloat16))
    # The distance that rounding alone makes; a part that is left out or counted twice makes a larger one.
    limit = {model: 1.5 * relative_difference(*pair) for (model, _), *pair in zip(alone, rounded, exact, strict=True)}
    assert max(limit.values()) < 0.3
    expected = {model: one for (model, _), one in zip(alone, exact, strict=True)}
    for answers in run_ranks(2, adapter_gradients, cases, torch.bfloat16, timeout=240):
        for (model, layout), found in zip(cases, answers, strict=True):
            assert 0 < relative_difference(found, expected[model]) < limit[model], (model, layout)


def merged_by_layouts(world: World, cases: list[tuple[str, UpdateLayout]]) -> list[dict[str, Tensor]]:
    return [whole_weights(engine_of(world, model, layout)) for model, layout in cases]


@pytest.mark.ranks
@pytest.mark.slow
def test_merged_weights_are_the_same_whatever_the_layout(world):
    for answers in run_ranks(2, merged_by_layouts, ON_TWO, timeout=240):
        for (model, layout), weights in zip(ON_TWO, answers, strict=True):
            shapes, source = parameter_shapes(MODELS[model]), UnevenWeights(MODELS[model])
            whole = {name: source.read(whole_slice(name, shape)) for name, shape in shapes.items()}
            assert weights.keys() == parameter_shapes(replace(MODELS[model], lora=None)).keys()
            for name, weight in weights.items():
                path = name.removesuffix(".weight")
                expected = whole[name]
                if f"{path}.lora_A.weight" in whole:
                    up, down = (whole[f"{path}.lora_{letter}.weight"] for letter in "AB")
                    expected = expected + LORA.scale * down @ up
                torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6, msg=f"{name} {layout}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_adapters_are_trained_have_an_optimizer_and_are_kept_in_float32(world, dtype):
    engine = engine_of(world, "dense", compute_dtype=dtype)
    before = {name: shard.tensor.clone() for name, shard in engine.named_shards().items()}
    engine.update(make_rows(), weighted_nll)
    adapters = {name for name in before if ".lora_" in name}
    assert len(adapters) == 2 * 7 * DENSE.num_layers
    for name, shard in engine.named_shards().items():
        assert torch.equal(shard.tensor, before[name]) != (name in adapters), name
        assert shard.tensor.dtype == (torch.float32 if name in adapters else dtype), name
    assert engine.optimizer_state().keys() == adapters
    assert trainer_state(engine).keys() == {
        "step/step", *(f"{kind}/{name}" for kind in ("weight", "exp_avg", "exp_avg_sq") for name in adapters)
    }  # fmt: skip


def test_without_adapters_the_model_computes_as_its_own_weights_do(world):
    engine = engine_of(world, "sparse")
    plain = build(world, replace(SPARSE, lora=None), UpdateLayout(), frozen=True)
    own = {name: shard.tensor.clone() for name, shard in engine.named_shards().items()}
    plain.load(Given(own))
    expected_R = plain.score(make_rows()).logprobs_R
    adapted_R = engine.score(make_rows()).logprobs_R
    with engine.without_adapters():
        assert torch.equal(engine.score(make_rows()).logprobs_R, expected_R)
    assert torch.equal(engine.score(make_rows()).logprobs_R, adapted_R) and not torch.equal(adapted_R, expected_R)


def test_new_adapters_change_nothing_and_begin_alike_under_every_layout():
    source = WithNewAdapters(RandomWeights(DENSE, seed=1), parameter_shapes(DENSE), seed=5)
    name = "model.layers.1.mlp.down_proj.lora_A.weight"
    whole = source.read(WeightSlice(name, (0, 0), (3, 16)))
    assert torch.equal(source.read(WeightSlice(name, (1, 4), (3, 16))), whole[1:, 4:])
    assert 0.9 / 4 < whole.abs().max() <= 1 / 4 and abs(whole.mean()) < 0.1
    other = WithNewAdapters(RandomWeights(DENSE, seed=1), parameter_shapes(DENSE), seed=6)
    assert not torch.equal(other.read(WeightSlice(name, (0, 0), (3, 16))), whole)
    assert not source.read(WeightSlice(name.replace("lora_A", "lora_B"), (0, 0), (8, 3))).any()


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("q_proj", "query"), "lora.targets has query, which is no projection; choose among q_proj"),
        (("kv_b_proj",), "lora.targets has kv_b_proj, but this model's projections"),
        (("gate_proj",), "are k_proj, o_proj, q_proj, v_proj"),
    ],
)
def test_targets_that_the_model_does_not_have_are_refused(targets, words):
    with pytest.raises(ValueError, match=words):
        parameter_shapes(replace(SPARSE, lora=LoraConfig(targets=targets)))
