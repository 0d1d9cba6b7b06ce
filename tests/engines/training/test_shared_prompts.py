"""Rows that share prompts have the losses, scores and gradients of rows that don't, in every kind of model."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, TokenRows
from spmdrl.engines.training.shared_prompts import RowSharing, bundle_rows, lay_out
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import WeightSlice, offsets_of
from spmdrl.nouns.partition import TOKENS, RowCost
from spmdrl.nouns.roles import Rating
from spmdrl.nouns.settings.model_config import LoraConfig
from spmdrl.nouns.settings.model_sizes import DeltaSizes, MoeConfig, WindowConfig
from spmdrl.nouns.settings.training_config import OptimConfig, RoutingConfig
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.engines.training.tiny import CONFIG, LATENT, relative_difference, weighted_nll
from tests.support.ranks import run_ranks
from tests.support.tuned import TunedTraining

DENSE = replace(CONFIG, intermediate_size=16)
SPARSE = replace(DENSE, model_type="qwen3_moe", moe=MoeConfig(4, 2, 16, normalize=True, dense_layers=(0,)))
WINDOWED = replace(DENSE, attention_sinks=True, window=WindowConfig(4, layers=(0,)))
DELTAS = replace(DENSE, attention_gate=True, delta=DeltaSizes((0,), 2, 4, key_size=4, value_size=6, conv_width=4))
ADAPTED = replace(DENSE, lora=LoraConfig(rank=2))
PROMPTS, RESPONSES = [9, 5, 2, 12], [4, 1, 7, 0, 3, 6]


class LargeEmbeddings(RandomWeights):
    """Initial weights, but for embeddings that norms don't have to multiply, rounding included, by 50.

    Adapters have learnt something.
    """

    def read(self, wanted: WeightSlice) -> Tensor:
        initial = super().read(wanted) * (50 if "embed" in wanted.name else 1)
        if "lora_B" in wanted.name:
            return 0.02 * torch.linspace(0, 9, initial.numel()).sin().view_as(initial)
        return initial


def group_rows(config: DecoderConfig = DENSE, *, unit_size: int = 1) -> TokenRows:
    """Prompts of several lengths, with responses of several lengths to each, one empty; some rows twice; with turns."""
    generator = torch.Generator().manual_seed(3)

    def drawn(length: int) -> Tensor:
        return torch.randint(0, config.vocab_size, (length,), generator=generator)

    prompts = [drawn(length) for length in PROMPTS]
    rows = [(prompt, drawn(length)) for prompt, length in itertools.product(prompts, RESPONSES)]
    rows += rows[::5] * 2
    tokens = [torch.cat(row) for row in rows]
    offsets, prompts_B = offsets_of([len(row) for row in tokens]), torch.tensor([len(prompt) for prompt, _ in rows])
    num_tokens = int(offsets[-1])
    is_model = torch.rand(num_tokens, generator=generator) < 0.8
    positions = torch.cat([torch.arange(len(row)) for row in tokens])
    is_model &= positions >= prompts_B.repeat_interleave(offsets.diff())
    num_response = int(is_model.sum())
    weights = torch.rand(num_response, generator=generator) / num_response
    return TokenRows(
        torch.cat(tokens), offsets, prompts_B, {"weights": weights}, is_model_T=is_model, unit_size=unit_size
    )


ALONE = UpdateLayout(shard=1)
DENSE_SHARING, SPARSE_SHARING = RowSharing("logprobs", routes=False), RowSharing("logprobs", routes=True)


def engine_of(
    world: World,
    config: DecoderConfig,
    *,
    shares: bool,
    max_tokens: int = 60,
    rating: Rating = "logprobs",
    layout: UpdateLayout = ALONE,
    **options,
) -> TrainingEngine:
    """Collective over the layout's ranks."""
    mesh = build_update_mesh(layout, world.device, world.rank)
    training = TunedTraining(max_tokens_per_microbatch=max_tokens, share_prompts=shares, **options)
    engine = TrainingEngine(
        config, training, OptimConfig(), mesh, world.device, compute_dtype=torch.float32, rating=rating
    )
    engine.load(LargeEmbeddings(config, seed=1))
    return engine


def gradient_of(engine: TrainingEngine, rows: TokenRows, loss=weighted_nll) -> tuple[Tensor, dict[str, float]]:
    """The whole gradient and what the routers report. Collective."""
    accumulated = engine.accumulate(rows, loss)
    found = engine.model.gather_whole(engine.model.named_gradients(), torch.float32)
    gradient = torch.cat([gradient.flatten().cpu() for _, gradient in found])
    metrics = {} if accumulated.router is None else accumulated.router.totals(engine.mesh).metrics()
    engine.drop_gradients()
    return gradient, metrics


CASES = {
    "dense": (DENSE, {}),
    "latent": (LATENT, {}),
    "windows and sinks": (WINDOWED, {}),
    "delta nets": (DELTAS, {}),
    "adapters": (ADAPTED, {}),
    "sparse": (SPARSE, {}),
    "balance": (SPARSE, {"routing": RoutingConfig(aux_loss_coefficient=0.3)}),
    "recomputed": (DENSE, {"activation_checkpointing": "full"}),
}


@pytest.mark.on_device
@pytest.mark.parametrize(("case", "max_tokens"), [("dense", 1000), *((case, 40) for case in CASES)])
def test_gradients_and_scores_are_those_without_sharing(world, case, max_tokens):
    config, options = CASES[case]
    rows = group_rows(config)
    shared, unshared = (
        engine_of(world, config, shares=shares, max_tokens=max_tokens, **options) for shares in (True, False)
    )
    (found, metrics), (expected, their_metrics) = gradient_of(shared, rows), gradient_of(unshared, rows)
    assert relative_difference(found, expected) < 1e-6
    assert metrics == pytest.approx(their_metrics, rel=1e-5)
    scores, theirs = shared.score(rows), unshared.score(rows)
    torch.testing.assert_close(scores.logprobs_R, theirs.logprobs_R, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(scores.entropy_R, theirs.entropy_R, atol=2e-6, rtol=2e-6)


@pytest.mark.cpu_only(reason="accelerators attend to shared prompts by other sums")
@pytest.mark.parametrize("max_tokens", [1000, 100])
def test_on_a_cpu_scores_have_the_bits_of_those_without_sharing(world, max_tokens):
    # Sizes that fill vectors: the elements that are left over are rounded by their place in a tensor. So may be those
    # at the end of a micro-batch's places, whose number is what it is.
    sizes = {"hidden_size": 16, "intermediate_size": 32, "head_size": 16, "vocab_size": 64}
    config, rows = replace(DENSE, **sizes), group_rows(replace(DENSE, **sizes))
    shared, unshared = (engine_of(world, config, shares=shares, max_tokens=max_tokens) for shares in (True, False))
    assert lay_out(rows, DENSE_SHARING) is not None
    found, expected = shared.score(rows), unshared.score(rows)
    for ratings, others in ((found.logprobs_R, expected.logprobs_R), (found.entropy_R, expected.entropy_R)):
        torch.testing.assert_close(ratings, others, atol=0, rtol=2.0**-22)
        assert int((ratings != others).sum()) <= (0 if max_tokens == 1000 else 2)


def squares(values: Tensor, micro: MicroBatch) -> LossTerms:
    return LossTerms((values**2).sum(), {})


@pytest.mark.parametrize("rating", ["token_values", "row_values"])
def test_value_heads_rate_rows_that_share_prompts(world, rating):
    config = DENSE.with_value_head()
    shared, unshared = (engine_of(world, config, shares=shares, rating=rating) for shares in (True, False))
    rows = group_rows(unit_size=2)
    found, expected = (gradient_of(engine, rows, squares)[0] for engine in (shared, unshared))
    assert relative_difference(found, expected) < 1e-6
    torch.testing.assert_close(shared.values(rows), unshared.values(rows), atol=2e-6, rtol=2e-6)


def test_a_prompt_that_went_to_other_experts_is_not_shared(world):
    rows = group_rows(SPARSE)
    generator = torch.Generator().manual_seed(0)
    choices = torch.tensor(list(itertools.permutations(range(4), 2)))
    experts = choices[torch.randint(len(choices), (rows.tokens_T.numel(),), generator=generator)][:, None]
    replayed = replace(rows, experts_TLC=experts)
    assert lay_out(replayed, SPARSE_SHARING) is None
    # Rows of the first prompt were sent alike.
    for row in range(len(RESPONSES)):
        start = int(rows.offsets[row])
        experts[start : start + PROMPTS[0]] = experts[: PROMPTS[0]]
    layout = lay_out(replayed, SPARSE_SHARING)
    assert rows.tokens_T.numel() - layout.source_T.numel() == (len(RESPONSES) - 1) * PROMPTS[0]
    shared, unshared = (engine_of(world, SPARSE, shares=shares) for shares in (True, False))
    found, expected = (gradient_of(engine, replayed)[0] for engine in (shared, unshared))
    assert relative_difference(found, expected) < 1e-6


def gradients_of_layouts(world: World) -> list[tuple[Tensor, Tensor]]:
    layouts = [
        (SPARSE, UpdateLayout(shard=2)),
        (SPARSE, UpdateLayout(shard=2, expert=2)),
        (SPARSE, UpdateLayout(shard=1, tensor=2)),
        (DENSE, UpdateLayout(shard=1, context=2, context_kind="ulysses")),
        (DENSE, UpdateLayout(shard=1, context=2)),
        (DENSE, UpdateLayout(shard=1, pipeline=2)),
    ]
    rows, found = group_rows(), []
    for config, layout in layouts:
        engine = engine_of(world, config, shares=True, layout=layout)
        # Groups are cut, and one rank has fewer micro-batches.
        share = list(range(len(rows)))[slice(9) if engine.mesh.data.rank else slice(9, None)]
        own = rows.select(share) if engine.mesh.data.size > 1 else rows
        found.append((gradient_of(engine, own)[0], engine.score(rows).logprobs_R.cpu()))
    return found


@pytest.mark.on_device
@pytest.mark.ranks
def test_every_layout_has_the_gradient_of_one_process_without_sharing(world):
    rows = group_rows()
    expected = {
        id(config): (gradient_of(engine, rows)[0], engine.score(rows).logprobs_R.cpu())
        for config in (SPARSE, DENSE)
        for engine in [engine_of(world, config, shares=False)]
    }
    configs = [SPARSE] * 3 + [DENSE] * 3
    for results in run_ranks(2, gradients_of_layouts):
        for number, (config, (gradient, logprobs)) in enumerate(zip(configs, results, strict=True)):
            assert relative_difference(gradient, expected[id(config)][0]) < (1e-6 if number < 2 else 1e-5), number
            torch.testing.assert_close(logprobs, expected[id(config)][1], atol=3e-6, rtol=3e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=20), st.integers(1, 40),
       st.sampled_from([DENSE_SHARING, SPARSE_SHARING]))  # fmt: skip
def test_bundles_hold_every_row_once_and_count_what_is_computed(made, max_tokens, sharing):
    """Prompts of one length are the same, and responses of one length."""
    offsets = offsets_of([prompt + response for prompt, response in made])
    rows = TokenRows(torch.zeros(int(offsets[-1]), dtype=torch.int64), offsets, torch.tensor([row[0] for row in made]))
    bundles = bundle_rows(rows, TOKENS, max_tokens=max_tokens, sharing=sharing)
    assert sorted(row for bundle in bundles for row in bundle.rows) == list(range(len(rows)))
    for bundle in bundles:
        chosen = rows.select(bundle.rows)
        layout = lay_out(chosen, sharing)
        assert bundle.num_tokens == (chosen.tokens_T if layout is None else layout.source_T).numel()
        assert bundle.cost == bundle.num_tokens
        assert bundle.num_tokens <= max_tokens or len(bundle.rows) == 1


def test_the_cost_of_a_bundle_is_that_of_its_causal_attention():
    tokens = torch.tensor([0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 4, 5, 6])
    rows = TokenRows(tokens, offsets_of([8, 8]), torch.tensor([5, 5]))
    (bundle,) = bundle_rows(rows, RowCost(0, 1), max_tokens=100, sharing=SPARSE_SHARING)
    # The prompt attends to itself, and each response to all of its row.
    assert bundle.cost == 5**2 + 2 * (8**2 - 5**2)


def test_rows_whose_response_is_long_compute_their_prompt_themselves():
    rows = TokenRows(torch.zeros(48, dtype=torch.int64), offsets_of([3, 15, 16, 8, 6]), torch.full((5,), 3))
    # One prompt of all rows but the third, whose response is more than four times as long.
    assert lay_out(rows, SPARSE_SHARING).source_T.numel() == 48 - 3 * 3
    assert lay_out(rows.select([1, 2]), SPARSE_SHARING) is None


def test_equal_responses_are_computed_once_and_nothing_behind_the_last_rated_token():
    prompt, responses = [1, 2, 3], [[7, 8, 5], [7, 8, 6], [7, 9, 6], [7], [8], [7, 8, 5]]
    lengths = offsets_of([3 + len(response) for response in responses])
    tokens = torch.tensor([token for response in responses for token in prompt + response])
    rows = TokenRows(tokens, lengths, torch.full((6,), 3))
    layout = lay_out(rows, DENSE_SHARING)
    assert rows.tokens_T[layout.source_T].tolist() == [1, 2, 3, 7, 8, 7, 9]
    rated = rows.rated_places("logprobs")
    assert layout.place_A[rated].tolist() == [2, 3, 4, 2, 3, 4, 2, 5, 6, 2, 2, 2, 3, 4]
    # Experts' load counts the last tokens too, and values of whole rows are those of their last tokens.
    everything = [1, 2, 3, 7, 8, 5, 7, 8, 6, 7, 9, 6, 7, 8]
    for sharing in (SPARSE_SHARING, RowSharing("row_values", routes=False)):
        assert rows.tokens_T[lay_out(rows, sharing).source_T].tolist() == everything


def test_rows_without_company_are_computed_up_to_the_last_token_that_is_rated():
    rows = TokenRows(torch.arange(9), offsets_of([4, 3, 2]), torch.tensor([2, 1, 2]))
    assert lay_out(rows, DENSE_SHARING).source_T.tolist() == [0, 1, 2, 4, 5, 7]
    is_model = torch.tensor([False, False, True, False, False, True, False, False, False])
    turns = replace(rows, is_model_T=is_model)
    assert lay_out(turns, DENSE_SHARING).source_T.tolist() == [0, 1, 4, 7]


def test_copies_that_attention_keeps_count_for_a_fifth():
    """So that a micro-batch of shared prompts takes no more memory than one without."""
    prompt, responses = torch.arange(20), torch.arange(40).view(4, 10)
    tokens = torch.cat([torch.cat((prompt, response)) for response in responses])
    rows = TokenRows(tokens, torch.arange(0, 150, 30), torch.full((4,), 20))
    cost = RowCost(per_token=1, per_token_squared=0)
    # The last token of a response, which is rated by the one before it, isn't computed.
    [whole] = bundle_rows(rows, cost, max_tokens=20 + 4 * (9 + 4), sharing=DENSE_SHARING)
    assert (list(whole.rows), whole.num_tokens, whole.cost) == ([0, 1, 2, 3], 72, 20 + 4 * 9)
    parts = bundle_rows(rows, cost, max_tokens=71, sharing=DENSE_SHARING)
    assert [(list(part.rows), part.num_tokens) for part in parts] == [([0, 1, 2], 59), ([3], 29)]


def test_a_rank_without_rows_has_no_bundles_under_replayed_experts_too():
    nothing = torch.zeros(0, dtype=torch.int64)
    rows = TokenRows(nothing, torch.zeros(1, dtype=torch.int64), nothing, experts_TLC=torch.zeros(0, 2, 2))
    assert bundle_rows(rows, TOKENS, max_tokens=9, sharing=SPARSE_SHARING) == []
