"""The gated delta rule (arXiv:2412.06464) and its causal convolution on packed rows, in plain PyTorch.

A row's state S [K, U] of each head is an associative memory. Each token lets it decay, and writes what its key should
recall beyond what it does: S <- exp(g) S, then S <- S + k (beta (v - S^T k))^T; the token's output is S^T q. Rows are
cut into chunks, inside which this is a triangular system (section 3.3); only the chunks of a row follow each
other. All is computed in float32, or float64 for values in float64.

Shape letters: `T` packed tokens, `G` heads of queries and keys, `H` heads of values, `K` and `U` their sizes, `B` rows
that hold tokens, `C` channels and `W` width of the convolution, `S` slots of states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels.packed import ChunkPlan, PackedRows, from_slots, to_slots

EPS = 1e-6
"""Added to the squared norm of queries and keys."""
LARGEST_CHUNK = 64


def causal_conv(values_TC: Tensor, weight_CW: Tensor, rows: PackedRows, before_BWC: Tensor | None = None) -> Tensor:
    if not rows.lengths:
        return values_TC * weight_CW.sum() + (0 if before_BWC is None else before_BWC.sum())
    num_before, dtype = weight_CW.shape[1] - 1, compute_dtype(values_TC)
    before = columns_or_zeros(before_BWC, values_TC, rows, num_before)
    parts = [part for row in zip(before.unbind(), values_TC.split(rows.lengths), strict=True) for part in row]
    # The sums whose first column is before a row's are those that mix it with the row before.
    channels = F.pad(torch.cat(parts).to(dtype), (0, 0, 0, num_before)).T[None]
    sums_C = F.conv1d(channels, weight_CW.to(dtype)[:, None], groups=len(weight_CW))[0].T
    sizes = [size for length in rows.lengths for size in (length, num_before)]
    return F.silu(torch.cat(sums_C.split(sizes)[::2])).to(values_TC.dtype)


def last_columns(values_TC: Tensor, rows: PackedRows, num: int, before_BWC: Tensor | None = None) -> Tensor:
    """Return each row's last `num` columns [B, num, C], which are the `before` of tokens that follow it."""
    before = columns_or_zeros(before_BWC, values_TC, rows, num)
    columns = [
        torch.cat((earlier[min(len(row), num) :], row[max(len(row) - num, 0) :]))
        for earlier, row in zip(before.unbind(), values_TC.split(rows.lengths), strict=True)
    ]
    return torch.stack(columns) if columns else before


def columns_or_zeros(before_BWC: Tensor | None, values_TC: Tensor, rows: PackedRows, num: int) -> Tensor:
    """Return the columns [B, num, C] before rows of these values."""
    if before_BWC is None:
        return values_TC.new_zeros(len(rows.lengths), num, values_TC.shape[1])
    return before_BWC.to(values_TC.dtype)


def conv_step(values_BC: Tensor, weight_CW: Tensor, columns_SWC: Tensor, slots_B: Tensor) -> Tensor:
    columns_BWC = torch.cat((columns_SWC[slots_B], values_BC[:, None].to(columns_SWC.dtype)), dim=1)
    columns_SWC[slots_B] = columns_BWC[:, 1:]
    dtype = compute_dtype(values_BC)
    sums_BC = (columns_BWC.to(dtype) * weight_CW.T.to(dtype)).sum(1)
    return F.silu(sums_BC).to(values_BC.dtype)


def gated_delta_step(
    q_BGK: Tensor, k_BGK: Tensor, v_BHU: Tensor, log_decay_BH: Tensor, beta_BH: Tensor,
    states_SHKU: Tensor, slots_B: Tensor,
) -> Tensor:  # fmt: skip
    share, dtype = v_BHU.shape[1] // k_BGK.shape[1], states_SHKU.dtype
    q, k = (_unit(x, dtype).repeat_interleave(share, dim=1)[..., None] for x in (q_BGK, k_BGK))
    states_BHKU = states_SHKU[slots_B].mul_(log_decay_BH.to(dtype).exp()[..., None, None])
    fresh_BHU = (v_BHU.to(dtype) - (states_BHKU * k).sum(2)) * beta_BH.to(dtype)[..., None]
    states_SHKU[slots_B] = states_BHKU.addcmul_(k, fresh_BHU[:, :, None])
    return (states_BHKU * q).sum(2).mul_(q_BGK.shape[-1] ** -0.5).to(v_BHU.dtype)


def gated_delta(
    q_TGK: Tensor, k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor, rows: PackedRows,
    before_BHKU: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = compute_dtype(v_THU)
    before = no_states(k_TGK, v_THU, rows) if before_BHKU is None else before_BHKU.to(dtype)
    if not rows.lengths:
        nothing = torch.cat([x.flatten() for x in (q_TGK, k_TGK, log_decay_TH, beta_TH, before)]).sum()
        return v_THU + nothing.to(v_THU.dtype), before
    plan = rows.chunks(LARGEST_CHUNK, v_THU.device)
    chunks = Chunks.of(k_TGK, v_THU, log_decay_TH, beta_TH, plan)
    states, written, after = chunks.scan(before, plan)
    q = _in_chunks(_unit(q_TGK, dtype) * q_TGK.shape[-1] ** -0.5, plan)
    out = _times(q, chunks.since_start[..., None]) @ states + _times(q @ chunks.keys.mT, chunks.decays) @ written
    return from_slots(out.transpose(1, 2).flatten(0, 1), plan.slots).to(v_THU.dtype), after


def no_states(k_TGK: Tensor, v_THU: Tensor, rows: PackedRows) -> Tensor:
    """Return zeros as the rows' states [B, H, K, U]."""
    shape = (len(rows.lengths), v_THU.shape[1], k_TGK.shape[-1], v_THU.shape[-1])
    return v_THU.new_zeros(shape, dtype=compute_dtype(v_THU))


def compute_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


@dataclass(frozen=True)
class Chunks:
    """Changes that chunks of tokens make to any state before them: [chunks, heads, c, ...], c tokens in a chunk."""

    keys: Tensor
    """[chunks, G, c, K]"""
    decays: Tensor
    """[chunks, H, c, c] decay from each token to each later one, and zeros above"""
    since_start: Tensor
    """[chunks, H, c] decay from before the chunk to each token"""
    fresh: Tensor
    """[chunks, H, c, U] values that tokens write if the state is empty"""
    reads: Tensor
    """[chunks, H, c, K] keys by which they recall from the state what they needn't write"""

    @classmethod
    def of(cls, k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor, plan: ChunkPlan) -> Chunks:
        dtype = compute_dtype(v_THU)
        keys, values = _in_chunks(_unit(k_TGK, dtype), plan), _in_chunks(v_THU.to(dtype), plan)
        # Padding changes no state, as it neither decays nor writes.
        log_decay, beta = (_in_chunks(x.to(dtype), plan, padding=0.0) for x in (log_decay_TH, beta_TH))
        ones = log_decay.new_ones(log_decay.shape[-1], log_decay.shape[-1])
        # Differences of cumulative sums would cancel behind a token of strong decay.
        between = ones.tril() @ (log_decay[..., None] * ones.tril(-1))
        decays, since_start = between.exp().tril(), log_decay.cumsum(-1).exp()
        system = _times(keys @ keys.mT, decays * beta[..., None])
        sides = torch.cat((values * beta[..., None], _times(keys, (beta * since_start)[..., None])), dim=-1)
        solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        return cls(keys, decays, since_start, *solved.split([values.shape[-1], keys.shape[-1]], dim=-1))

    def scan(self, before_BHKU: Tensor, plan: ChunkPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state before each chunk, the values written [chunks, H, c, U], and each row's last state."""
        writes, whole = _times(self.keys, self.decays[..., -1, :, None]), self.since_start[..., -1, None, None]
        state = before_BHKU.index_select(0, plan.order)
        states, written, after = step_through(self.fresh, self.reads, writes.mT, whole, state, plan.counts)
        return states, written, after.index_select(0, plan.places)


def step_through(
    fresh: Tensor, reads: Tensor, writes: Tensor, whole: Tensor, state: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Step from chunk to chunk of rows, longest first; returns states before, written values, and last states."""
    states, written, ended = [], [], []
    of_numbers = (x.split(counts) for x in (fresh, reads, writes, whole))
    for count, fresh, reads, writes, whole in zip(counts, *of_numbers, strict=True):
        state, over = state.split([count, len(state) - count])
        ended.append(over)
        states.append(state)
        written.append(fresh - reads @ state)
        state = state * whole + writes @ written[-1]
    return torch.cat(states), torch.cat(written), torch.cat((state, *reversed(ended)))


def _in_chunks(values: Tensor, plan: ChunkPlan, padding: float | None = None) -> Tensor:
    """Return values [T, heads, ...] as [chunks, heads, c, ...], with this padding or whatever is finite."""
    [block] = plan.slots.blocks
    slots = to_slots(values, plan.slots)
    if padding is not None:
        slots = slots.index_fill(0, plan.slots.padded_slots, padding)
    return slots.unflatten(0, (block.num_rows, block.length)).transpose(1, 2).contiguous()


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply what key heads have [chunks, G, ...] by what value heads have [chunks, H, ...]."""
    if x.shape[1] == factor.shape[1]:
        return x * factor
    return (x[:, :, None] * factor.unflatten(1, (x.shape[1], -1))).flatten(1, 2)
