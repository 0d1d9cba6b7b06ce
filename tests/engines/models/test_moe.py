from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.moe import LocalDispatch, Router, SparseFeedForward
from spmdrl.nouns.settings.model_sizes import MoeConfig
from tests.support.chosen_device import chosen_device

CONFIG = MoeConfig(num_experts=5, experts_per_token=2, intermediate_size=3)


def sparse_layer(config: MoeConfig = CONFIG) -> SparseFeedForward:
    torch.manual_seed(0)
    layer = SparseFeedForward(4, config, layer=7)
    with torch.no_grad():
        for weight in layer.state_dict().values():
            weight.normal_()
    return layer.to(chosen_device())


@pytest.mark.on_device
def test_tokens_get_the_weighted_sum_of_their_experts_and_so_do_gradients(device: torch.device) -> None:
    layer = sparse_layer().double()
    # No token reaches the last expert.
    chosen_TC = torch.tensor([[0, 3], [2, 0], [3, 1], [0, 1]], device=device)

    def run(hidden_TD: Tensor, weights_TC: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        named = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        return torch.func.functional_call(layer.experts, named, (hidden_TD, chosen_TC, weights_TC))

    hidden_TD, weights_TC = (x.to(device).double() for x in (torch.randn(4, 4), torch.rand(4, 2)))
    inputs = [hidden_TD, weights_TC, *(getattr(layer.experts, f"{name}_proj") for name in ("gate", "up", "down"))]
    gate, up, down = (tensor.detach() for tensor in inputs[2:])
    for token in range(4):
        outputs = [
            down[e] @ (F.silu(gate[e] @ hidden_TD[token]) * (up[e] @ hidden_TD[token])) for e in chosen_TC[token]
        ]
        expected = sum(weight * output for weight, output in zip(weights_TC[token], outputs, strict=True))
        torch.testing.assert_close(run(*inputs)[token].detach(), expected)
    assert torch.autograd.gradcheck(run, [tensor.detach().requires_grad_() for tensor in inputs])


def test_no_tokens_are_no_trouble(device: torch.device) -> None:
    layer = sparse_layer()
    out_TD = layer(torch.empty(0, 4, device=device))
    assert out_TD.shape == (0, 4)
    out_TD.sum().backward()
    assert all(weight.grad is not None for weight in layer.experts.parameters())


def test_experts_work_on_rows_sorted_by_expert_in_token_order(device: torch.device) -> None:
    seen: list[tuple[list[float], list[int]]] = []

    def compute(rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        seen.append((rows_RD[:, 0].tolist(), counts_E.tolist()))
        return rows_RD

    hidden_TD = torch.tensor([[10.0], [11.0], [12.0]], device=device)
    chosen_TC = torch.tensor([[3, 0], [0, 1], [3, 1]], device=device)
    weights_TC = torch.tensor([[1.0, 2.0]] * 3, device=device)
    out_TD = LocalDispatch()(hidden_TD, chosen_TC, weights_TC, 4, compute)
    assert seen == [([10.0, 11.0, 11.0, 12.0, 10.0, 12.0], [2, 2, 0, 2])]
    assert torch.equal(out_TD, 3 * hidden_TD)


def test_a_route_sees_and_replaces_scores_and_choice(device: torch.device) -> None:
    layer = sparse_layer()
    hidden_TD = torch.randn(6, 4).to(device)
    calls: list[tuple[int, Tensor, Tensor]] = []

    def record(number: int, scores_TE: Tensor, chosen_TC: Tensor) -> tuple[Tensor, Tensor]:
        calls.append((number, scores_TE, chosen_TC))
        return scores_TE, chosen_TC

    out_TD = layer(hidden_TD, record)
    ((number, scores_TE, chosen_TC),) = calls
    assert number == 7 and torch.equal(out_TD, layer(hidden_TD))
    assert torch.equal(chosen_TC, scores_TE.topk(2).indices)

    swapped = layer(hidden_TD, lambda number, scores_TE, chosen_TC: (scores_TE, (chosen_TC + 1) % 5))
    expected = layer.experts(hidden_TD, (chosen_TC + 1) % 5, scores_TE.gather(1, (chosen_TC + 1) % 5))
    torch.testing.assert_close(swapped, expected)
    layer(hidden_TD, lambda number, scores_TE, chosen_TC: (2 * scores_TE, chosen_TC)).sum().backward()
    assert layer.gate.weight.grad.norm() > 0


def test_the_correction_bias_and_the_groups_decide_the_choice_but_not_the_weights(device: torch.device) -> None:
    config = MoeConfig(6, 2, 3, scoring="sigmoid", normalize=True, weight_scale=2.0, num_groups=3, groups_per_token=1)
    router = Router(1, config)
    # Affinities rise with the expert's number, so that without a bias the last group has the best two.
    router.load_state_dict({"weight": torch.arange(6.0)[:, None] / 4, "e_score_correction_bias": torch.zeros(6)})
    router.to(device)
    hidden_TD = torch.ones(1, 1, device=device)
    scores_TE, chosen_TC = router(hidden_TD)
    assert sorted(chosen_TC[0].tolist()) == [4, 5]
    # The best single expert is now of the first group, but the best pair isn't.
    router.e_score_correction_bias.copy_(torch.tensor([1.0, 0.0, 0.9, 0.9, 0.0, 0.0]))
    scores_TE, chosen_TC = router(hidden_TD)
    assert sorted(chosen_TC[0].tolist()) == [2, 3]
    expected = scores_TE[0, chosen_TC[0]] / scores_TE[0, 2:4].sum() * 2.0
    torch.testing.assert_close(router.weigh(scores_TE, chosen_TC)[0], expected)


def test_affinities_are_float32_in_a_bfloat16_model(device: torch.device) -> None:
    layer = sparse_layer().to(torch.bfloat16)
    scores_TE, _ = layer.gate(torch.randn(3, 4, dtype=torch.bfloat16, device=device))
    assert scores_TE.dtype is torch.float32
    assert layer(torch.randn(3, 4, dtype=torch.bfloat16, device=device)).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"experts_per_token": 6}, "num_experts_per_tok is 6, but must be between 1 and the 5 experts"),
        ({"num_groups": 2}, "5 experts in n_group 2 groups of which topk_group 1"),
        ({"num_experts": 6, "num_groups": 3, "groups_per_token": 4}, "6 experts in n_group 3 groups"),
        ({"num_experts": 6, "num_groups": 3, "experts_per_token": 3}, "topk_group 1 groups of 2 experts can't give"),
    ],
)
def test_impossible_numbers_of_experts_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoeConfig(**{"num_experts": 5, "experts_per_token": 2, "intermediate_size": 3, **sizes})
