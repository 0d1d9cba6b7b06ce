"""Sliding windows and attention sinks give what transformers' eager attention gives, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.masking_utils import eager_mask, sliding_window_causal_mask_function
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from spmdrl.engines.models.kernels import ops, plain
from spmdrl.engines.models.kernels.cpp.cpu_library import cpu_library
from spmdrl.engines.models.kernels.cpp.row_attention import cached_attention
from spmdrl.engines.models.kernels.packed import PackedRows, padded_attention
from spmdrl.engines.models.kernels.prefixed import PrefixedRows, padded_prefixed_attention
from spmdrl.nouns.batch import offsets_of
from tests.support.chosen_device import chosen_device

LENGTHS = [70, 1, 5, 129, 33]
# Up to, of, and beyond the rows' lengths.
WINDOWS = [1, 2, 5, 33, 64, 129, 200]
SEEN = [*((window, has_sinks) for window in WINDOWS for has_sinks in (False, True)), (None, True)]
PACKED = {"plain": plain.packed_attention, "table": ops.packed_attention, "padded": padded_attention}
PREFIXED = {"plain": plain.prefixed_attention, "table": ops.prefixed_attention, "padded": padded_prefixed_attention}

# Prompts shorter and longer than most windows, one without company, and rows of one token and more.
PROMPTS = [2, 70, 33, 200]
BEHIND = [(0, 1), (0, 40), (1, 3), (1, 66), (1, 5), (3, 12), (3, 130)]


def inputs_of(num_tokens: int, *, value_size: int = 16, device: torch.device | None = None) -> list[Tensor]:
    """Queries, keys, values and sinks."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((num_tokens, 4, 16), (num_tokens, 2, 16), (num_tokens, 2, value_size), (4,))
    inputs = [torch.randn(shape, generator=generator) * (1 if len(shape) > 1 else 2) for shape in shapes]
    return [x.to(device or chosen_device()).requires_grad_() for x in inputs]


def in_transformers(
    row: Sequence[int], q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attention of the tokens of one row."""
    index = torch.tensor(row, device=q.device)
    length = len(row)
    mask = eager_mask(1, length, length, mask_function=sliding_window_causal_mask_function(window or length))
    module = SimpleNamespace(
        num_key_value_groups=q.shape[1] // k.shape[1],
        sinks=q.new_full(q.shape[1:2], -torch.inf) if sinks is None else sinks,
        training=False,
    )
    heads = (x[index].transpose(0, 1)[None] for x in (q, k, v))
    out, _ = eager_attention_forward(module, *heads, mask.to(q.device), q.shape[-1] ** -0.5)
    return out[0]


def row_by_row(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    rows = [range(*bounds) for bounds in pairwise(offsets_of(LENGTHS).tolist())]
    return torch.cat([in_transformers(row, q, k, v, window, sinks) for row in rows])


def with_gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor], has_sinks: bool) -> list[Tensor]:
    """The result, and the gradients of what it depends on."""
    given = inputs if has_sinks else inputs[:3]
    out = attend(*inputs[:3], inputs[3] if has_sinks else None)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), given)]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("value_size", [16, 8])
@pytest.mark.parametrize(("window", "has_sinks"), SEEN)
@pytest.mark.parametrize("form", PACKED)
def test_packed_rows_attend_as_in_transformers(form: str, window: int | None, has_sinks: bool, value_size: int) -> None:
    rows, inputs = PackedRows(offsets_of(LENGTHS)), inputs_of(sum(LENGTHS), value_size=value_size)
    found = with_gradients(lambda q, k, v, s: PACKED[form](q, k, v, rows, window, s), inputs, has_sinks)
    assert_close(found, with_gradients(lambda q, k, v, s: row_by_row(q, k, v, window, s), inputs, has_sinks))


def whole_rows_in_transformers(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    starts, begin = offsets_of(PROMPTS).tolist(), sum(PROMPTS)
    prompts = [range(*bounds) for bounds in pairwise(starts)]
    found = [in_transformers(prompt, q, k, v, window, sinks) for prompt in prompts]
    for prompt, length in BEHIND:
        row = [*prompts[prompt], *range(begin, begin + length)]
        found.append(in_transformers(row, q, k, v, window, sinks)[PROMPTS[prompt] :])
        begin += length
    return torch.cat(found)


def behind_prompts() -> PrefixedRows:
    prompts, lengths = zip(*BEHIND, strict=True)
    return PrefixedRows(offsets_of(PROMPTS), lengths, prompts)


@pytest.mark.parametrize(("window", "has_sinks"), SEEN)
@pytest.mark.parametrize("form", PREFIXED)
def test_rows_behind_shared_prompts_attend_as_whole_rows_in_transformers(
    form: str, window: int | None, has_sinks: bool
) -> None:
    rows = behind_prompts()
    inputs = inputs_of(sum(PROMPTS) + sum(length for _, length in BEHIND))
    found = with_gradients(lambda q, k, v, s: PREFIXED[form](q, k, v, rows, window, s), inputs, has_sinks)
    expected = with_gradients(
        lambda q, k, v, s: whole_rows_in_transformers(q, k, v, window, s), inputs, has_sinks
    )  # fmt: skip
    assert_close(found, expected)


@pytest.mark.parametrize("window", WINDOWS)
def test_values_are_those_of_numpy_in_double(window: int) -> None:
    inputs = inputs_of(sum(LENGTHS))
    found = ops.packed_attention(*inputs[:3], PackedRows(offsets_of(LENGTHS)), window, inputs[3])
    q, k, v, sinks = (x.detach().cpu().double().numpy() for x in inputs)
    expected = np.zeros((*q.shape[:2], v.shape[-1]))
    for start, stop in pairwise(offsets_of(LENGTHS).tolist()):
        for token in range(start, stop):
            seen = slice(max(start, token + 1 - window), token + 1)
            for head in range(4):
                weights = np.exp(k[seen, head // 2] @ q[token, head] / 4)
                expected[token, head] = weights @ v[seen, head // 2] / (weights.sum() + np.exp(sinks[head]))
    torch.testing.assert_close(found.detach().cpu().double(), torch.from_numpy(expected), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_a_token_reaches_those_of_its_row_within_the_window_alone(window: int) -> None:
    rows = PackedRows(offsets_of(LENGTHS))
    q, k, v, sinks = (x.detach() for x in inputs_of(sum(LENGTHS)))
    before = ops.packed_attention(q, k, v, rows, window, sinks)
    for changed in (0, 30, 69, 70, 75, 76, 150, 204, 237):
        others = [x.clone() for x in (k, v)]
        for heads in others:
            heads[changed] += 1.0
        moved = (ops.packed_attention(q, *others, rows, window, sinks) != before).flatten(1).any(1).nonzero().flatten()
        row_end = next(stop for stop in offsets_of(LENGTHS).tolist() if stop > changed)
        assert moved.tolist() == list(range(changed, min(changed + window, row_end)))


@pytest.mark.cpu_only(reason="the library is the CPU's")
def test_a_window_of_the_longest_row_and_sinks_without_weight_change_no_bit() -> None:
    if cpu_library() is None:
        pytest.skip("this machine has no C++ compiler")
    rows, heads, none = PackedRows(offsets_of(LENGTHS)), inputs_of(sum(LENGTHS))[:3], torch.full((4,), -torch.inf)
    whole = with_gradients(lambda q, k, v, s: ops.packed_attention(q, k, v, rows), heads, False)
    wide = with_gradients(lambda q, k, v, s: ops.packed_attention(q, k, v, rows, 129, none), heads, False)
    assert all(map(torch.equal, wide, whole))


@pytest.mark.parametrize("mask_is_bool", [True, False])
def test_masked_attention_joins_sinks(mask_is_bool: bool, device: torch.device) -> None:
    q, k, v, sinks = inputs_of(40, value_size=8, device=device)
    mask = torch.ones(40, 40, dtype=torch.bool, device=device).tril().triu(-6)
    given = mask if mask_is_bool else torch.zeros(40, 40, device=device).masked_fill(~mask, -torch.inf)

    def masked(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        return ops.masked_attention(*heads, given, s)[0].transpose(0, 1)

    found = with_gradients(masked, (q, k, v, sinks), True)
    assert_close(
        found,
        with_gradients(lambda q, k, v, s: in_transformers(range(40), q, k, v, 7, s), (q, k, v, sinks), True),
    )


def test_a_far_window_needs_none_of_the_first_keys(device: torch.device) -> None:
    """Kernels go through keys in blocks, all of which may be hidden from a query."""
    q, k, v, _ = (x.detach() for x in inputs_of(1600, device=device))
    found = padded_attention(q, k, v, PackedRows(offsets_of([1600])), 9)
    torch.testing.assert_close(found, in_transformers(range(1600), q, k, v, 9, None), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_bfloat16_stays_near_float32(has_sinks: bool, device: torch.device) -> None:
    rows, inputs = PackedRows(offsets_of(LENGTHS)), inputs_of(sum(LENGTHS), device=device)
    halves = [x.detach().bfloat16().requires_grad_() for x in inputs]
    exact = [x.detach().float().requires_grad_() for x in halves]
    expected = with_gradients(lambda q, k, v, s: row_by_row(q, k, v, 20, s), exact, has_sinks)
    for attend in (ops.packed_attention, padded_attention):
        found = with_gradients(lambda q, k, v, s, attend=attend: attend(q, k, v, rows, 20, s), halves, has_sinks)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == torch.bfloat16
            torch.testing.assert_close(ours.float(), theirs, rtol=4e-2, atol=4e-2)


@pytest.mark.cpu_only(reason="the library is the CPU's")
@pytest.mark.parametrize(("window", "has_sinks"), [(1, True), (5, False), (64, True), (100, False), (None, True)])
def test_on_a_cpu_a_token_has_the_same_bits_alone_behind_a_prompt_and_in_a_cache(
    window: int | None, has_sinks: bool
) -> None:
    if cpu_library() is None:
        pytest.skip("this machine has no C++ compiler")
    length, block_size = 300, 16
    q, k, v, sinks = (x.detach() for x in inputs_of(length, device=torch.device("cpu")))
    seen = (window, sinks if has_sinks else None)
    whole = ops.packed_attention(q, k, v, PackedRows(offsets_of([length])), *seen)
    for cut in (1, 7, 70, 150, 299):
        rows = PrefixedRows(offsets_of([cut]), [length - cut], [0])
        assert ops.prefixed_attention(q, k, v, rows, *seen).equal(whole)
        assert ops.packed_attention(q[:cut], k[:cut], v[:cut], PackedRows(offsets_of([cut])), *seen).equal(whole[:cut])
    num_blocks = -(-length // block_size)
    # The last block has none of the row's keys.
    keys, values = (torch.full((num_blocks + 1, 2, block_size, 16), torch.nan) for _ in range(2))
    for s in range(length):
        keys[s // block_size, :, s % block_size], values[s // block_size, :, s % block_size] = k[s], v[s]
    lengths = torch.arange(1, length + 1, dtype=torch.int32)
    table = torch.arange(num_blocks, dtype=torch.int32).expand(length, -1)
    assert cached_attention(q, keys, values, table, lengths, *seen).equal(whole)
    # A row's earlier blocks may have been freed since.
    first = (lengths - (window or length)).clamp(min=0)
    is_free = (torch.arange(num_blocks) + 1) * block_size <= first[:, None]
    freed = table.masked_fill(is_free, num_blocks)
    assert cached_attention(q, keys, values, freed, lengths, *seen).equal(whole)
    assert torch.cat([
        cached_attention(q[s : s + 1], keys, values, freed[s : s + 1], lengths[s : s + 1], *seen)
        for s in range(length)
    ]).equal(whole)  # fmt: skip
    paged = ops.paged_attention(q, keys, values, freed, lengths, *seen)
    torch.testing.assert_close(paged, whole, rtol=1e-5, atol=2e-6)
