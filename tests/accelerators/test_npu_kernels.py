"""The NPU's kernels equal the plain ones when torch_npu's operators do what their documentation says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from spmdrl.engines.models.kernels import npu, plain
from spmdrl.engines.models.kernels.ops import TABLE
from spmdrl.engines.models.kernels.packed import PackedRows
from spmdrl.nouns.batch import offsets_of
from tests.accelerators.npu_operators import stand_in
from tests.engines.models.kernels.test_table import (
    CASES,
    EXACT_TOLERANCE,
    HALF_TOLERANCE,
    Case,
    counts,
    results_and_gradients,
    rows_of,
)

CPU = torch.device("cpu")
NPU_CASES = {name: cases for name, cases in CASES.items() if TABLE[name]["npu"].__module__ == npu.__name__} | {
    "lone expert": [Case(((9, 16), (1, 8, 16)), counts(9))],
    "many rows": [Case(((1500, 2, 8), (1500, 1, 8), (1500, 1, 4)), rows_of(*[1, 2, 0] * 500))],
    "no rows of experts": [Case(((0, 8), (0, 8)))],
}
OPERATIONS = {"lone expert": "grouped_linear", "many rows": "packed_attention", "no rows of experts": "swiglu"}


@pytest.fixture(scope="module")
def operators() -> SimpleNamespace:
    return stand_in()


@pytest.fixture(autouse=True)
def installed(operators: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "torch_npu", operators)
    npu._operators.cache_clear()
    yield
    npu._operators.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NPU_CASES)
def test_a_kernel_equals_the_plain_one(name: str, dtype: torch.dtype) -> None:
    operation = OPERATIONS.get(name, name)
    tolerance = EXACT_TOLERANCE if dtype is torch.float32 else HALF_TOLERANCE
    for case in NPU_CASES[name]:
        torch.manual_seed(0)
        inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in case.shapes]
        exact = [x.detach().float().requires_grad_() for x in inputs]
        fixed = case.fixed(CPU)
        results = results_and_gradients(TABLE[operation]["npu"], inputs, fixed)
        references = results_and_gradients(getattr(plain, operation), exact, fixed)
        for result, reference in zip(results, references, strict=True):
            scale = reference.abs().max().item() if reference.numel() else 0.0
            assert result.shape == reference.shape
            torch.testing.assert_close(result.float(), reference, atol=tolerance * max(1.0, scale), rtol=tolerance)


def test_a_product_is_added_in_place_with_nnal_and_without(operators: SimpleNamespace, monkeypatch) -> None:
    torch.manual_seed(0)
    sums, a, b = torch.randn(6, 5), torch.randn(9, 6).bfloat16(), torch.randn(9, 5).bfloat16()
    expected = sums + a.float().T @ b.float()
    out = sums.clone()
    assert npu.add_matmul(out, a, b) is out
    torch.testing.assert_close(out, expected)

    def missing(*arguments: object) -> None:
        raise OSError("libatb.so: cannot open shared object file")

    monkeypatch.setattr(operators, "_npu_matmul_add_fp32", missing)
    torch.testing.assert_close(npu.add_matmul(sums.clone(), a, b), expected)


def test_rows_are_attended_in_calls_of_at_most_1024(operators: SimpleNamespace, monkeypatch) -> None:
    calls: list[int] = []
    found = operators.npu_fusion_attention

    def counted(*arguments: object, **options: list[int]) -> object:
        calls.append(len(options["actual_seq_qlen"]))
        return found(*arguments, **options)

    monkeypatch.setattr(operators, "npu_fusion_attention", counted)
    heads = torch.zeros(2100, 1, 8)
    npu.packed_attention(heads, heads, heads, PackedRows(offsets_of([1] * 2100)))
    assert calls == [1024, 1024, 52]
