"""The bench of memory: resident memory and ledger agree on what the swap frees, and the plot shows both runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench.memory.memory_bench import add_arguments, run
from tests.bench.memory.memory_plot import memory_svg
from tests.bench.memory.memory_ranks import Look

PHASES = ["update", "switch", "generation", "return", "next update"]
SVG = "{http://www.w3.org/2000/svg}"


def look(seconds: float, resident: int, **ledger: int) -> Look:
    return Look(seconds, resident, {"update_weights": 0, "kv_cache": 0, "bucket": 0} | ledger)


def test_the_plot_stacks_what_is_held_and_keeps_peaks():
    looks = [
        look(0.0, 100, update_weights=50),
        *(look(0.1 * n, 100) for n in range(1, 400)),
        look(41.0, 60, kv_cache=9),
    ]
    looks[250] = look(25.0, 400)
    root = ElementTree.fromstring(memory_svg({"swap": {"switch": looks}, "no swap": {"switch": looks[:2]}}))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"swap", "no swap", "switch", "update_weights", "kv_cache"} <= set(texts) and "bucket" not in texts
    (line, _) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
    assert len(points) < 70 and [x for x, _ in points] == sorted(x for x, _ in points)
    highest = min(y for _, y in points)
    assert highest == 34.0  # the top of the panel: the one look at 400 bytes


@pytest.mark.ranks
@pytest.mark.slow
def test_the_swap_frees_the_training_state_by_ledger_and_by_resident_memory(tmp_path: Path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    plot = tmp_path / "figures" / "memory.svg"
    table = run(parser.parse_args(["--layers", "1", "--rows", "2", "--length", "8", "--plot", str(plot)]))
    assert [row["phase"] for row in table.rows] == PHASES
    ratios = table.details["ratios"]
    assert ratios["freed_ledger_vs_state"] == pytest.approx(1.0, abs=0.01)
    assert ratios["freed_resident_vs_state"] == pytest.approx(1.0, abs=0.15)
    assert ratios["switch_peak_vs_without"] < 0.85
    away = table.details["owners_at_end"]["swap"]["generation"]
    assert set(away) == {"generation_weights", "kv_cache"}
    assert ElementTree.parse(plot).getroot().tag == f"{SVG}svg"
