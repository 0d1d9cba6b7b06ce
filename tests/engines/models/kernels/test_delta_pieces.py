"""Pieces of rows on several ranks compute what whole rows do, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.kernels import delta, ops
from spmdrl.engines.models.kernels.packed import PackedRows
from spmdrl.engines.training.context.hand_over import Pieces, transitions
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


def test_a_rank_without_pieces_takes_part_in_the_gather_s_backward(kernels):
    q, k, v, decay, beta, _ = (x.requires_grad_() for x in rule_inputs(0, 0, SIZES[1]))
    values, weight, _ = (x.requires_grad_() for x in conv_inputs(0, 0, SIZES[1]))
    rows, pieces = PackedRows(torch.tensor([0])), Pieces([4, 4], [-1, 0], range(2, 2))
    own = transitions(k, v, decay, beta, rows)
    assert own.shape == (0, 4, 16, 16 + 24) and own.requires_grad
    gathered = torch.randn(2, *own.shape[1:], requires_grad=True)
    out, _ = ops.gated_delta(q, k, v, decay, beta, rows, pieces.states_before(gathered))
    columns = torch.randn(2, 3, len(weight), requires_grad=True)
    mixed = ops.causal_conv(values, weight, rows, pieces.columns_before(columns))
    # Raises unless the results depend on what was gathered.
    assert not any(gradient.any() for gradient in torch.autograd.grad([out.sum(), mixed.sum()], [gathered, columns]))


def test_several_rows_may_follow_one_piece():
    """As they follow a shared prompt, here of two pieces."""
    lengths, predecessors, sizes = [5, 70, 3, 66], [-1, 0, 1, 1], SIZES[1]
    *heads, _ = rule_inputs(sum(lengths), 1, sizes, torch.float64)
    leaves = [[x.clone().requires_grad_() for x in heads] for _ in range(2)]
    pieces, rows = Pieces(lengths, predecessors, range(4)), PackedRows(offsets_of(lengths))
    before = pieces.states_before(transitions(*leaves[0][1:], rows))
    found = ops.gated_delta(*leaves[0], rows, before)[0].split(lengths)
    whole = [[0, 1, 2], [0, 1, 3]]
    results: list[list[Tensor]] = [[], []]
    for row in whole:
        parts = [torch.cat([x.split(lengths)[piece] for piece in row]) for x in leaves[1]]
        results[1].append(ops.gated_delta(*parts, PackedRows(torch.tensor([0, len(parts[0])])))[0])
        results[0].append(torch.cat([found[piece] for piece in row]))
    assert_near(*results, 1e-12)
    pulls = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype) for x in results[0]]
    gradients = [torch.autograd.grad(out, own, pulls) for out, own in zip(results, leaves, strict=True)]
    assert_near(*gradients, 1e-12)
