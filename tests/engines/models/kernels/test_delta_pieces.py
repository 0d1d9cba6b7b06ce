"""Pieces of rows on several ranks compute what whole rows do, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.kernels import delta, ops
from spmdrl.engines.models.kernels.delta_pieces import Pieces, transitions
from spmdrl.engines.models.kernels.packed import PackedRows
from spmdrl.nouns.batch import offsets_of
from tests.engines.models.delta_cases import SIZES, assert_near, conv_inputs, rule_inputs


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_pieces_on_ranks_are_whole_rows(num_ranks, dtype, tolerance):
    """As a ring of context ranks holds them: of each row's 2C pieces, rank c has piece c and piece 2C - 1 - c."""
    lengths, sizes = [8, 160, 24], SIZES[1]
    inputs, values = (make(sum(lengths), len(lengths), sizes, dtype) for make in (rule_inputs, conv_inputs))
    num, starts = 2 * num_ranks, offsets_of(lengths).tolist()
    held = [(row, part) for rank in range(num_ranks) for row in range(3) for part in (rank, num - 1 - rank)]
    sizes_of = [lengths[row] // num for row, _ in held]
    tokens = [torch.arange(size) + starts[row] + part * size for (row, part), size in zip(held, sizes_of, strict=True)]
    predecessors = [held.index((row, part - 1)) if part else -1 for row, part in held]
    ranks = [range(6 * rank, 6 * rank + 6) for rank in range(num_ranks)]
    index = [torch.cat([tokens[piece] for piece in own]) for own in ranks]
    rows = [PackedRows(offsets_of([sizes_of[piece] for piece in own])) for own in ranks]
    every, back = range(num_ranks), torch.cat(tokens).argsort()

    def by_pieces(leaves: Sequence[Tensor]) -> list[Tensor]:
        q, k, v, decay, beta, x, weight = leaves
        of_ranks = [[part[index[rank]] for part in (q, k, v, decay, beta, x)] for rank in every]
        # An all-gather, in one process.
        moved = torch.cat([transitions(*of_ranks[rank][1:5], rows[rank]) for rank in every])
        columns = torch.cat([delta.last_columns(of_ranks[rank][5], rows[rank], sizes[-1] - 1) for rank in every])
        outs, mixed = [], []
        for rank in every:
            pieces = Pieces(sizes_of, predecessors, ranks[rank])
            *heads, own_x = of_ranks[rank]
            outs.append(ops.gated_delta(*heads, rows[rank], pieces.states_before(moved))[0])
            mixed.append(ops.causal_conv(own_x, weight, rows[rank], pieces.columns_before(columns)))
        return [torch.cat(outs)[back], torch.cat(mixed)[back]]

    def whole(leaves: Sequence[Tensor]) -> list[Tensor]:
        *heads, x, weight = leaves
        packed = PackedRows(offsets_of(lengths))
        return [ops.gated_delta(*heads, packed)[0], ops.causal_conv(x, weight, packed)]

    results = []
    for compute in (by_pieces, whole):
        leaves = [x.clone().requires_grad_() for x in (*inputs[:5], *values[:2])]
        out = compute(leaves)
        pulls = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=dtype) for x in out]
        results.append([*out, *torch.autograd.grad(out, leaves, pulls)])
    assert_near(*results, tolerance)


def test_every_rank_s_states_depend_on_the_gathered_transitions():
    """Else its autograd would leave out the gather's backward, for which the others wait."""
    moved = torch.randn(2, 1, 3, 5, requires_grad=True)
    pieces = Pieces([4, 4], [-1, 0], range(1))
    (gradient,) = torch.autograd.grad(pieces.states_before(moved).sum(), moved)
    assert gradient.shape == moved.shape and not gradient.any()
    columns = torch.randn(2, 3, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(pieces.columns_before(columns).sum(), columns)
    assert not gradient.any()
