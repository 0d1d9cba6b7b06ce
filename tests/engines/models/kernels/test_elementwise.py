"""The CPU library's norm, rotation and SwiGLU: right, alike for a row whatever is beside it, and done without."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import ops, plain
from spmdrl.engines.models.kernels.cpp import cpu_library as library
from spmdrl.engines.models.kernels.cpp import elementwise
from tests.engines.models.support import no_cpu_library

pytestmark = pytest.mark.cpu_only(reason="the library is the CPU's")

Operation = Callable[..., Tensor]


def angles(num_tokens: int, half: int) -> tuple[Tensor, Tensor]:
    turn = torch.arange(num_tokens)[:, None, None] * torch.linspace(1, 0.01, half)
    return turn.cos(), turn.sin()


def rotated(heads: Tensor) -> Tensor:
    cos, sin = angles(len(heads), heads.shape[-1] // 2)
    return elementwise.rotate(heads, cos, sin) if heads.dtype == torch.float32 else plain_rotated(heads, cos, sin)


def plain_rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return elementwise.rms_norm(x, weight, 1e-6)
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return elementwise.swiglu(gate, up) if gate.dtype == torch.float32 else F.silu(gate) * up


# Sizes that fill whole vectors and that don't; many rows, whose gradients of a norm's weight are added up.
CASES: dict[str, tuple[Operation, list[tuple[int, ...]]]] = {
    "norm": (normed, [(300, 96), (96,)]),
    "norm of heads": (normed, [(70, 3, 37), (37,)]),
    "norm of four dims": (normed, [(2, 3, 5, 16), (16,)]),
    "norm of nothing": (normed, [(0, 16), (16,)]),
    "rotation": (rotated, [(70, 3, 64)]),
    "rotation of small heads": (rotated, [(70, 3, 22)]),
    "swiglu": (gated, [(70, 96), (70, 96)]),
    "swiglu of narrow rows": (gated, [(70, 5), (70, 5)]),
}


@pytest.fixture(autouse=True)
def no_library() -> Iterator[None]:
    if library.cpu_library() is None:
        pytest.skip("this machine has no C++ compiler")
    yield


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["whole", "every other column", "columns of a wider tensor"])
@pytest.mark.parametrize("threads", [1, 3])
def test_values_and_gradients_are_those_in_float64(name: str, layout: str, threads: int) -> None:
    operation, shapes = CASES[name]
    torch.manual_seed(0)
    leaves = [torch.randn(*shape[:-1], 2 * shape[-1]) * 3 for shape in shapes]
    cut = {
        "whole": lambda x: x[..., : x.shape[-1] // 2].contiguous(),
        "every other column": lambda x: x[..., ::2],
        "columns of a wider tensor": lambda x: x[..., x.shape[-1] // 2 :],
    }[layout]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = with_gradients(operation, leaves, cut)
        without = operation(*map(cut, leaves))
    finally:
        torch.set_num_threads(before)
    expected = with_gradients(operation, [leaf.double() for leaf in leaves], cut)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        largest = other.abs().max() if other.numel() else 0
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-6 * float(largest))
    assert without.equal(found[0])


def with_gradients(operation: Operation, leaves: list[Tensor], cut: Callable[[Tensor], Tensor]) -> list[Tensor]:
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = operation(*map(cut, leaves))
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


@pytest.mark.parametrize("name", ["norm", "norm of heads", "rotation", "swiglu"])
def test_a_gradient_may_lie_anyhow_in_memory(name: str) -> None:
    operation, shapes = CASES[name]
    torch.manual_seed(0)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = operation(*leaves)
    # All of it is one number in one place, or its dims lie the other way round.
    for gradient in (
        torch.tensor(0.5).expand(out.shape),
        torch.randn(out.shape[::-1]).permute(*range(out.dim())[::-1]),
    ):
        found = torch.autograd.grad(out, leaves, gradient, retain_graph=True)
        expected = torch.autograd.grad(out, leaves, gradient.contiguous(), retain_graph=True)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["norm", "norm of heads", "rotation", "swiglu", "swiglu of narrow rows"])
def test_a_row_has_the_same_bits_whatever_is_beside_it(name: str) -> None:
    operation, shapes = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    together = operation(*inputs)
    for num_rows in (1, 2, 7, 33):
        some = [x[:num_rows] if len(x) == len(together) else x for x in inputs]
        assert operation(*some).equal(together[:num_rows]), num_rows


def test_swiglu_of_what_overflows_an_exponential_and_of_no_number() -> None:
    gate = torch.tensor([[0.0, -0.0, 88.8, -88.8, 1e4, -1e4, 3e38, -3e38, torch.inf, torch.nan]])
    torch.testing.assert_close(
        ops.swiglu(gate, torch.ones_like(gate)), F.silu(gate), equal_nan=True, atol=1e-36, rtol=1e-6
    )


def test_other_dtypes_and_machines_without_a_compiler_have_pytorch_s_bits() -> None:
    def agree(dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        x, gate, weight = (torch.randn(shape).to(dtype) for shape in ((9, 4, 32), (9, 4, 32), (32,)))
        cos, sin = angles(9, 16)
        assert ops.rms_norm(x, weight, 1e-6).equal(plain.rms_norm(x, weight, 1e-6))
        assert ops.rotate(x, cos, sin).equal(plain.rotate(x, cos, sin))
        assert ops.swiglu(gate, x).equal(plain.swiglu(gate, x))

    agree(torch.bfloat16)
    with no_cpu_library():
        agree(torch.float32)
