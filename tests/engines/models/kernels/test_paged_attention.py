"""Attention over pages of a cache equals softmax attention in float64, plain and as the kernel for CUDA."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.kernels import ops, plain
from spmdrl.engines.models.kernels.ops import TABLE
from tests.engines.models.kernels.test_table import device_or_skip

# Query heads, key heads, head size of keys and of values, block size, and cached positions of each row.
CASES = [
    (4, 2, 16, 16, 4, (1, 37)),
    (7, 1, 24, 16, 32, (300, 256, 255, 513)),
    (3, 3, 64, 64, 48, (257, 2)),
]


def pages(case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values, block tables and lengths; blocks lie in random order, and some tables are too long."""
    num_queries, num_heads, key_size, value_size, block_size, lengths = case
    torch.manual_seed(0)
    width = -(-max(lengths) // block_size) + 1
    blocks = torch.randperm(len(lengths) * width, dtype=torch.int32)
    stores = (torch.randn(len(blocks), num_heads, block_size, size) for size in (key_size, value_size))
    query = torch.randn(len(lengths), num_queries, key_size)
    return (
        *(x.to(dtype) for x in (query, *stores)),
        blocks.view(len(lengths), width),
        torch.tensor(lengths, dtype=torch.int32),
    )


def softmax_attention(queries: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    attended = []
    for query, table, length in zip(queries.double(), tables.tolist(), lengths.tolist(), strict=True):
        key, value = (store[table].double().transpose(0, 1).flatten(1, 2)[:, :length] for store in (keys, values))
        shared = query.unflatten(0, (len(key), -1))
        weights = torch.softmax(shared @ key.transpose(1, 2) * query.shape[-1] ** -0.5, dim=-1)
        attended.append((weights @ value).flatten(0, 1))
    return torch.stack(attended)


def interpreted(calls: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """The kernel's results, in a process that has Triton interpret kernels on the CPU."""
    from spmdrl.engines.models.kernels import paged_kernel

    return [paged_kernel.paged_attention(*arguments) for arguments in calls]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[tuple[Tensor, ...]]], list[Tensor]]]:
    if find_spec("triton") is None:
        pytest.skip("triton isn't installed; it comes with torch's CUDA builds")
    # Read when Triton is imported.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield lambda calls: process.submit(interpreted, calls).result(timeout=120)


@pytest.mark.parametrize("case", CASES)
def test_the_plain_one_equals_softmax_attention(case) -> None:
    arguments = pages(case, torch.float32)
    found = plain.paged_attention(*arguments).double()
    torch.testing.assert_close(found, softmax_attention(*arguments), atol=1e-5, rtol=0)


def test_the_kernel_equals_softmax_attention(kernel) -> None:
    # Triton's interpreter multiplies no bfloat16.
    kinds = [(case, dtype) for case in CASES for dtype in (torch.float32, torch.float16)]
    calls = [pages(case, dtype) for case, dtype in kinds]
    for (_, dtype), arguments, found in zip(kinds, calls, kernel(calls), strict=True):
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype is torch.float32 else 2e-3
        torch.testing.assert_close(found.double(), softmax_attention(*arguments), atol=tolerance, rtol=0)


def test_the_kernel_rounds_a_row_alike_in_every_batch_and_table(kernel) -> None:
    queries, keys, values, tables, lengths = pages(CASES[1], torch.float32)
    wider = torch.cat([tables, torch.zeros_like(tables)], dim=1)
    alone = [
        (queries[row : row + 1], keys, values, wider[row : row + 1], lengths[row : row + 1])
        for row in range(len(queries))
    ]
    together, *rows = kernel([(queries, keys, values, tables, lengths), *alone])
    assert torch.equal(torch.cat(rows), together)


def test_a_cpu_rounds_a_row_alike_in_every_batch_and_table_and_on_any_threads() -> None:
    if not ops.reads_pages(torch.device("cpu")):
        pytest.skip("this machine has no C++ compiler")
    queries, keys, values, tables, lengths = pages(CASES[1], torch.float32)
    wider = torch.cat([tables, torch.zeros_like(tables)], dim=1)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = ops.paged_attention(queries, keys, values, tables, lengths)
        torch.set_num_threads(1)
        alone = [
            ops.paged_attention(queries[row][None], keys, values, wider[row][None], lengths[row][None])
            for row in range(len(queries))
        ]
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernel_compiles_for_hopper(dtype: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="triton isn't installed; it comes with torch's CUDA builds")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from spmdrl.engines.models.kernels import paged_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {
        "NUM_HEADS": 4, "NUM_SHARING": 7, "KEY_SIZE": 128, "VALUE_SIZE": 128, "BLOCK_SIZE": 32, "QUERIES": 16,
        "KEY_LANES": 128, "VALUE_LANES": 128, "CHUNK": 256, "TILE": 64,
    }  # fmt: skip
    kinds = dict.fromkeys(("queries", "keys", "values", "out"), f"*{dtype}")
    kinds |= {"tables": "*i32", "lengths": "*i32", "parts": "*fp32", "bounds": "*fp32", "scale": "fp32"}
    for function in (paged_kernel._attend_chunks, paged_kernel._merge_chunks):
        names = function.arg_names
        signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
        used = {name: value for name, value in constants.items() if name in names}
        built = triton.compile(ASTSource(function, signature, used), target=GPUTarget("cuda", 90, 32))
        assert len(built.asm["cubin"]) > 1000


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "cpu" else pytest.mark.gpu) for kind in TABLE["paged_attention"]]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_every_kind_of_device_has_one(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    device = device_or_skip(kind)
    for case in CASES:
        arguments = pages(case, dtype)
        found = ops.paged_attention(*(x.to(device) for x in arguments)).cpu()
        torch.testing.assert_close(found.double(), softmax_attention(*arguments), atol=tolerance, rtol=0)
