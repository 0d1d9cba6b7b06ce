"""The swap bench trains a small model in each mode, and its memory is what the mode promises."""

from __future__ import annotations

import json

import pytest

from tests.bench.__main__ import main


@pytest.mark.ranks
@pytest.mark.slow
def test_the_swap_bench_compares_the_modes_in_one_run(tmp_path, capsys):
    out = tmp_path / "out.json"
    sizes = ["--layers", "1", "--vocabulary", "2000", "--rows", "4", "--length", "4", "--steps", "2"]
    assert main(["swap", "--dtypes", "bfloat16", *sizes, "--json", str(out)]) == 0
    assert "reshard.swap" in capsys.readouterr().out
    content = json.loads(out.read_text())
    rows = {row["reshard.swap"]: row for row in content["rows"]}
    assert rows["never"]["x never"] == 1.0 and set(rows) == {"auto", "always", "never"}
    # Weights and two means in float32 stay where there is no swap.
    assert rows["never"]["while generating GiB"] > 2 * rows["always"]["while generating GiB"]
    assert rows["auto"]["while generating GiB"] == rows["never"]["while generating GiB"]
    assert json.loads(content["decisions"]["bfloat16 auto"])["swaps"] is False
    assert all(row["peak GiB"] > row["while generating GiB"] for row in rows.values())
