"""Expert parallelism, applied from outside: experts spread over the expert axis, tokens exchanged all-to-all.

A token travels once to each rank that holds any of its experts, with their weights; that rank adds up the weighted
outputs and returns one row. All sums are over sorted copies, which fixes their order.

Shape letters: `T` tokens of this rank, `C` chosen experts of a token, `E` experts held here, `A` ranks of the axis,
`D` model width, `Z` rows and `M` copies of them, `W` rows that arrive, `P` pairs of such a row and an expert held here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.moe import Compute, Experts
from spmdrl.engines.parallel.axis_collectives import exchange_counts, exchange_rows
from spmdrl.engines.parallel.weight_cuts import Parts
from spmdrl.resources.mesh import Axis


def check_expert_parallel(config: DecoderConfig, expert: int, key: str) -> None:
    """Raise ValueError, naming the degree by its config key, if experts can't be spread over this many ranks."""
    if expert == 1:
        return
    if config.moe is None:
        raise ValueError(f"{key} is {expert}, but the model has no experts; set it to 1")
    num_experts = config.moe.num_experts
    if num_experts % expert:
        usable = [degree for degree in range(1, num_experts + 1) if num_experts % degree == 0]
        raise ValueError(
            f"{key} is {expert}, but it must divide the model's {num_experts} experts; set it to one of {usable}"
        )


def apply_expert_parallel(decoder: Decoder, axis: Axis, parts: Parts, *, column: Axis | None = None) -> None:
    """Leave only this rank's experts in a decoder on the meta device; names stay, `parts` follows.

    Collective from then on: the axis's ranks run it together, each with its own tokens. Ranks of the `column` axis, if
    any, share tokens and divide the experts: runs of experts alternate over its ranks, whose outputs must be added up.
    """
    columns, place = (1, 0) if column is None else (column.size, column.rank)
    if axis.size * columns == 1:
        return
    for module_name, experts in decoder.named_modules():
        if isinstance(experts, Experts):
            num_held = experts.num_experts // (axis.size * columns)
            first = (axis.rank * columns + place) * num_held
            for name, _ in list(experts.named_parameters()):
                parts.cut(decoder, f"{module_name}.{name}", 0, first, first + num_held)
            experts.dispatch = AllToAllDispatch(axis, columns, place)


class AllToAllDispatch:
    """`Dispatch` that sends tokens to the ranks of the axis that hold their experts, and returns the outputs.

    Run number k of experts is at place k // columns of the axis, on its ranks of column k % columns. Experts of other
    columns are skipped. A rank without tokens or arriving rows still takes part: the others wait for it in both passes,
    and its experts need gradients.
    """

    def __init__(self, axis: Axis, columns: int = 1, column: int = 0):
        self.axis = axis
        self.columns = columns
        self.column = column

    def __call__(
        self, hidden_TD: Tensor, chosen_TC: Tensor, weights_TC: Tensor, num_experts: int, compute: Compute
    ) -> Tensor:
        """Run the layer's experts on the tokens. Collective over the axis."""
        axis, num_held = self.axis, num_experts // (self.axis.size * self.columns)
        run_TC = chosen_TC // num_held
        here_TC = run_TC % self.columns == self.column
        place_TC = run_TC // self.columns
        counts_TA = place_TC.new_zeros(len(place_TC), axis.size)
        travels_TA = counts_TA.scatter_add_(1, place_TC, here_TC.to(counts_TA.dtype)) > 0
        trip = self.agree(place_TC * num_held + chosen_TC % num_held, here_TC, travels_TA, num_held)

        rank_TA = torch.arange(axis.size, device=chosen_TC.device).expand_as(travels_TA)
        sent = RowCopies.by_key(rank_TA, travels_TA, sum(trip.send_counts))
        # Weights travel in the dtype in which they are multiplied.
        message_TX = torch.cat((hidden_TD, weights_TC.to(hidden_TD.dtype)), dim=1)
        arrived_WX = exchange_rows(sent.spread(message_TX), trip.send_counts, trip.receive_counts, axis)
        hidden_WD, weights_WC = arrived_WX.split((hidden_TD.shape[1], chosen_TC.shape[1]), dim=1)

        chosen_MC = chosen_TC.to(torch.int32).index_select(0, sent.row_M)
        first_held = (axis.rank * self.columns + self.column) * num_held
        chosen_WC = exchange_rows(chosen_MC, trip.send_counts, trip.receive_counts, axis) - first_held
        pairs = RowCopies.by_key(chosen_WC, (chosen_WC >= 0) & (chosen_WC < num_held), trip.num_pairs)
        outputs_PD = compute(pairs.spread(hidden_WD), trip.counts_E)
        weights_P = weights_WC.flatten().index_select(0, pairs.cell_M)
        back_MD = exchange_rows(pairs.add_up(outputs_PD, weights_P), trip.receive_counts, trip.send_counts, axis)
        return sent.add_up(back_MD)

    def agree(self, expert_TC: Tensor, here_TC: Tensor, travels_TA: Tensor, num_held: int) -> Trip:
        """Exchange the counts. Collective over the axis; waits for the device once.

        `expert_TC` numbers the column's experts; only choices marked by `here_TC` count.
        """
        axis, chosen = self.axis, expert_TC.flatten()
        pairs_AE = chosen.new_zeros(axis.size * num_held)
        pairs_AE.scatter_add_(0, chosen, here_TC.flatten().to(chosen.dtype))
        send_A = travels_TA.sum(0)
        received = exchange_counts(torch.cat((send_A[:, None], pairs_AE.view(axis.size, num_held)), dim=1), axis)
        counts_E = received[:, 1:].sum(0)
        *rows, num_pairs = torch.cat((send_A, received[:, 0], counts_E.sum(0, keepdim=True))).tolist()
        return Trip(rows[: axis.size], rows[axis.size :], num_pairs, counts_E)


@dataclass(frozen=True)
class Trip:
    """Row counts of one exchange, agreed on by the ranks of the axis."""

    send_counts: list[int]
    """Rows sent to each rank."""
    receive_counts: list[int]
    """Rows received from each rank."""
    num_pairs: int
    """Number of (row, expert) pairs that this rank's experts compute."""
    counts_E: Tensor
    """Number of pairs per held expert; on the device."""


@dataclass(frozen=True)
class RowCopies:
    """M copies of Z rows with Y keys each, sorted by key: `spread` copies rows, `add_up` sums copies into rows."""

    cell_M: Tensor
    """Flat index of each copy's key in the [Z, Y] keys."""
    row_M: Tensor
    """Row of each copy."""
    copy_M: Tensor
    """Copies in the order of their rows."""
    start_Z: Tensor
    """Start of each row's copies in `copy_M`."""

    @classmethod
    def by_key(cls, key_ZY: Tensor, is_copied_ZY: Tensor, num_copies: int) -> RowCopies:
        """Return a copy for each of the `num_copies` keys marked, in stable order of the keys; waits for no device."""
        num_per_row = is_copied_ZY.sum(1)
        # Sorted to the end rather than picked by a mask, which would wait for the device to count them.
        left_out = torch.iinfo(key_ZY.dtype).max
        cell_M = key_ZY.masked_fill(~is_copied_ZY, left_out).flatten().argsort(stable=True)[:num_copies]
        return cls(cell_M, cell_M // key_ZY.shape[1], cell_M.argsort(), num_per_row.cumsum(0) - num_per_row)

    def spread(self, rows_ZD: Tensor) -> Tensor:
        """Return the copies [M, D]; backward sums their gradients."""
        return _Spread.apply(rows_ZD, self.row_M, self.copy_M, self.start_Z)

    def add_up(self, copies_MD: Tensor, weights_M: Tensor | None = None) -> Tensor:
        """Return the (weighted) sum [Z, D] of each row's copies, 0 for rows without copies."""
        return _AddUp.apply(copies_MD, weights_M, self.row_M, self.copy_M, self.start_Z)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ZD: Tensor, row_M: Tensor, copy_M: Tensor, start_Z: Tensor) -> Tensor:
        ctx.save_for_backward(copy_M, start_Z)
        return rows_ZD.index_select(0, row_M)

    @staticmethod
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor, None, None, None]:
        copy_M, start_Z = ctx.saved_tensors
        return _sums(gradient_MD, None, copy_M, start_Z), None, None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, copies_MD: Tensor, weights_M: Tensor | None, row_M: Tensor, copy_M: Tensor, start_Z: Tensor
    ) -> Tensor:
        ctx.save_for_backward(row_M, *(() if weights_M is None else (copies_MD, weights_M)))
        return _sums(copies_MD, weights_M, copy_M, start_Z)

    @staticmethod
    def backward(ctx: Any, gradient_ZD: Tensor) -> tuple[Tensor | None, ...]:
        row_M, *weighted = ctx.saved_tensors
        gradient_MD = gradient_ZD.index_select(0, row_M)
        if not weighted:
            return gradient_MD, None, None, None, None
        copies_MD, weights_M = weighted
        by_weights_M = torch.bmm(gradient_MD[:, None], copies_MD[:, :, None]).flatten()
        return gradient_MD * weights_M[:, None], by_weights_M, None, None, None


def _sums(copies_MD: Tensor, weights_M: Tensor | None, copy_M: Tensor, start_Z: Tensor) -> Tensor:
    """Return the (weighted) sum of each row's copies."""
    by_row_M = None if weights_M is None else weights_M.index_select(0, copy_M)
    # One pass without intermediate products, in the order of the copies: index_add's order isn't fixed on GPUs.
    return F.embedding_bag(copy_M, copies_MD.contiguous(), start_Z, mode="sum", per_sample_weights=by_row_M)
