"""The balance loss against a reference over whole rows, biases against the formula, and replayed choices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.moe import SparseFeedForward
from spmdrl.engines.training.routers import (
    RecordingRoute,
    RoutedTokens,
    RouterStatistics,
    RouterTotals,
    RoutingScope,
    check_routing,
    experts_of_rows,
    largest_bias,
)
from spmdrl.nouns.settings.model_sizes import MoeConfig
from spmdrl.nouns.settings.training_config import RoutingConfig
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import Axis, build_update_mesh
from spmdrl.resources.world import World
from tests.engines.training.tiny import SPARSE, axis_of
from tests.support.chosen_device import chosen_device
from tests.support.ranks import run_ranks

NUM_EXPERTS, CHOICES, WIDTH = 6, 2, SPARSE.hidden_size
MODEL = replace(
    SPARSE,
    num_layers=3,
    moe=MoeConfig(num_experts=NUM_EXPERTS, experts_per_token=CHOICES, intermediate_size=4, dense_layers=(0,)),
)
SIGMOID = replace(MODEL, model_type="deepseek_v3", moe=replace(MODEL.moe, scoring="sigmoid"))
LAYER = 1
LENGTHS = (3, 6, 4, 1)
NUM_ROWS = len(LENGTHS)
ROUTING = RoutingConfig(aux_loss_coefficient=0.3)


def scope_of(config: DecoderConfig = MODEL, context: Axis | None = None, num_tensor_ranks: int = 1) -> RoutingScope:
    context = context or axis_of("context")
    return RoutingScope(config, ROUTING, NUM_ROWS, context, axis_of("tensor", num_tensor_ranks))


def products() -> list[Tensor]:
    """What the router makes of each row's tokens, before the scoring."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, NUM_EXPERTS, generator=generator) for length in LENGTHS]


def score(products_TE: Tensor, config: DecoderConfig) -> Tensor:
    return products_TE.sigmoid() if config is SIGMOID else products_TE.softmax(-1)


def reference(config: DecoderConfig) -> tuple[float, list[Tensor]]:
    """Equations 17 to 20 of arXiv:2412.19437 in float64, one row at a time; the mean over rows and its gradients."""
    leaves = [row.double().requires_grad_() for row in products()]
    losses = []
    for leaf in leaves:
        scores_TE = score(leaf, config)
        best_TC = scores_TE.topk(CHOICES, dim=-1).indices
        is_best_TE = torch.zeros_like(scores_TE).scatter(1, best_TC, 1.0)
        f_E = NUM_EXPERTS / (CHOICES * len(leaf)) * is_best_TE.sum(0)
        p_E = (scores_TE / scores_TE.sum(-1, keepdim=True)).mean(0)
        losses.append((f_E * p_E).sum())
    loss = torch.stack(losses).mean()
    (ROUTING.aux_loss_coefficient * loss).backward()
    return loss.item(), [leaf.grad for leaf in leaves]


def route_rows(rows: list[int], scope: RoutingScope, keep: dict[int, Tensor], num_padding: int) -> tuple[float, dict]:
    """Route the kept tokens of some rows; the recorded loss and each row's gradient at its kept tokens."""
    device = chosen_device()
    leaves = {row: products()[row][keep[row]].to(device).requires_grad_() for row in rows}
    padding_TE = torch.full((num_padding, NUM_EXPERTS), 0.7, device=device, requires_grad=True)
    scores_TE = score(torch.cat([*leaves.values(), padding_TE]), scope.model)
    numbers = [number for number, row in enumerate(rows) for _ in range(len(leaves[row]))]
    row_T, lengths_B = numbers + [-1] * num_padding, [LENGTHS[row] for row in rows]
    tokens = RoutedTokens(torch.tensor(row_T, device=device), torch.tensor(lengths_B, device=device))
    route = RecordingRoute(scope, tokens)
    chosen_TC = scores_TE.topk(CHOICES, dim=-1).indices
    # Run twice, as a recomputed layer is.
    for _ in range(2):
        out_TE, same_TC = route(LAYER, scores_TE, chosen_TC)
    assert torch.equal(out_TE, scores_TE) and torch.equal(same_TC, chosen_TC)
    (0.0 * out_TE.sum()).backward()
    assert not padding_TE.grad.any()
    record = route.records[LAYER]
    assert int(record.counts_E.sum()) == CHOICES * len(numbers)
    return float(record.aux_loss), {row: leaf.grad.cpu() for row, leaf in leaves.items()}


@pytest.mark.parametrize("config", [MODEL, SIGMOID], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("packing", [[[0, 1, 2, 3]], [[2, 0], [3, 1]], [[0], [1], [2], [3]]])
def test_balance_loss_is_that_of_whole_rows_in_any_packing(config, packing):
    loss, gradients = reference(config)
    whole = {row: torch.arange(length) for row, length in enumerate(LENGTHS)}
    total = 0.0
    for number, rows in enumerate(packing):
        part, by_row = route_rows(rows, scope_of(config), whole, num_padding=number)
        total += part
        for row, gradient in by_row.items():
            torch.testing.assert_close(gradient.double(), gradients[row], rtol=1e-5, atol=1e-8)
    assert total == pytest.approx(loss, rel=1e-6)


def test_tensor_ranks_share_the_gradient_that_their_sum_has():
    _, gradients = reference(MODEL)
    whole = {row: torch.arange(length) for row, length in enumerate(LENGTHS)}
    _, by_row = route_rows([1], scope_of(num_tensor_ranks=4), whole, num_padding=0)
    torch.testing.assert_close(4 * by_row[1].double(), gradients[1], rtol=1e-5, atol=1e-8)


def tokens_of_row(kept: Tensor) -> RoutedTokens:
    device = chosen_device()
    row_T = torch.zeros(len(kept), dtype=torch.int64, device=device)
    return RoutedTokens(row_T, torch.tensor([LENGTHS[1]], device=device))


def route_half(world: World) -> tuple[float, dict, list]:
    """Route every other token of each row, two rows per micro-batch: loss, gradients, all ranks' counts of row 1."""
    mesh = build_update_mesh(UpdateLayout(shard=1, context=2), world.device, world.rank)
    keep = {row: torch.arange(mesh.context.rank, length, 2) for row, length in enumerate(LENGTHS)}
    total, gradients = 0.0, {}
    for rows in ([0, 1], [2, 3]):
        part, by_row = route_rows(rows, scope_of(context=mesh.context), keep, num_padding=world.rank)
        total, gradients = total + part, gradients | by_row
    statistics = RouterStatistics(MODEL, ROUTING, world.device.torch_device)
    route = RecordingRoute(scope_of(context=mesh.context), tokens_of_row(keep[1]))
    scores_TE = score(products()[1][keep[1]].to(world.device.torch_device), MODEL)
    route(LAYER, scores_TE, scores_TE.topk(CHOICES, dim=-1).indices)
    statistics.add(route)
    return total, gradients, statistics.totals(mesh).counts_LE.tolist()


@pytest.mark.ranks
def test_rows_split_over_context_ranks_have_the_loss_of_whole_rows():
    loss, expected = reference(MODEL)
    ranks = run_ranks(2, route_half)
    assert sum(total for total, _, _ in ranks) == pytest.approx(loss, rel=1e-6)
    for row, length in enumerate(LENGTHS):
        gradient = torch.empty(length, NUM_EXPERTS)
        for rank, (_, gradients, _) in enumerate(ranks):
            gradient[rank::2] = gradients[row]
        torch.testing.assert_close(gradient.double(), expected[row], rtol=1e-5, atol=1e-8)
    counts = score(products()[1], MODEL).topk(CHOICES, dim=-1).indices.flatten().bincount(minlength=NUM_EXPERTS)
    assert all(counts_LE == [counts.tolist(), [0] * NUM_EXPERTS] for _, _, counts_LE in ranks)


def sparse_decoder(config: DecoderConfig) -> Decoder:
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in decoder.parameters():
        parameter.data.normal_(generator=generator)
    return decoder.to(chosen_device())


def test_biases_move_towards_even_loads_by_the_rate(world):
    routing, device = RoutingConfig(bias_update_rate=0.25), world.device.torch_device
    counts_LE = torch.tensor([[4, 1, 1, 0, 4, 2], [2, 2, 2, 2, 2, 2]], device=device)
    totals = RouterTotals(SIGMOID, routing, counts_LE, torch.zeros(2), torch.zeros(2))
    decoder = sparse_decoder(SIGMOID)
    totals.update_bias(decoder)
    totals.update_bias(decoder)
    biases = [decoder.layers[layer].mlp.gate.e_score_correction_bias for layer in (1, 2)]
    assert biases[0].tolist() == [-0.5, 0.5, 0.5, 0.5, -0.5, 0.0]
    assert biases[1].tolist() == [0.0] * 6
    mesh = build_update_mesh(UpdateLayout(shard=1), world.device, world.rank)
    assert largest_bias([decoder], mesh, device) == 0.5
    assert largest_bias([sparse_decoder(MODEL)], mesh, device) == 0.0


def test_metrics_are_means_over_layers_relative_to_the_mean_load():
    counts_LE = torch.tensor([[4, 1, 1, 0, 4, 2], [2, 2, 2, 2, 2, 2]])
    totals = RouterTotals(MODEL, ROUTING, counts_LE, torch.tensor([6.0, 3.0]), torch.tensor([1.5, 1.0]))
    assert totals.metrics() == {
        "router/load_max_over_mean": 1.5,
        "router/load_min_over_mean": 0.5,
        "router/entropy": 0.75,
        "router/aux_loss": 1.25,
    }


def test_entropy_is_that_of_the_affinities(device):
    tokens = RoutedTokens(torch.tensor([0, 0, -1], device=device), torch.tensor([2], device=device))
    route = RecordingRoute(scope_of(), tokens)
    scores_TE = torch.full((3, NUM_EXPERTS), 1 / NUM_EXPERTS, device=device)
    route(LAYER, scores_TE, torch.zeros(3, CHOICES, dtype=torch.int64, device=device))
    assert float(route.records[LAYER].entropy) == pytest.approx(2 * torch.tensor(NUM_EXPERTS).log().item())


def run_layer(layer: SparseFeedForward, hidden_TD: Tensor, experts_LTC: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of the router and counts of a layer under recomputation."""
    row_T = torch.zeros(len(hidden_TD), dtype=torch.int64, device=hidden_TD.device)
    tokens = RoutedTokens(row_T, torch.tensor([len(hidden_TD)], device=hidden_TD.device), experts_LTC)
    route = RecordingRoute(replace(scope_of(), routing=RoutingConfig()), tokens)
    layer.zero_grad()
    out_TD = checkpoint(layer, hidden_TD, route, use_reentrant=False)
    out_TD.square().sum().backward()
    return out_TD.detach(), layer.gate.weight.grad.clone(), route.records[layer.layer].counts_E


def test_replay_changes_choices_and_replaying_the_routers_own_changes_nothing(device):
    layer = sparse_decoder(MODEL).layers[2].mlp
    hidden_TD = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    own_TC = layer.gate(hidden_TD)[1]
    unknown_TC = torch.full_like(own_TC, -1)
    plain = run_layer(layer, hidden_TD, None)
    same = run_layer(layer, hidden_TD, torch.stack((unknown_TC, own_TC)).to(torch.int16))
    # Layer 2 is the second sparse one, so what is given for the first doesn't affect it.
    unknown = run_layer(layer, hidden_TD, torch.stack((own_TC, unknown_TC)).to(torch.int16))
    for result in (same, unknown):
        assert all(torch.equal(value, expected) for value, expected in zip(result, plain, strict=True))
    given_TC = own_TC.clone()
    given_TC[:-1] = torch.tensor([1, 4], device=device)
    given_TC[-1] = -1
    replayed = run_layer(layer, hidden_TD, torch.stack((unknown_TC, given_TC)).to(torch.int16))
    torch.testing.assert_close(replayed[0][-1], plain[0][-1])
    assert not torch.allclose(replayed[0][:-1], plain[0][:-1]) and not torch.equal(replayed[1], plain[1])
    expected = torch.cat((torch.tensor([1, 4], device=device).repeat(4), own_TC[-1])).bincount(minlength=NUM_EXPERTS)
    assert torch.equal(replayed[2], expected)


def test_recorded_rows_leave_each_last_token_to_the_router():
    lengths = torch.tensor([2, 3])
    packed = torch.arange(3 * 2 * CHOICES, dtype=torch.int16)
    experts_LTC = experts_of_rows(packed, lengths, MODEL).transpose(0, 1)
    assert experts_LTC.shape == (2, 5, CHOICES)
    assert experts_LTC[:, 0].tolist() == [[0, 1], [2, 3]]
    assert experts_LTC[1].tolist() == [[2, 3], [-1, -1], [6, 7], [10, 11], [-1, -1]]
    with pytest.raises(ValueError, match=r"11 recorded choices, but 5 tokens in 2 rows need 12"):
        experts_of_rows(packed[1:], lengths, MODEL)


@pytest.mark.parametrize(
    ("fields", "config", "words"),
    [
        ({"aux_loss_coefficient": 0.1}, replace(MODEL, moe=None), "aux_loss_coefficient is 0.1.*no experts"),
        ({"replay": "rollout"}, replace(MODEL, moe=None), "replay is rollout.*no experts"),
        ({"bias_update_rate": 0.1}, MODEL, "bias_update_rate is 0.1.*qwen3_moe routers have no"),
    ],
)
def test_options_that_a_model_cannot_follow_are_refused(fields, config, words):
    check_routing(RoutingConfig(), config)
    with pytest.raises(ValueError, match=words):
        check_routing(RoutingConfig(**fields), config)
