"""The picture of a plan is an SVG whose bars are as long as the plan's bytes and seconds."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from spmdrl.observability.report.plan_section import plan_svg

GIB = 1 << 30
SLOTS = {
    "switch": {"generation_weights": 14 * GIB, "bucket": GIB // 16},
    "generation": {"kv_cache": 38 * GIB, "generation_weights": 14 * GIB, "rows": 0},
    "update": {"update_weights": 2 * GIB, "activations": 5 * GIB, "optimizer": 4 * GIB, "gone": 0},
}
PLAN: dict[str, Any] = {
    "fits": True, "device": "a<b & c", "device_bytes": 61 * GIB,
    "ranks": [{"rank": 3, "peak_bytes": 52 * GIB, "slots": SLOTS}],
}  # fmt: skip
TIMES = {
    "stages": {"switch": 1.0, "generation": 30.0, "reward": 0.01, "update": 9.0}, "step_seconds": 40.0,
    "tokens_per_second_per_device": 1500.0,
}  # fmt: skip


def parts_of(picture: str) -> tuple[dict[str, ElementTree.Element], list[str], float]:
    """Bars by title without its amount, all texts, and the height of the device's memory above 0."""
    root, name = ElementTree.fromstring(picture), "{http://www.w3.org/2000/svg}"
    bars = {}
    for rect in root.iter(f"{name}rect"):
        if (title := rect.find(f"{name}title")) is not None:
            bars[str(title.text).rpartition(":")[0] or str(title.text).split()[0]] = rect
    (room,) = (float(line.attrib["y1"]) for line in root.iter(f"{name}line") if line.get("class") == "room")
    bottom = max(float(line.attrib["y1"]) for line in root.iter(f"{name}line"))
    return bars, [str(text.text) for text in root.iter(f"{name}text")], bottom - room


def test_bars_are_as_high_as_bytes_and_stacked_below_the_devices_memory():
    bars, texts, room = parts_of(plan_svg(PLAN))
    shown = {f"{slot}, {owner}": size for slot, held in SLOTS.items() for owner, size in held.items() if size}
    assert bars.keys() == shown.keys()
    scale = room / PLAN["device_bytes"]
    for what, size in shown.items():
        assert float(bars[what].attrib["height"]) == pytest.approx(size * scale, abs=0.002), what
    for slot, held in SLOTS.items():
        own = [bars[f"{slot}, {owner}"].attrib for owner, size in held.items() if size]
        assert len({one["x"] for one in own}) == 1
        tops = sorted((float(one["y"]), float(one["y"]) + float(one["height"])) for one in own)
        assert [end for _, end in tops[:-1]] == pytest.approx([start for start, _ in tops[1:]], abs=0.002)
    assert {owner.replace("_", " ") for held in SLOTS.values() for owner, size in held.items() if size} <= {*texts}
    assert {"14 GiB", "52 GiB", "11 GiB", *SLOTS} <= {*texts} and not any("gone" in text for text in texts)
    assert texts[0] == "fits: 52 GiB of 61 GiB on a<b & c, in the generation of rank 3"


def test_a_plan_that_does_not_fit_rises_above_the_line():
    bars, _, room = parts_of(plan_svg(PLAN | {"fits": False, "device_bytes": 20 * GIB}))
    held = sum(float(bar.attrib["height"]) for what, bar in bars.items() if what.startswith("generation,"))
    assert held == pytest.approx(room * 52 / 20, rel=1e-3)


def test_a_step_is_one_bar_of_its_parts_if_the_device_has_rates():
    bars, texts, _ = parts_of(plan_svg(PLAN | TIMES))
    steps = {what: bar.attrib for what, bar in bars.items() if "," not in what}
    widths = {what: float(bar["width"]) for what, bar in steps.items()}
    assert widths["generation"] == pytest.approx(30 * widths["switch"], rel=1e-3)
    end = float(steps["reward"]["x"]) + widths["reward"]
    assert float(steps["update"]["x"]) == pytest.approx(end, abs=0.01)
    assert {"switch 1.0s", "generation 30s", "update 9.0s"} <= {*texts} and "reward 10 ms" not in texts
    assert "40s per step, 1500 tokens per second and device" in texts
