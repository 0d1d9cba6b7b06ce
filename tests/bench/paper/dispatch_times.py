"""The paper's Table 1 by its own equations, and its Eq. 4 for the same flows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spmdrl.dataflow.samples.volume import FlowShape, replay_buffer_gib, warehouse_gib
from tests.bench.harness.bench_table import BenchTable

K = 1024
"""K of lengths and batch sizes; of printed results it is 1000"""
# G, N, PL, n, SL, M, then TCV, T100 and T1K as they are printed.
PUBLISHED = (
    (256, 8, 2 * K, 5, 8 * K, 3, "0.96", "9.92", "0.97"),
    (256, 16, 2 * K, 5, 16 * K, 3, "3.81", "39.0", "3.81"),
    (K, 16, 2 * K, 5, 16 * K, 3, "15.2", "156.1", "15.2"),
    (K, 32, 4 * K, 8, 32 * K, 5, "97.0", "993.3", "97.0"),
    (4 * K, 32, 4 * K, 8, 32 * K, 5, "388.0", "3.9K", "388.0"),
    (8 * K, 64, 4 * K, 8, 64 * K, 5, "3.1K", "31K", "3.1K"),
)  # fmt: skip
LINK_MIB = {"T100": 100, "T1K": 1024}
CLUSTER_LINK_MIB = 300
"""of the paper's cluster"""
NUM_CONTROLLERS = 6
"""one for each of GRPO's worker states: generation, reward, reference, old log-probs, advantage, update"""
NUM_WAREHOUSES = (2, 24, 48)
"""nodes of the paper's Figures 7, 9 and 11"""


@dataclass(frozen=True)
class Printed:
    """A figure as the paper prints it: `3.9K` is 3900, and its last digit is worth 100."""

    text: str

    @property
    def _unit(self) -> float:
        return 1000.0 if self.text.endswith("K") else 1.0

    @property
    def value(self) -> float:
        return float(self.text.rstrip("K")) * self._unit

    def made_from(self, exact: float) -> str:
        """How the printed digits come from the exact value: rounded, cut off, or neither."""
        last_digit = self._unit * 10.0 ** -len(self.text.rstrip("K").partition(".")[2])
        printed = round(self.value / last_digit)
        if round(exact / last_digit) == printed:
            return "rounded"
        return "cut off" if math.floor(exact / last_digit) == printed else "neither"


def figures_of(flow: FlowShape) -> dict[str, float]:
    """TCV in GiB, T100 and T1K in seconds."""
    gib = replay_buffer_gib(flow)
    return {"TCV": gib} | {name: gib * 1024 / rate for name, rate in LINK_MIB.items()}


def table1() -> BenchTable:
    """Passes if each printed figure follows from the equations, rounded or cut off."""
    rows: list[dict[str, object]] = []
    decimal_seconds: list[float] = []
    ratios: list[float] = []
    made: dict[str, list[str]] = {"rounded": [], "cut off": [], "neither": []}
    for prompts, responses, prompt, items, response, scalars, *published in PUBLISHED:
        flow = FlowShape(prompts, responses, prompt, response, items, scalars)
        sizes = f"{prompts} x {responses}, {prompt // K}K + {items} x {response // K}K, {scalars}"
        row: dict[str, object] = {"G x N, PL + n x SL, M": sizes}
        for (name, ours), text in zip(figures_of(flow).items(), published, strict=True):
            ratios.append(ours / Printed(text).value)
            row |= {f"paper's {name}": text, name: ours, f"{name}, ratio": ratios[-1]}
            made[Printed(text).made_from(ours)].append(f"{name} {text} ({ours:.5g})")
        for count in NUM_WAREHOUSES:
            gib = warehouse_gib(flow, num_controllers=NUM_CONTROLLERS, num_warehouses=count)
            row[f"Eq. 4, S={count}"] = gib
        row[f"s at {CLUSTER_LINK_MIB}"] = gib * 1024 / CLUSTER_LINK_MIB
        rows.append(row)
        decimal_seconds.append(replay_buffer_gib(flow) * 1024**3 / 1e8)
    return BenchTable(
        title="Table 1: bytes of a step's sample flow and their dispatch time",
        rows=rows,
        notes=(
            "TCV is Eq. 2 in GiB, T100 and T1K are its seconds at 100 MiB/s and 1 GiB/s. With MB/s of 10^6 bytes T100 "
            f"would be {decimal_seconds[0]:.4g} in the first row: the paper's GB and MB/s are powers of two.",
            f"Eq. 4 is the GiB through each of S warehouses with C = {NUM_CONTROLLERS} controllers, one per worker "
            f"state; the last column its seconds at {CLUSTER_LINK_MIB} MiB/s, the paper's cluster, with the most. "
            "Bytes that the dock moves equal it to 1% (tests/dataflow/samples/test_eq4.py).",
            f"Cut off by the paper where it rounds elsewhere: {', '.join(made['cut off'])}.",
            f"Printed figures that don't follow: {', '.join(made['neither']) or 'none'}.",
        ),
        details={
            "here": f"{min(ratios):.3f} to {max(ratios):.3f} of the printed figures",
            "cut_off": made["cut off"],
            "differing": made["neither"],
        },
        passed=not made["neither"],
    )
