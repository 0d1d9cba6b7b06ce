"""Attention over pages of a cache equals softmax attention in float64, plain and as the kernel for CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.kernels import ops, plain
from spmdrl.engines.models.kernels.ops import TABLE
from tests.engines.models.kernels.interpreter import Interpreter, compiled_size
from tests.engines.models.kernels.test_table import device_or_skip

# Query heads, key heads, head size of keys and of values, block size, and cached positions of each row.
CASES = [
    (4, 2, 16, 16, 4, (1, 37)),
    (7, 1, 24, 16, 32, (300, 256, 255, 513)),
    (3, 3, 64, 64, 48, (257, 2)),
    (2, 1, 8, 6, 4, (1, 20)),
]


# The longest row of the cases ends at 513.
WINDOWS = [None, 1, 2, 5, 64, 255, 256, 257, 513, 600]


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


def softmax_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    attended = []
    for query, table, length in zip(queries.double(), tables.tolist(), lengths.tolist(), strict=True):
        seen = slice(0 if window is None else max(0, length - window), length)
        key, value = (store[table].double().transpose(0, 1).flatten(1, 2)[:, seen] for store in (keys, values))
        scores = query.unflatten(0, (len(key), -1)) @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        exponentials = scores.exp()
        total = exponentials.sum(-1, keepdim=True)
        if sinks is not None:
            total += sinks.double().exp().view(len(key), -1, 1)
        attended.append((exponentials / total @ value).flatten(0, 1))
    return torch.stack(attended)


def sinks_of(case) -> Tensor:
    return torch.randn(case[0], generator=torch.Generator().manual_seed(1)) * 2


def without_unseen(arguments: tuple[Tensor, ...], window: int | None) -> tuple[Tensor, ...]:
    """The same with tables that name a block of infinities where a row doesn't look."""
    queries, keys, values, tables, lengths = arguments
    keys, values = (torch.cat([store, torch.full_like(store[:1], torch.inf)]) for store in (keys, values))
    ends = (torch.arange(tables.shape[1]) + 1) * keys.shape[2]
    first = torch.zeros_like(lengths) if window is None else lengths - window
    is_unseen = (ends <= first[:, None]) | (ends - keys.shape[2] >= lengths[:, None])
    return queries, keys, values, tables.masked_fill(is_unseen, len(keys) - 1), lengths


def interpreted(*arguments: Tensor) -> Tensor:
    from spmdrl.engines.models.kernels import paged_kernel

    return paged_kernel.paged_attention(*arguments)


@pytest.mark.parametrize("case", CASES)
def test_the_plain_one_equals_softmax_attention(case) -> None:
    arguments = pages(case, torch.float32)
    found = plain.paged_attention(*arguments).double()
    torch.testing.assert_close(found, softmax_attention(*arguments), atol=1e-5, rtol=0)


def test_the_kernel_equals_softmax_attention(interpreter: Interpreter) -> None:
    # Triton's interpreter multiplies no bfloat16.
    kinds = [(case, dtype) for case in CASES for dtype in (torch.float32, torch.float16)]
    calls = [pages(case, dtype) for case, dtype in kinds]
    for (_, dtype), arguments, found in zip(kinds, calls, interpreter.run(interpreted, calls), strict=True):
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype is torch.float32 else 2e-3
        torch.testing.assert_close(found.double(), softmax_attention(*arguments), atol=tolerance, rtol=0)


def test_the_kernel_sees_the_window_alone_and_joins_the_sinks(interpreter: Interpreter) -> None:
    kinds = [(case, window, sinks) for case in CASES for window in WINDOWS for sinks in (None, sinks_of(case))]
    calls = [(*without_unseen(pages(case, torch.float32), window), window, sinks) for case, window, sinks in kinds]
    for (case, *seen), found in zip(kinds, interpreter.run(interpreted, calls), strict=True):
        expected = softmax_attention(*pages(case, torch.float32), *seen)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_a_cpu_sees_the_window_alone_and_joins_the_sinks(case, dtype: torch.dtype) -> None:
    if not ops.reads_pages(torch.device("cpu")):
        pytest.skip("this machine has no C++ compiler")
    arguments, tolerance = pages(case, dtype), 1e-5 if dtype is torch.float32 else 2e-2
    for window in WINDOWS:
        for sinks in (None, sinks_of(case)):
            found = ops.paged_attention(*without_unseen(arguments, window), window, sinks)
            expected = softmax_attention(*arguments, window, sinks)
            torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_plain_one_sees_the_window_alone_and_joins_the_sinks(case) -> None:
    arguments = pages(case, torch.float32)
    for window in WINDOWS:
        for sinks in (None, sinks_of(case)):
            found = plain.paged_attention(*arguments, window, sinks).double()
            torch.testing.assert_close(found, softmax_attention(*arguments, window, sinks), atol=1e-5, rtol=0)


def test_the_kernel_rounds_a_row_alike_in_every_batch_and_table(interpreter: Interpreter) -> None:
    queries, keys, values, tables, lengths = pages(CASES[1], torch.float32)
    wider = torch.cat([tables, torch.zeros_like(tables)], dim=1)
    alone = [
        (queries[row : row + 1], keys, values, wider[row : row + 1], lengths[row : row + 1])
        for row in range(len(queries))
    ]
    together, *rows = interpreter.run(interpreted, [(queries, keys, values, tables, lengths), *alone])
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
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernel_compiles_for_hopper(
    dtype: str, window: int | None, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton isn't installed; it comes with torch's CUDA builds")
    from spmdrl.engines.models.kernels import paged_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {
        "NUM_HEADS": 4, "NUM_SHARING": 7, "KEY_SIZE": 128, "VALUE_SIZE": 128, "BLOCK_SIZE": 32, "QUERIES": 16,
        "KEY_LANES": 128, "VALUE_LANES": 128, "CHUNK": 256, "TILE": 64, "WINDOW": window, "HAS_SINKS": True,
    }  # fmt: skip
    kinds = dict.fromkeys(("queries", "keys", "values", "sinks", "out"), f"*{dtype}")
    kinds |= {"tables": "*i32", "lengths": "*i32", "parts": "*fp32", "bounds": "*fp32", "scale": "fp32"}
    for function in (paged_kernel._attend_chunks, paged_kernel._merge_chunks):
        assert compiled_size(function, kinds, constants) > 1000


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
