"""The kernel table on this device beside the plain operations in float32 on the CPU, forward and backward.

Shape letters: `M` rows, `E` experts, `D` inputs and `O` outputs of a linear layer, `T` packed tokens, `H` query heads,
`J` key and value heads, `K` head size, `B` rows, `Q` queries of a row, `S` key positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import ops, plain
from spmdrl.engines.models.kernels.packed import PackedRows
from spmdrl.engines.models.kernels.prefixed import PrefixedRows
from spmdrl.nouns.batch import offsets_of
from spmdrl.verbs.doctor.stage_run import StageRun

TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 3e-2}
"""of the largest difference, in units of the largest value"""
_TOKENS = {"full": 4096, "small": 64}
_WIDTHS = {"full": 2048, "small": 64}
_NUM_EXPERTS = 8


@dataclass(frozen=True)
class OperationCase:
    """One way to call an operation: shapes of inputs that differentiate, then fixed arguments."""

    shapes: tuple[tuple[int, ...], ...]
    fixed: Callable[[torch.device], tuple[Any, ...]] = lambda device: ()
    negative: tuple[int, ...] = ()
    """Inputs that are at most 0."""


def cases(num_tokens: int, width: int) -> dict[str, OperationCase]:
    """One case per differentiable operation, with so many tokens and features."""
    heads, head_size = 8, max(16, width // 32)
    queries, keys = (num_tokens, heads, head_size), (num_tokens, heads // 2, head_size)
    rates = (num_tokens, heads)
    row_lengths = [num_tokens // 2, num_tokens // 4, 1, num_tokens - num_tokens // 2 - num_tokens // 4 - 1]
    return {
        "rms_norm": OperationCase(((num_tokens, width), (width,)), lambda device: (1e-6,)),
        "rotate": OperationCase((queries,), lambda device: _angles(num_tokens, head_size, device)),
        "swiglu": OperationCase(((num_tokens, width),) * 2),
        "geglu": OperationCase(((num_tokens, width),) * 2),
        "sigmoid": OperationCase(((num_tokens, width),)),
        "softplus": OperationCase(((num_tokens, width),)),
        "causal_conv": OperationCase(
            ((num_tokens, width), (width, 4)), lambda device: (PackedRows(offsets_of(row_lengths)),)
        ),
        "gated_delta": OperationCase(
            (keys, keys, queries, rates, rates), lambda device: (PackedRows(offsets_of(row_lengths)),), negative=(3,)
        ),
        "linear": OperationCase(((num_tokens, width), (width // 2, width), (width // 2,))),
        "grouped_linear": OperationCase(
            ((num_tokens, width), (_NUM_EXPERTS, width // 2, width)), lambda device: (_counts(num_tokens).to(device),)
        ),
        "packed_attention": OperationCase((queries, keys, keys), lambda device: (PackedRows(offsets_of(row_lengths)),)),
        "prefixed_attention": OperationCase((queries, keys, keys), lambda device: (_prefixed(num_tokens),)),
        "masked_attention": OperationCase(
            ((4, heads, 3, head_size), *((4, heads // 2, num_tokens, head_size),) * 2),
            lambda device: (_seen(num_tokens).to(device),),
        ),
    }


def _prefixed(num_tokens: int) -> PrefixedRows:
    """Two rows behind the first piece, and a whole one."""
    half, quarter = num_tokens // 2, num_tokens // 4
    return PrefixedRows(offsets_of([half, quarter]), [1, num_tokens - half - quarter - 1], [0, 0])


def _angles(num_tokens: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = torch.logspace(0, -4, head_size // 2)
    turn = torch.arange(num_tokens, dtype=torch.float32)[:, None, None] * frequencies
    return turn.cos().to(device), turn.sin().to(device)


def _counts(num_tokens: int) -> Tensor:
    """Rows of each expert; one has none."""
    counts_E = torch.full((_NUM_EXPERTS,), num_tokens // _NUM_EXPERTS)
    counts_E[0] += counts_E[1] + num_tokens % _NUM_EXPERTS
    counts_E[1] = 0
    return counts_E


def _seen(num_keys: int) -> Tensor:
    """Which keys the queries of four rows see."""
    lengths_B = torch.tensor([1, num_keys // 3, num_keys // 2, num_keys])
    return (torch.arange(num_keys) < lengths_B[:, None])[:, None, None]


def check_kernels(run: StageRun) -> None:
    errors: dict[str, dict[str, float]] = {}
    for dtype, tolerance in TOLERANCES.items():
        found = errors[_name(dtype)] = _errors_of_all(run, dtype)
        for operation, error in found.items():
            fault = f"{operation} in {_name(dtype)} is off by {error:.1e} of its largest value, more than {tolerance:g}"
            run.require(error <= tolerance, fault)
        run.figures[f"largest_error_{_name(dtype)}"] = max(found.values())
    run.figures["operations"] = len(errors["float32"])
    run.figures["errors"] = errors


def _errors_of_all(run: StageRun, dtype: torch.dtype) -> dict[str, float]:
    device = run.device.torch_device
    num_tokens, width = _TOKENS[run.scale], _WIDTHS[run.scale]
    errors = {}
    for operation, case in cases(num_tokens, width).items():
        inputs = _inputs(case, dtype)
        results = results_and_gradients(getattr(ops, operation), [x.to(device) for x in inputs], case.fixed(device))
        # The plain one in float32, of the same rounded inputs, is the truth for both dtypes.
        exact = [x.float() for x in inputs]
        references = results_and_gradients(getattr(plain, operation), exact, case.fixed(torch.device("cpu")))
        errors[operation] = max(map(relative_error, results, references))
    errors |= {name: error(device, dtype, num_tokens, width) for name, error in FORWARD_ONLY.items()}
    return errors


def _inputs(case: OperationCase, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in case.shapes]
    return [-x.abs() if number in case.negative else x for number, x in enumerate(inputs)]


def results_and_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], fixed: Sequence[Any]
) -> list[Tensor]:
    """The result and its gradients with respect to all inputs, for random weights of its elements.

    Several results are one after the other.
    """
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs, *fixed)
    if isinstance(out, tuple):
        out = torch.cat([x.flatten() for x in out])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    return [out, *torch.autograd.grad((out.float() * weights).sum(), inputs)]


def relative_error(result: Tensor, reference: Tensor) -> float:
    """The largest difference in units of the reference's largest value, or of 1 where that is less.

    Infinite where the result isn't finite.
    """
    difference = (result.detach().cpu().float() - reference.detach().float()).abs().max()
    error = float(difference / reference.detach().abs().max().clamp(min=1.0))
    return error if error == error else float("inf")


def _error_of_add_matmul(device: torch.device, dtype: torch.dtype, num_tokens: int, width: int) -> float:
    generator = torch.Generator().manual_seed(0)
    out, a, b = (
        torch.randn(shape, generator=generator)
        for shape in ((width, width // 2), (num_tokens, width), (num_tokens, width // 2))
    )
    a, b = a.to(dtype), b.to(dtype)
    expected = plain.add_matmul(out.clone(), a, b)
    return relative_error(ops.add_matmul(out.to(device), a.to(device), b.to(device)), expected)


def _error_of_paged_attention(device: torch.device, dtype: torch.dtype, num_tokens: int, width: int) -> float:
    """Rows of several lengths, whose blocks lie in any order in a cache of `num_tokens` positions."""
    generator = torch.Generator().manual_seed(0)
    block_size, head_size, heads = 16, max(16, width // 32), 8
    num_blocks = num_tokens // block_size
    lengths_B = torch.tensor([1, block_size, block_size + 1, num_tokens // 2, num_tokens - 3], dtype=torch.int32)
    tables_BC = torch.stack([torch.randperm(num_blocks, generator=generator) for _ in lengths_B]).to(torch.int32)
    q = torch.randn(len(lengths_B), heads, head_size, generator=generator).to(dtype)
    keys, values = (
        torch.randn(num_blocks, heads // 2, block_size, head_size, generator=generator).to(dtype) for _ in range(2)
    )
    expected = plain.paged_attention(q.float(), keys.float(), values.float(), tables_BC, lengths_B)
    return relative_error(
        ops.paged_attention(*(x.to(device) for x in (q, keys, values, tables_BC, lengths_B))), expected
    )


def _logits(num_tokens: int, width: int) -> Tensor:
    """Of some places, in the float32 that heads compute them in."""
    return torch.randn(num_tokens, 16 * width, generator=torch.Generator().manual_seed(0)) * 4


def _error_of_exponential_sums(device: torch.device, dtype: torch.dtype, num_tokens: int, width: int) -> float:
    """Of the sums, in units of each row's own."""
    logits_CV = _logits(num_tokens, width)
    highest_C = logits_CV.amax(-1)
    found = ops.exponential_sums(logits_CV.to(device, copy=True), highest_C.to(device))
    expected = plain.exponential_sums(logits_CV, highest_C)
    ratios = [ours.cpu() / of_row for ours, of_row in zip(found, expected, strict=True)]
    return max(relative_error(ratio, torch.ones_like(ratio)) for ratio in ratios)


def _error_of_minus_expected(device: torch.device, dtype: torch.dtype, num_tokens: int, width: int) -> float:
    above_CV = _logits(num_tokens, width)
    sum_C, weighted_C = plain.exponential_sums(above_CV, above_CV.amax(-1))
    pulls_C = torch.linspace(-1, 1, num_tokens)
    rows = (sum_C.log(), sum_C.log() - weighted_C / sum_C, pulls_C, 0.1 * pulls_C)
    found = ops.minus_expected(above_CV.to(device, copy=True), *(row.to(device) for row in rows))
    return relative_error(found, plain.minus_expected(above_CV, *rows))


def _error_of_step(device: torch.device, dtype: torch.dtype, num_tokens: int, width: int, *, name: str) -> float:
    """Of one token's results and states, which lie in slots in any order."""
    case = cases(num_tokens, width)[{"conv_step": "causal_conv", "gated_delta_step": "gated_delta"}[name]]
    inputs, generator = _inputs(case, dtype), torch.Generator().manual_seed(1)
    shape = (3, width) if name == "conv_step" else (*inputs[2].shape[1:2], inputs[1].shape[-1], inputs[2].shape[-1])
    states = torch.randn(num_tokens + 1, *shape, generator=generator)
    slots_B = torch.randperm(len(states), generator=generator)[:num_tokens]
    own = [x.to(device) for x in inputs]
    found, expected = states.to(device, copy=True), states.clone()
    out = getattr(ops, name)(*own, found, slots_B.to(device))
    reference = getattr(plain, name)(*(x.float() for x in inputs), expected, slots_B)
    return max(relative_error(out, reference), relative_error(found, expected))


def _error_of_softcap(device: torch.device, dtype: torch.dtype, num_tokens: int, width: int) -> float:
    logits = _logits(num_tokens, width)
    return relative_error(ops.softcap(logits.to(device, copy=True), 5.0), plain.softcap(logits.clone(), 5.0))


def _error_of_invert_cdf(device: torch.device, dtype: torch.dtype, num_tokens: int, width: int) -> float:
    """How far targets lie outside of the drawn tokens' share of the sum, which no token of weight 0 has."""
    weights_BV = _logits(num_tokens, width).sub_(4).exp_().mul_(_logits(num_tokens, width) > 4)
    uniforms_B = torch.rand(num_tokens, generator=torch.Generator().manual_seed(1))
    drawn_B1 = ops.invert_cdf(weights_BV.to(device), uniforms_B.to(device)).cpu()[:, None]
    upper_B1 = (cumulated_BV := weights_BV.double().cumsum(-1)).gather(1, drawn_B1)
    own_B1, total_B1 = weights_BV.gather(1, drawn_B1), cumulated_BV[:, -1:]
    targets_B1 = uniforms_B[:, None] * total_B1
    outside_B1 = torch.maximum(targets_B1 - upper_B1, upper_B1 - own_B1 - targets_B1) / total_B1
    return float(outside_B1.masked_fill(own_B1 == 0, torch.inf).max().clamp(min=0))


FORWARD_ONLY = {
    **{name: partial(_error_of_step, name=name) for name in ("conv_step", "gated_delta_step")},
    "add_matmul": _error_of_add_matmul,
    "paged_attention": _error_of_paged_attention,
    "exponential_sums": _error_of_exponential_sums,
    "minus_expected": _error_of_minus_expected,
    "softcap": _error_of_softcap,
    "invert_cdf": _error_of_invert_cdf,
}
"""How far operations without a gradient are off."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
