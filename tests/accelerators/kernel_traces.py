"""Operations of the kernel table, and attention of parts of a softmax, as traces on a fake CUDA device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import ops, plain
from spmdrl.engines.training.context.block_attention import attend_rows, attend_rows_backward
from spmdrl.engines.training.context.row_pairs import RowPairs
from tests.accelerators.fake_cuda import FakeCuda
from tests.engines.models.kernels.test_table import CASES, Case, counts
from tests.engines.training.test_block_attention import CASES as PAIRS

Trace = Callable[[FakeCuda], None]
DTYPES = (torch.float32, torch.bfloat16)
# Experts with the same number of rows each, since the device's counts all read alike on the host.
KERNELS = CASES | {
    "grouped_linear": [
        Case(((12, 16), (4, 8, 16)), counts(3, 3, 3, 3)),
        Case(((8, 13), (2, 7, 13)), counts(4, 4)),
        Case(((0, 16), (3, 8, 16)), counts(0, 0, 0)),
    ]
}
FLASH, GROUPED = "aten::_flash_attention_forward", "aten::_grouped_mm"


def kernels() -> Iterator[tuple[str, Trace]]:
    """Operations of the table, and the attention of parts of a softmax."""
    yield "a sum of host and device is refused", refuse_mixed_devices
    for name, cases in KERNELS.items():
        for dtype in DTYPES:
            yield f"{name}, {short(dtype)}", partial(run_kernel, name=name, cases=cases, dtype=dtype)
    yield "add_matmul", add_matmul
    yield "blocked_linear", blocked_linear
    yield "packed_attention and grouped_linear at compute capability 7.5", old_device
    for case, dtype in itertools.product(PAIRS, DTYPES):
        yield f"ring attention, {case}, {short(dtype)}", partial(attend_in_parts, case=case, dtype=dtype)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_mixed_devices(cuda: FakeCuda) -> None:
    try:
        torch.ones(3, device=cuda.device) + torch.ones(3)
    except RuntimeError as error:
        assert "same device" in str(error), error
    else:
        raise AssertionError("nothing was raised")


def run_kernel(cuda: FakeCuda, *, name: str, cases: list[Case], dtype: torch.dtype) -> None:
    """The CUDA implementation of an operation, which gives tensors like the plain one's on a CPU."""
    assert "cuda" in ops.TABLE[name], name
    for case in cases:
        cuda.integer = case.shapes[0][0] // case.shapes[1][0] if name == "grouped_linear" else 0
        results, expected = (
            _outputs(function, case, dtype, device)
            for function, device in ((getattr(ops, name), cuda.device), (getattr(plain, name), torch.device("cpu")))
        )
        for result, reference in zip(results, expected, strict=True):
            assert_like(result, reference, cuda.device)
    fused = {"packed_attention": FLASH, "grouped_linear": GROUPED}.get(name)
    assert fused is None or (cuda.operators[fused] > 0) == (dtype == torch.bfloat16 and cuda.capability >= (8, 0)), (
        cuda.operators
    )


def _outputs(
    function: Callable[..., Tensor | tuple[Tensor, ...]], case: Case, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    inputs = [torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in case.shapes]
    out = function(*inputs, *case.fixed(device))
    results = out if isinstance(out, tuple) else (out,)
    return [*results, *torch.autograd.grad([x.sum() for x in results], inputs)]


def assert_like(result: Tensor, reference: Tensor, device: torch.device) -> None:
    assert (result.shape, result.dtype) == (reference.shape, reference.dtype), (result, reference)
    assert result.device == device, result


def add_matmul(cuda: FakeCuda) -> None:
    for dtype in DTYPES:
        out = torch.zeros(16, 24, device=cuda.device)
        a, b = (torch.zeros(8, width, dtype=dtype, device=cuda.device) for width in (16, 24))
        assert ops.add_matmul(out, a, b) is out
    assert cuda.operators["aten::addmm"] == 1, cuda.operators


def old_device(cuda: FakeCuda) -> None:
    cuda.capability = (7, 5)
    for name in ("packed_attention", "grouped_linear"):
        run_kernel(cuda, name=name, cases=KERNELS[name], dtype=torch.bfloat16)


def blocked_linear(cuda: FakeCuda) -> None:
    assert ops.blocked_linear(torch.zeros(4, 8, device=cuda.device), None) is None


def attend_in_parts(cuda: FakeCuda, *, case: str, dtype: torch.dtype) -> None:
    """A rank's queries against another's keys, forward and backward, with values narrower than keys."""
    queries, keys, is_causal = PAIRS[case]
    pairs = RowPairs(queries, keys, is_causal=is_causal, device=cuda.device)
    for head_size, value_size in ((128, 128), (192, 128), (20, 12)):
        shapes = (sum(queries), 8, head_size), (sum(keys), 2, head_size), (sum(keys), 2, value_size)
        inputs = tuple(torch.zeros(shape, dtype=dtype, device=cuda.device) for shape in shapes)
        out, lse = attend_rows(inputs, pairs)
        assert (out.shape, out.dtype) == ((sum(queries), 8, value_size), dtype)
        assert (lse.shape, lse.dtype) == ((sum(queries), 8), torch.float32)
        for gradient, given in zip(attend_rows_backward(out, inputs, (out, lse), pairs), inputs, strict=True):
            assert_like(gradient, given, cuda.device)
    for operator in ("aten::_flash_attention_forward", "aten::_flash_attention_backward"):
        assert cuda.operators[operator] == (3 if dtype == torch.bfloat16 else 0), cuda.operators
