"""Packed attention, and attention in the parts that a ring computes, beside a softmax written out on the CPU.

Shape letters: `T` packed tokens, `H` query heads, `K` head size, `B` rows, `C` parts of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import ops, plain
from spmdrl.engines.models.kernels.packed import PackedRows
from spmdrl.engines.training.context.block_attention import Inputs, attend_rows, attend_rows_backward, runs_packed_flash
from spmdrl.engines.training.context.ring_attention import RingAttention, plan_ring
from spmdrl.nouns.batch import offsets_of
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.verbs.doctor.device_verbs import median_seconds
from spmdrl.verbs.doctor.stage_run import StageRun
from tests.bench.accelerator.kernel_parity import TOLERANCES, relative_error, results_and_gradients

_LENGTHS = {"full": [1500, 3, 700, 1, 64, 1200], "small": [30, 3, 14, 1, 9]}
_CHUNKS = {"full": [200, 3, 75], "small": [7, 3, 1]}
"""of each row; a ring of C parts has 2C of them"""
_LONG_ROWS = {"full": [4096] * 4, "small": [64] * 4}


@dataclass(frozen=True)
class HeadShape:
    """Heads of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int

    def random(self, num_tokens: int, dtype: torch.dtype) -> Inputs:
        """Queries, keys and values of packed tokens, on the CPU."""
        generator = torch.Generator().manual_seed(0)
        sizes = ((self.num_heads, self.head_size), (self.num_kv_heads, self.head_size))
        sizes += ((self.num_kv_heads, self.value_size),)
        q, k, v = (torch.randn(num_tokens, *size, generator=generator).to(dtype) for size in sizes)
        return q, k, v


HEADS = {
    "equal heads of 64": HeadShape(4, 4, 64, 64),
    "shared keys of 128": HeadShape(8, 2, 128, 128),
    "heads of 20": HeadShape(4, 2, 20, 20),
    "smaller values": HeadShape(4, 4, 48, 32),
}


def check_packed_attention(run: StageRun) -> None:
    device = run.device.torch_device
    lengths = _LENGTHS[run.scale]
    for dtype, tolerance in TOLERANCES.items():
        errors = {}
        for name, heads in HEADS.items():
            inputs = heads.random(sum(lengths), dtype)
            results = results_and_gradients(ops.packed_attention, [x.to(device) for x in inputs], [_rows(lengths)])
            exact = results_and_gradients(plain.packed_attention, [x.float() for x in inputs], [_rows(lengths)])
            errors[name] = max(map(relative_error, results, exact))
            fault = f"{name} in {dtype} is off by {errors[name]:.1e} of its largest value, more than {tolerance:g}"
            run.require(errors[name] <= tolerance, fault)
            run.require(
                _keeps_rows_apart(inputs, lengths, device), f"{name} in {dtype}: a row's result depends on another row"
            )
        run.figures[f"largest_error_{str(dtype).removeprefix('torch.')}"] = max(errors.values())
    run.figures["tflops"] = _rate(run) / 1e12


def _rows(lengths: Sequence[int]) -> PackedRows:
    return PackedRows(offsets_of(list(lengths)))


@torch.no_grad()
def _keeps_rows_apart(inputs: Inputs, lengths: Sequence[int], device: torch.device) -> bool:
    """Whether other values in the first row leave the bits of all others alone."""
    q, k, v = (x.to(device) for x in inputs)
    before = ops.packed_attention(q, k, v, _rows(lengths))
    first = slice(0, lengths[0])
    for x in (q, k, v):
        x[first] = -3 * x[first]
    return torch.equal(before[lengths[0] :], ops.packed_attention(q, k, v, _rows(lengths))[lengths[0] :])


@torch.no_grad()
def _rate(run: StageRun) -> float:
    """Floating-point operations a second of long rows, forward, in the dtype that training computes in."""
    lengths, heads = _LONG_ROWS[run.scale], HeadShape(16, 4, 128, 128)
    inputs = heads.random(sum(lengths), run.device.compute_dtype)
    q, k, v = (x.to(run.device.torch_device) for x in inputs)
    seconds = median_seconds(partial(ops.packed_attention, q, k, v, _rows(lengths)), run.device)
    # Two products, of which causality leaves half.
    flops = sum(2 * length**2 * heads.num_heads * heads.head_size for length in lengths)
    return flops / seconds


def check_ring_attention(run: StageRun) -> None:
    """A ring's parts on this rank alone; where there are more, the ring over all of them too. Collective."""
    device = run.device.torch_device
    heads, chunks = HEADS["shared keys of 128"], _CHUNKS[run.scale]
    run.figures["kernel"] = "packed flash" if runs_packed_flash(_queries(heads, run)) else "padded blocks"
    for dtype, tolerance in TOLERANCES.items():
        name = str(dtype).removeprefix("torch.")
        errors = {f"{size} parts": _error_of_parts(heads, chunks, size, dtype, device) for size in (2, 3)}
        if run.world.size > 1:
            errors[f"{run.world.size} ranks"] = _error_of_ring(heads, chunks, dtype, run)
        for which, error in errors.items():
            fault = (
                f"attention in {which} in {name} is off by {error:.1e} of its largest value, more than {tolerance:g}"
            )
            run.require(error <= tolerance, fault)
        run.figures[f"largest_error_{name}"] = max(errors.values())


def _queries(heads: HeadShape, run: StageRun) -> Tensor:
    return torch.empty(1, heads.num_heads, heads.head_size, dtype=torch.bfloat16, device=run.device.torch_device)


def _places(chunks: Sequence[int], size: int, rank: int) -> Tensor:
    """The packed tokens [T / C] of a ring's rank: chunks `rank` and 2C - 1 - `rank` of each row."""
    starts = offsets_of([2 * size * length for length in chunks]).tolist()
    places = [
        torch.arange(start + chunk * length, start + (chunk + 1) * length)
        for start, length in zip(starts, chunks, strict=False)
        for chunk in (rank, 2 * size - 1 - rank)
    ]
    return torch.cat(places)


def _whole(heads: HeadShape, chunks: Sequence[int], size: int, dtype: torch.dtype) -> tuple[Inputs, list[Tensor]]:
    """All tokens' inputs, and the result and gradients that the plain operation gives for them."""
    lengths = [2 * size * length for length in chunks]
    inputs = heads.random(sum(lengths), dtype)
    return inputs, results_and_gradients(plain.packed_attention, [x.float() for x in inputs], [_rows(lengths)])


@torch.no_grad()
def _error_of_parts(
    heads: HeadShape, chunks: Sequence[int], size: int, dtype: torch.dtype, device: torch.device
) -> float:
    """The largest error of result and gradients where one process computes the parts of all ranks."""
    with torch.enable_grad():
        inputs, references = _whole(heads, chunks, size, dtype)
    places = [_places(chunks, size, rank).to(device) for rank in range(size)]
    whole = [x.to(device) for x in inputs]
    outs, lses = _forward_of_parts(whole, places, chunks)
    weights = torch.randn(references[0].shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    gradients = [torch.zeros_like(x, dtype=torch.float32) for x in whole]
    plan = plan_ring(chunks, device)
    for rank, own in enumerate(places):
        for source, others in enumerate(places):
            block = plan.block(rank, source)
            queries, keys = own[block.queries], others[block.keys]
            sides = (outs[queries].to(dtype), lses[queries])
            parts = attend_rows_backward(
                weights[queries], (whole[0][queries], whole[1][keys], whole[2][keys]), sides, block.pairs
            )
            for gradient, index, part in zip(gradients, (queries, keys, keys), parts, strict=True):
                gradient.index_add_(0, index, part.float())
    return max(map(relative_error, [outs, *gradients], references))


def _forward_of_parts(
    whole: Sequence[Tensor], places: Sequence[Tensor], chunks: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Result and logsumexp of all tokens, each the join of its parts, in float32."""
    q, k, v = whole
    plan = plan_ring(chunks, q.device)
    outs = torch.zeros(*q.shape[:2], v.shape[-1], device=q.device)
    lses = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for rank, own in enumerate(places):
        for source, others in enumerate(places):
            block = plan.block(rank, source)
            queries, keys = own[block.queries], others[block.keys]
            out, lse = attend_rows((q[queries], k[keys], v[keys]), block.pairs)
            joint = torch.logaddexp(lses[queries], lse)
            kept, added = (lses[queries] - joint).exp()[..., None], (lse - joint).exp()[..., None]
            outs[queries] = kept * outs[queries] + added * out.float()
            lses[queries] = joint
    return outs, lses


def _error_of_ring(heads: HeadShape, chunks: Sequence[int], dtype: torch.dtype, run: StageRun) -> float:
    """The largest error on this rank of the ring over all ranks. Collective over the world."""
    world, device = run.world, run.device.torch_device
    inputs, references = _whole(heads, chunks, world.size, dtype)
    context = build_update_mesh(
        fit_update_layout(UpdateLayout(context=world.size), world.size), world.device, world.rank
    ).context
    own = _places(chunks, world.size, world.rank)
    parts = [x[own].to(device).requires_grad_() for x in inputs]
    out = RingAttention(chunks, context, device)(0, *parts)
    weights = torch.randn(references[0].shape, generator=torch.Generator().manual_seed(1))[own].to(device, dtype)
    gradients = torch.autograd.grad(out, parts, weights)
    return max(map(relative_error, [out, *gradients], [x[own] for x in references]))
