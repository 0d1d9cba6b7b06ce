"""Work and memory of layers on a planned device: those that other operators stand for there, and experts."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from tests.support.ranks import run_ranks
from torch.utils.checkpoint import checkpoint

from spmdrl.engines.models.kernels import delta, plain
from spmdrl.engines.models.kernels.packed import PackedRows
from spmdrl.nouns.batch import offsets_of
from spmdrl.plan.account import Account, Work
from spmdrl.plan.planned_device import planned_device
from spmdrl.plan.planned_kernels import take_kernels_of
from spmdrl.resources.world import World

KEY_HEADS, HEADS, SIZE = 2, 4, 32


def traced(lengths: list[int], given: str, *, trains: bool) -> tuple[int, Work]:
    """The peak and the work of a layer's rule: nothing, states, or states with gradients are before its rows."""
    account = Account()
    with planned_device(account) as device, account.span(lambda owner: False) as span:
        make = partial(torch.empty, device=device, requires_grad=trains)
        q, k = (make(sum(lengths), KEY_HEADS, SIZE) for _ in range(2))
        v, (log_decay, beta) = make(sum(lengths), HEADS, SIZE), (make(sum(lengths), HEADS) for _ in range(2))
        before = None
        if given != "nothing":
            before = make(len(lengths), HEADS, SIZE, SIZE).requires_grad_(trains and given == "gradients")
        rows = PackedRows(offsets_of(lengths))

        def layer() -> torch.Tensor:
            out, after = delta.gated_delta(q, k, v, log_decay, beta, rows, before)
            return out.sum() + after.sum() if given == "gradients" else out.sum()

        if trains:
            loss = checkpoint(layer, use_reentrant=False, preserve_rng_state=False) if given == "states" else layer()
            loss.backward()
        else:
            layer()
    return span.owners.total(), span.work


def both_ways(world: World, lengths: list[int]) -> dict[tuple[str, bool], tuple[tuple[int, Work], tuple[int, Work]]]:
    cases = [(given, trains) for given in ("nothing", "states", "gradients") for trains in (True, False)]
    stepped = [traced(lengths, given, trains=trains) for given, trains in cases]
    take_kernels_of("cuda")
    at_once = [traced(lengths, given, trains=trains) for given, trains in cases]
    return dict(zip(cases, zip(stepped, at_once, strict=True), strict=True))


@pytest.mark.ranks
@pytest.mark.cpu_only(reason="a planned device takes the place of another")
@pytest.mark.parametrize("lengths", [[640], [40, 30, 30], [310] * 3], ids=["one", "short", "three"])
def test_rows_in_one_step_need_what_they_need_chunk_by_chunk(lengths):
    for case, ((peak, work), (planned_peak, planned_work)) in run_ranks(1, both_ways, lengths)[0].items():
        assert planned_peak == pytest.approx(peak, rel=0.01), case
        assert vars(planned_work) == pytest.approx(vars(work), rel=0.01), case


def work_of_experts(world: World) -> Work:
    account = Account()
    with planned_device(account) as device, account.span(lambda owner: False) as span:
        make = partial(torch.empty, device=device, dtype=torch.bfloat16, requires_grad=True)
        counts_E = torch.full((8,), 16, device=device)
        plain.grouped_mm_linear(make(128, 32), make(8, 64, 32), counts_E).sum().backward()
    return span.work


@pytest.mark.ranks
@pytest.mark.cpu_only(reason="a planned device takes the place of another")
def test_experts_share_out_the_rows_of_their_gradients():
    (work,) = run_ranks(1, work_of_experts)
    assert work.flops == 3 * 2 * 128 * 32 * 64


def copied(world: World) -> tuple[Counter[str], int]:
    account = Account()
    with planned_device(account) as device:
        whole, parts = torch.empty(2, 6, device=device), [torch.empty(2, size, device=device) for size in (2, 4)]
        torch.ops.fsdp.split_with_sizes_copy(whole, [2, 4], dim=1, out=parts)
        return account.held, account.work.num_bytes


@pytest.mark.ranks
@pytest.mark.cpu_only(reason="a planned device takes the place of another")
def test_gathered_weights_and_their_copies_have_the_same_owner():
    ((held, num_bytes),) = run_ranks(1, copied)
    assert held == {"gathered": 3 * 512}
    assert num_bytes == 2 * 12 * 4
