from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GptOssConfig
from transformers.masking_utils import eager_mask, sliding_window_causal_mask_function
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from spmdrl.engines.models.attention import AttentionConfig, SelfAttention
from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.engines.models.mixers import KeyBlocks, Rotations
from spmdrl.nouns.batch import offsets_of
from tests.support.chosen_device import chosen_device


def one_row_at_a_time(lengths: list[int], q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor) -> Tensor:
    """Softmax attention written out, a row at a time."""
    share = q_THK.shape[1] // k_TJK.shape[1]
    rows = []
    for q, k, v in zip(q_THK.split(lengths), k_TJK.split(lengths), v_TJK.split(lengths), strict=True):
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        scores = torch.einsum("qhk,thk->hqt", q, k) / q.shape[-1] ** 0.5
        hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        rows.append(torch.einsum("hqt,thk->qhk", F.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1), v))
    return torch.cat(rows)


@pytest.mark.parametrize("value_size", [8, 6])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[7], [3, 40, 1, 21, 60, 22], [9, 9, 9], [30, 70, 5], [2, 0, 3], [0, 4]])
def test_packed_rows_attend_like_separate_rows(
    lengths: list[int], num_kv_heads: int, value_size: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    shapes = [(sum(lengths), 4, 8), (sum(lengths), num_kv_heads, 8), (sum(lengths), num_kv_heads, value_size)]
    inputs = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
    weight = torch.randn(sum(lengths), 4, value_size).to(device)
    attended = PackedCausalAttention(offsets_of(lengths))(0, *inputs)
    expected = one_row_at_a_time(lengths, *inputs)
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad((attended * weight).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-5, rtol=1e-4)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=6), st.data())
def test_a_token_never_reaches_other_rows_or_earlier_positions(lengths: list[int], data: st.DataObject) -> None:
    changed = data.draw(st.integers(0, sum(lengths) - 1))
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), 2, 4).to(chosen_device()) for _ in range(3))
    attend = PackedCausalAttention(offsets_of(lengths))
    before = attend(0, q, k, v)
    k[changed] += 1.0
    v[changed] += 1.0
    moved = (attend(0, q, k, v) != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    row_end = next(stop for stop in offsets_of(lengths).tolist() if stop > changed)
    assert moved == list(range(changed, row_end))


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_tokens_give_an_empty_result_that_still_differentiates(lengths: list[int], device: torch.device) -> None:
    q, k, v = (torch.zeros(shape, device=device) for shape in ((0, 4, 8), (0, 2, 8), (0, 2, 6)))
    q.requires_grad_()
    attended = PackedCausalAttention(offsets_of(lengths))(0, q, k, v)
    assert attended.shape == (0, 4, 6)
    attended.sum().backward()
    assert q.grad is not None


ATTENTION = AttentionConfig(
    hidden_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    rope=None,
    rms_eps=1e-6,
    qk_norm=False,
    bias=True,
    output_bias=True,
    window=5,
    has_sinks=True,
)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_with_sinks_and_perhaps_a_window_is_gpt_oss(layer: int, device: torch.device) -> None:
    lengths = [7, 1, 20]
    theirs = GptOssAttention(
        GptOssConfig(
            hidden_size=12,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=5,
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            attn_implementation="eager",
        ),
        layer,
    ).to(device)
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = SelfAttention(replace(ATTENTION, window=theirs.sliding_window), layer).to(device)
    ours.load_state_dict(theirs.state_dict())
    hidden_TD = torch.randn(sum(lengths), 12).to(device)
    rotations = Rotations(torch.arange(sum(lengths), device=device), set())
    mixed = ours(hidden_TD, rotations, PackedCausalAttention(offsets_of(lengths)))
    rows = []
    for row_TD in hidden_TD.split(lengths):
        length = len(row_TD)
        window = theirs.sliding_window or length
        mask = eager_mask(1, length, length, mask_function=sliding_window_causal_mask_function(window)).to(device)
        unturned = (torch.ones(1, length, 4, device=device), torch.zeros(1, length, 4, device=device))
        rows.append(theirs(row_TD[None], unturned, mask)[0][0])
    torch.testing.assert_close(mixed, torch.cat(rows), atol=1e-5, rtol=1e-4)
    weight = torch.randn_like(mixed)
    gradients = [
        torch.autograd.grad((out * weight).sum(), [module.get_parameter(name) for name in theirs.state_dict()])
        for out, module in ((mixed, ours), (torch.cat(rows), theirs))
    ]
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-4, rtol=1e-4)


def test_a_window_is_part_of_the_state_that_generation_keeps() -> None:
    assert ATTENTION.state(1) == KeyBlocks(2, 8, 8, window=5)
