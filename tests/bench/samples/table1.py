"""Table 1 of the MindSpeed RL paper, and Eq. 4 for the same rows.

Bytes through a central replay buffer in one step and the time to dispatch them, by the functions that the report of a
run uses; the paper's printed figures beside ours, and what each warehouse of a transfer dock carries instead.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from spmdrl.dataflow.samples.volume import FlowShape, replay_buffer_gib, warehouse_gib
from tests.bench.harness.bench_table import BenchTable

K = 1024
"""What the paper's K stands for in lengths and batch sizes; in its results it is 1000."""

# G, N, PL, n, SL, M, then TCV, T100 and T1K as the paper prints them (arXiv:2507.19017, Table 1).
PUBLISHED = (
    (256, 8, 2 * K, 5, 8 * K, 3, "0.96", "9.92", "0.97"),
    (256, 16, 2 * K, 5, 16 * K, 3, "3.81", "39.0", "3.81"),
    (K, 16, 2 * K, 5, 16 * K, 3, "15.2", "156.1", "15.2"),
    (K, 32, 4 * K, 8, 32 * K, 5, "97.0", "993.3", "97.0"),
    (4 * K, 32, 4 * K, 8, 32 * K, 5, "388.0", "3.9K", "388.0"),
    (8 * K, 64, 4 * K, 8, 64 * K, 5, "3.1K", "31K", "3.1K"),
)  # fmt: skip
LINK_MIB = {"T100": 100, "T1K": 1024}
"""MiB a second: with GiB as the unit of TCV, only these give the printed seconds."""
NUM_CONTROLLERS = 6
NUM_WAREHOUSES = (16, 128)


@dataclass(frozen=True)
class Printed:
    """A figure as the paper prints it: `3.9K` is 3900, and 100 is worth its last digit."""

    text: str

    @property
    def _unit(self) -> float:
        return 1000.0 if self.text.endswith("K") else 1.0

    @property
    def value(self) -> float:
        return float(self.text.rstrip("K")) * self._unit

    @property
    def last_digit(self) -> float:
        decimals = self.text.rstrip("K").partition(".")[2]
        return self._unit * 10.0 ** -len(decimals)

    def compared_with(self, exact: float) -> str:
        """How the printed digits come from the exact value: rounded, cut off, or not at all (differs)."""
        steps = exact / self.last_digit
        printed = round(self.value / self.last_digit)
        if round(steps) == printed:
            return "rounded"
        return "cut off" if math.floor(steps) == printed else "differs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The table has no settings."""


def run(arguments: argparse.Namespace) -> BenchTable:
    """Passes where every printed figure follows from the formulas, rounded or cut off."""
    rows: list[dict[str, object]] = []
    remarks: dict[str, list[str]] = {"rounded": [], "cut off": [], "differs": []}
    for prompts, responses, prompt, items, response, scalars, *published in PUBLISHED:
        flow = FlowShape(prompts, responses, prompt, response, items, scalars)
        row: dict[str, object] = {"G": prompts, "N": responses, "PL": prompt, "n": items, "SL": response, "M": scalars}
        for (name, ours), text in zip(figures_of(flow).items(), published, strict=True):
            row |= {name: ours, f"paper's {name}": text}
            remarks[Printed(text).compared_with(ours)].append(f"{name} {text} ({ours:.5g})")
        for count in NUM_WAREHOUSES:
            row[f"Eq. 4, S = {count}"] = warehouse_gib(flow, num_controllers=NUM_CONTROLLERS, num_warehouses=count)
        rows.append(row)
    return BenchTable(
        title="bench table1: bytes of a step's sample flow and their dispatch time",
        rows=rows,
        notes=(
            "TCV is Eq. 2 in GiB, T100 and T1K are its seconds at 100 MiB/s and 1 GiB/s: what the paper calls GB and "
            "MB/s must be powers of two to give its figures.",
            f"Eq. 4 is the GiB through each of S warehouses, with C = {NUM_CONTROLLERS} controllers.",
            f"Cut off by the paper where it rounds elsewhere: {', '.join(remarks['cut off']) or 'none'}.",
            f"Printed figures that the formulas don't give: {', '.join(remarks['differs']) or 'none'}.",
        ),
        details={"cut_off": remarks["cut off"], "differing": remarks["differs"]},
        passed=not remarks["differs"],
    )


def figures_of(flow: FlowShape) -> dict[str, float]:
    """TCV in GiB, T100 and T1K in seconds."""
    gib = replay_buffer_gib(flow)
    return {"TCV": gib} | {name: gib * 1024 / rate for name, rate in LINK_MIB.items()}
