"""The bench of the sample flow: its rows, and that each comes once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from spmdrl.dataflow.samples.schema import rule_of
from tests.bench.__main__ import main
from tests.bench.samples.sample_ranks import StoreTask, check_came_once
from tests.bench.samples.sample_rows import (
    COLUMNS,
    KeptMemory,
    RowsSize,
    padded_rows,
    ragged_rows,
)
from tests.bench.samples.samples_bench import measure_memcpy

SIZE = RowsSize(num_groups=5, group_size=2, prompt_length=3, response_length=9)
TASK = StoreTask(chunk=4, warm_up=1, steps=2, requests=3)


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


@pytest.mark.ranks
@pytest.mark.slow
def test_the_samples_bench_compares_the_dock_with_memcpy(capfd):
    sizes = ["--groups", "4", "--group-size", "2", "--prompt-length", "4", "--response-length", "16"]
    assert main(["samples", *sizes, "--chunk", "3", "--rounds", "1", "--requests", "20", "--json"]) == 0
    content = json.loads(capfd.readouterr().out)
    rows = {(row["rows"], row["way"]): row for row in content["rows"]}
    for shape in ("padded", "ragged"):
        for way in ("memcpy", "dock", "dock, copied out"):
            assert rows[shape, way]["put + get GB/s"] > 0, rows[shape, way]
        assert content["ratios"][f"{shape}_vs_memcpy"] > 0
        # Padded rows are dealt to who didn't generate them, so that they come from another process's memory.
        assert content["dock"][0]["padded"]["get_bytes_by_link"]["node"] > 0
    assert 0 < content["metadata_p50_us"] <= content["metadata_p99_us"]
