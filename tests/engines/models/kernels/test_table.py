from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.kernels import ops, plain
from spmdrl.engines.models.kernels.ops import TABLE
from spmdrl.engines.models.kernels.packed import PackedRows
from spmdrl.engines.models.kernels.prefixed import PrefixedRows
from spmdrl.nouns.batch import offsets_of
from tests.support.chosen_device import chosen_device, chosen_kind

HALF_TOLERANCE = 2e-2
EXACT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One way to call an operation: inputs that differentiate, then fixed arguments."""

    shapes: tuple[tuple[int, ...], ...]
    fixed: Callable[[torch.device], tuple[object, ...]] = lambda device: ()
    negative: tuple[int, ...] = ()
    """Inputs that are at most 0."""


def angles(device: torch.device) -> tuple[object, ...]:
    turn = torch.arange(12, dtype=torch.float32)[:, None, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    return turn.cos().to(device), turn.sin().to(device)


def rows_of(*lengths: int) -> Callable[[torch.device], tuple[object, ...]]:
    return lambda device: (PackedRows(offsets_of(list(lengths))),)


def behind(first: list[int], *rows: tuple[int, int]) -> Callable[[torch.device], tuple[object, ...]]:
    """First pieces of these lengths, then rows of (own tokens, number of the piece before them)."""
    lengths, prefixes = zip(*rows, strict=True)
    return lambda device: (PrefixedRows(offsets_of(first), lengths, prefixes),)


def within(
    rows: Callable[[torch.device], tuple[object, ...]], window: int | None, *, num_sinks: int = 0
) -> Callable[[torch.device], tuple[object, ...]]:
    """Rows with a window, and sinks of so many heads."""
    sinks = torch.linspace(-1, 2, num_sinks) if num_sinks else None
    return lambda device: (*rows(device), window, None if sinks is None else sinks.to(device))


def counts(*of_expert: int) -> Callable[[torch.device], tuple[object, ...]]:
    return lambda device: (torch.tensor(of_expert, device=device),)


def seen(*lengths: int) -> Callable[[torch.device], tuple[object, ...]]:
    """All queries of each row see its first keys, of 9."""
    return lambda device: ((torch.arange(9) < torch.tensor(lengths)[:, None])[:, None, None].to(device),)


CASES: dict[str, list[Case]] = {
    "rms_norm": [Case(((5, 16), (16,)), lambda device: (1e-6,)), Case(((5, 3, 16), (16,)), lambda device: (1e-5,))],
    "rotate": [Case(((12, 3, 8),), angles)],
    "swiglu": [Case(((7, 24), (7, 24)))],
    "geglu": [Case(((7, 24), (7, 24)))],
    "linear": [Case(((9, 16), (24, 16))), Case(((9, 16), (24, 16), (24,))), Case(((40, 256), (192, 256)))],
    "grouped_linear": [
        Case(((9, 16), (4, 8, 16)), counts(3, 0, 5, 1)),
        Case(((9, 13), (2, 7, 13)), counts(9, 0)),
        Case(((0, 16), (3, 8, 16)), counts(0, 0, 0)),
    ],
    "sigmoid": [Case(((7, 24),))],
    "softplus": [Case(((7, 24),))],
    "masked_attention": [
        Case(((2, 4, 3, 16), (2, 4, 9, 16), (2, 4, 9, 16)), seen(4, 9)),
        Case(((2, 4, 3, 16), (2, 2, 9, 16), (2, 2, 9, 8)), seen(9, 1)),
    ],
    "packed_attention": [
        Case(((12, 4, 16), (12, 4, 16), (12, 4, 16)), rows_of(12)),
        Case(((12, 4, 16), (12, 2, 16), (12, 2, 16)), rows_of(5, 0, 7)),
        Case(((70, 4, 24), (70, 4, 24), (70, 4, 16)), rows_of(3, 40, 1, 21, 5)),
        Case(((0, 4, 16), (0, 2, 16), (0, 2, 8)), rows_of()),
        Case(((12, 4, 16), (12, 2, 16), (12, 2, 16)), within(rows_of(5, 0, 7), 3)),
        Case(((70, 4, 24), (70, 4, 24), (70, 4, 16)), within(rows_of(3, 40, 1, 21, 5), 9, num_sinks=4)),
        Case(((12, 4, 16), (12, 2, 16), (12, 2, 16)), within(rows_of(12), None, num_sinks=4)),
        Case(((0, 4, 16), (0, 2, 16), (0, 2, 8)), within(rows_of(), 3, num_sinks=4)),
    ],
    "prefixed_attention": [
        Case(((12, 4, 16), (12, 4, 16), (12, 4, 16)), behind([7], (3, 0), (2, 0))),
        Case(((121, 4, 24), (121, 2, 24), (121, 2, 16)), behind([2, 48, 9, 1], (10, 0), (1, 1), (20, 1), (30, 3))),
        Case(((12, 4, 16), (12, 2, 16), (12, 2, 16)), within(behind([7], (3, 0), (2, 0)), 4)),
        Case(((12, 4, 24), (12, 2, 24), (12, 2, 16)), within(behind([7], (3, 0), (2, 0)), 4, num_sinks=4)),
    ],
    "causal_conv": [Case(((12, 24), (24, 4)), rows_of(12)), Case(((80, 13), (13, 3)), rows_of(5, 0, 1, 74))],
    "gated_delta": [
        Case(((12, 2, 16), (12, 2, 16), (12, 4, 24), (12, 4), (12, 4)), rows_of(12), negative=(3,)),
        Case(((80, 3, 5), (80, 3, 5), (80, 3, 7), (80, 3), (80, 3)), rows_of(5, 0, 1, 74), negative=(3,)),
    ],
}
DIFFERENTIABLE = [
    pytest.param(
        name, kind, case, id=f"{name}-{kind}-{number}", marks=[] if kind in ("cpu", chosen_kind()) else pytest.mark.gpu
    )
    for name, cases in CASES.items()
    for kind in TABLE[name]
    for number, case in enumerate(cases)
]


def device_or_skip(kind: str) -> torch.device:
    """The device of a kind, or a skip with its reason."""
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError) as error:
            pytest.skip(f"torch_npu can't be imported: {error}")
    if kind != "cpu" and not getattr(torch, kind).is_available():
        pytest.skip(f"this machine has no {kind} device")
    return chosen_device() if kind == chosen_kind() else torch.device(kind)


def test_every_operation_is_tested_on_every_kind_of_device() -> None:
    without_gradients = {"add_matmul", "blocked_linear", "paged_attention", "exponential_sums", "minus_expected"}
    without_gradients |= {"conv_step", "gated_delta_step", "softcap", "invert_cdf"}
    assert set(CASES) | without_gradients == set(TABLE)
    for name, kinds in TABLE.items():
        assert set(kinds) == {"cpu", "cuda", "npu", chosen_kind()}
        assert callable(getattr(plain, name)) and callable(getattr(ops, name))


@pytest.mark.on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, kind, case", DIFFERENTIABLE)
def test_an_implementation_equals_the_plain_one(name: str, kind: str, case: Case, dtype: torch.dtype) -> None:
    device = device_or_skip(kind)
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in case.shapes]
    values = [-x.abs() if number in case.negative else x for number, x in enumerate(values)]
    inputs = [x.to(device, dtype).requires_grad_() for x in values]
    exact = [x.detach().to(torch.float32).requires_grad_() for x in inputs]
    fixed = case.fixed(device)
    results = results_and_gradients(getattr(ops, name), inputs, fixed)
    # The plain one in float32 is the truth for both dtypes.
    references = results_and_gradients(getattr(plain, name), exact, fixed)
    tolerance = EXACT_TOLERANCE if dtype is torch.float32 else HALF_TOLERANCE
    for result, reference in zip(results, references, strict=True):
        assert result.shape == reference.shape
        scale = reference.abs().max().item() if reference.numel() else 0.0
        torch.testing.assert_close(result.float(), reference, atol=tolerance * max(1.0, scale), rtol=tolerance)


def results_and_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: list[Tensor],
    fixed: tuple[object, ...],
) -> list[Tensor]:
    out = function(*inputs, *fixed)
    if isinstance(out, tuple):
        out = torch.cat([x.flatten() for x in out])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    return [out, *torch.autograd.grad((out.float() * weights).sum(), inputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("cpu", chosen_kind()) else pytest.mark.gpu)
        for kind in TABLE["add_matmul"]
    ],
)
def test_a_product_is_added_to_float32_in_place(kind: str, dtype: torch.dtype) -> None:
    device = device_or_skip(kind)
    torch.manual_seed(0)
    out, a, b = (
        torch.randn(16, 24).to(device),
        torch.randn(8, 16).to(device, dtype),
        torch.randn(8, 24).to(device, dtype),
    )
    expected = plain.add_matmul(out.clone(), a, b)
    assert ops.add_matmul(out, a, b) is out
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_a_gradient_without_strides_reaches_every_expert() -> None:
    rows, weights = torch.randn(6, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    ops.grouped_linear(rows, weights, torch.tensor([4, 0, 2])).sum().backward()
    assert weights.grad is not None and rows.grad is not None
    assert torch.equal(weights.grad[1], torch.zeros(4, 8))
    torch.testing.assert_close(weights.grad[0], rows.detach()[:4].sum(0).expand(4, 8))


def test_a_device_without_its_own_kernels_runs_the_plain_ones() -> None:
    gate = torch.empty(2, 3, device="meta")
    assert ops.swiglu(gate, gate).device.type == "meta"
