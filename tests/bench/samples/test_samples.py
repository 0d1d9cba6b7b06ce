"""The bench of the sample flow: every way brings the same rows, once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from spmdrl.dataflow.samples.schema import rule_of
from tests.bench.__main__ import main
from tests.bench.samples.sample_driver import StoreTask, check_came_once, columns_of, measure, measure_memcpy
from tests.bench.samples.sample_peers import RowBuffer
from tests.bench.samples.sample_rows import (
    COLUMNS,
    PROMPT,
    RESPONSE_COLUMNS,
    ROW_NUMBER,
    KeptMemory,
    Rows,
    RowsSize,
    padded_rows,
    ragged_rows,
)
from tests.bench.samples.sample_tcp import PackedTcpPickle, TcpPickle

SIZE = RowsSize(num_groups=5, group_size=2, prompt_length=3, response_length=9)
TASK = StoreTask(shapes=("ragged",), chunk=4, warm_up=1, steps=2, requests=3)


def test_rows_have_the_schemas_types_and_the_shape_of_eq_2():
    rows = padded_rows(SIZE)
    assert {name: str(values.dtype) for name, values in rows.columns.items()} == {
        name: str(rule_of(name).column.dtype).removeprefix("torch.") for name in COLUMNS
    }
    assert rows.payload_bytes == 10 * (3 + 5 * 9 + 3) * 4
    assert np.diff(ragged_rows(SIZE).offsets).min() >= 1 and np.diff(ragged_rows(SIZE).offsets).max() <= 9


def test_parts_of_rows_are_the_rows():
    rows = ragged_rows(SIZE)
    parts = list(rows.parts(4))
    assert [part.num_rows for part in parts] == [4, 4, 2]
    assert all(part.offsets[0] == 0 for part in parts)
    for name in COLUMNS:
        assert np.array_equal(np.concatenate([part.columns[name] for part in parts]), rows.columns[name])


def test_rows_survive_a_file(tmp_path: Path):
    rows = ragged_rows(SIZE)
    rows.save(tmp_path / "ragged.npz")
    loaded = Rows.load(tmp_path / "ragged.npz")
    assert loaded.group_size == rows.group_size and np.array_equal(loaded.offsets, rows.offsets)
    assert all(np.array_equal(loaded.columns[name], rows.columns[name]) for name in COLUMNS)


def test_stores_get_an_array_a_row_only_where_lengths_differ():
    rows = ragged_rows(SIZE)
    by_row, packed = columns_of(rows, packed=False), columns_of(rows, packed=True)
    assert by_row[PROMPT].shape == (10, 3)
    for name in RESPONSE_COLUMNS:
        assert [len(values) for values in by_row[name]] == np.diff(rows.offsets).tolist()
        assert np.array_equal(np.concatenate(by_row[name]), packed[name])
    assert columns_of(padded_rows(SIZE), packed=False)["versions"].shape == (10, 9)


def test_rows_that_come_twice_or_not_whole_are_refused():
    rows = padded_rows(SIZE)
    check_came_once(range(10), rows, rows.payload_bytes)
    with pytest.raises(RuntimeError, match="9 different ones"):
        check_came_once([0, *range(9)], rows, rows.payload_bytes)
    with pytest.raises(RuntimeError, match="bytes were put"):
        check_came_once(range(10), rows, rows.payload_bytes - 4)


def test_kept_memory_is_reused_and_holds_copies():
    memory, values = KeptMemory(), np.arange(5)
    first = memory.copy("a", values)
    values[0] = 9
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert np.shares_memory(first, memory.copy("a", values[:3]))
    assert not np.shares_memory(first, memory.copy("b", values))


def test_memcpy_takes_time_for_each_counted_step():
    found = measure_memcpy(ragged_rows(SIZE), TASK)
    assert len(found.put_seconds) == len(found.get_seconds) == 2 and min(found.put_seconds) > 0


def test_a_row_buffer_gives_each_row_once_when_all_of_its_columns_are_there():
    buffer, rows = RowBuffer(), padded_rows(SIZE)
    columns = columns_of(rows, packed=False)
    late = columns.pop("old_logprobs")
    buffer.put(range(10), columns)
    assert buffer.get(4, COLUMNS)[ROW_NUMBER] == []
    buffer.put(range(10), {"old_logprobs": late})
    got = [buffer.get(6, COLUMNS)[ROW_NUMBER].tolist() for _ in range(2)]
    assert got == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]] and buffer.num_ready() == 0


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [TcpPickle, PackedTcpPickle])
def test_blobs_over_tcp_bring_every_row_to_another_process(kind: type[TcpPickle], tmp_path: Path):
    ragged_rows(SIZE).save(tmp_path / "ragged.npz")
    found = measure(kind, TASK, tmp_path)["ragged"]
    assert len(found["put_seconds"]) == len(found["get_seconds"]) == 2
    assert len(found["request_seconds"]) == 3


def test_a_server_of_blobs_refuses_connections_without_its_token():
    with TcpPickle.serve() as (port, _):
        stranger = TcpPickle((port, bytes(32)))
        with pytest.raises((EOFError, ConnectionError)):
            stranger.num_ready()


@pytest.mark.ranks
@pytest.mark.slow
def test_the_samples_bench_compares_all_ways_and_names_what_is_missing(capfd):
    sizes = ["--groups", "4", "--group-size", "2", "--prompt-length", "4", "--response-length", "16"]
    assert main(["samples", *sizes, "--chunk", "3", "--rounds", "1", "--requests", "20", "--json"]) == 0
    content = json.loads(capfd.readouterr().out)
    rows = {(row["rows"], row["way"]): row for row in content["rows"]}
    for shape in ("padded", "ragged"):
        for way in ("memcpy", "dock", "dock, copied out", "tcp_pickle", "tcp_pickle_packed"):
            assert rows[shape, way]["put + get GB/s"] > 0, rows[shape, way]
        for way in ("ray", "transferqueue"):
            row = rows[shape, way]
            assert row["put + get GB/s"] or "No module named" in row["remark"]
        assert content["ratios"][f"{shape}_vs_memcpy"] > 0
        # Padded rows are dealt to who didn't generate them, so that they come from another process's memory.
        assert content["dock"][0]["padded"]["get_bytes_by_link"]["node"] > 0
    assert 0 < content["metadata_p50_us"] <= content["metadata_p99_us"]
