"""The tables and figures of MindSpeed RL (arXiv:2507.19017) beside ours: computed, emulated or measured in small.

Each item has the paper's figure, ours, and what differs; a last table has one line and one command for each. Figures 1
to 6 are drawings. Without --only, items run that take less than about a minute; figures 7 to 9 and 11 take minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TextIO

from tests.bench.harness.bench_table import BenchTable
from tests.bench.memory import memory_bench
from tests.bench.paper import benchmark_sets, end_to_end, linearity, reward_curves
from tests.bench.paper.benchmark_sets import table3
from tests.bench.paper.dispatch_times import table1
from tests.bench.paper.end_to_end import figure7
from tests.bench.paper.features import table2
from tests.bench.paper.linearity import figure9
from tests.bench.paper.reward_curves import figure8
from tests.bench.paper.throughput import PAPER, figure11
from tests.bench.resharding import redundancy

COMMAND = "python -m tests.bench"
_LAYERS_OF_MEMORY = 4


@dataclass(frozen=True)
class PaperItem:
    """A table or a figure of the paper."""

    name: str
    """as the paper has it"""
    paper: str
    """its figures, in short"""
    command: str
    """of ours"""
    run: Callable[[argparse.Namespace], BenchTable] | None = None
    is_quick: bool = True
    here: str = "not run"
    """ours in short, unless it is run"""


@dataclass(frozen=True)
class PaperTables:
    """Tables by item, the last one of all items."""

    tables: Mapping[str, BenchTable]

    @property
    def passed(self) -> bool:
        return all(table.passed for table in self.tables.values())

    def print(self, stream: TextIO) -> None:
        for table in self.tables.values():
            table.print(stream)
            stream.write("\n")

    def to_json(self) -> str:
        return json.dumps({name: json.loads(table.to_json()) for name, table in self.tables.items()}, indent=1) + "\n"


def figure10(arguments: argparse.Namespace) -> BenchTable:
    """Released memory: by the plan of the paper's own switch, and measured in small."""
    case = redundancy.CASES[0]
    found = redundancy.figures_of(case)
    parser = argparse.ArgumentParser()
    memory_bench.add_arguments(parser)
    measured = memory_bench.run(parser.parse_args(["--layers", str(_LAYERS_OF_MEMORY)]))
    ratios = measured.details["ratios"]
    assert isinstance(ratios, Mapping)
    released = found.unused_by_device / redundancy.GB
    by_device = f"released per device, {case.model}, {case.switch}, GB"
    in_small = f"measured, {_LAYERS_OF_MEMORY} layers on 2 CPU ranks"
    figures = {
        "released resident memory / training state": ratios["freed_resident_vs_state"],
        "the same by the ledger": ratios["freed_ledger_vs_state"],
        "peak of a switch with / without the swap": ratios["switch_peak_vs_without"],
    }
    rows: list[dict[str, object]] = [
        {"what": by_device, "paper": "8", "ours": released, "how": "by the plan, bfloat16 weights"},
        *({"what": name, "paper": None, "ours": value, "how": in_small} for name, value in figures.items()),
    ]
    return BenchTable(
        title="Figure 10: memory that allgather-swap releases while generating",
        rows=rows,
        notes=(
            "The paper releases the update weights of one device; ours swaps the optimizer's state too.",
            f"Picture: docs/figures/memory_swap.svg, by `{COMMAND} memory --plot FILE`.",
        ),
        details={"here": f"{released:.2f} GB per device", "memory": [dict(row) for row in measured.rows]},
    )


def equation3(arguments: argparse.Namespace) -> BenchTable:
    """The bench of redundancy."""
    table = redundancy.run(arguments)
    (summed,) = (row["R (Eq. 3)"] for row in table.rows if row["switch"] == "TP2EP2DP2 -> TP1EP4DP4")
    return replace(table, details={**table.details, "here": f"{summed:.1f} GB"})


ITEMS = {
    "table1": PaperItem(
        "Table 1", "TCV 0.96 to 3.1K GB", f"{COMMAND} paper --only table1", lambda arguments: table1()
    ),
    "table2": PaperItem("Table 2", "19 of 19 features", f"{COMMAND} paper --only table2", lambda arguments: table2()),
    "table3": PaperItem(
        "Table 3", "MATH500 85.7, AIME24 23.7, GPQA 47.4", f"{COMMAND} paper --only table3 --math500 FILE", table3
    ),
    "fig7": PaperItem(
        "Figure 7", "1.42 to 3.97 times VeRL, OpenRLHF", f"{COMMAND} paper --only fig7 --peer COMMAND", figure7,
        is_quick=False,
    ),
    "fig8": PaperItem(
        "Figure 8", "rewards as VeRL's over 1000 iterations", f"{COMMAND} paper --only fig8 --start ...", figure8,
        is_quick=False,
    ),
    "fig9": PaperItem(
        "Figure 9", "0.811 (MSRL), 0.619 (MSRLB), 0.404 (VeRL)", f"{COMMAND} paper --only fig9", figure9,
        is_quick=False,
    ),
    "fig10": PaperItem("Figure 10", "8 GB per device", f"{COMMAND} paper --only fig10", figure10),
    "fig11": PaperItem(
        "Figure 11", f"{PAPER} tokens/s per NPU, 671B on 384 NPUs", f"{COMMAND} paper --only fig11", figure11,
        is_quick=False,
    ),
    "redundancy": PaperItem(
        "Eq. 3", "over 60 GB, Qwen3-MoE-30B", f"{COMMAND} paper --only redundancy", equation3,
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    quick = [name for name, item in ITEMS.items() if item.run is not None and item.is_quick]
    names = [name for name, item in ITEMS.items() if item.run is not None]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=quick, metavar="ITEM",
        help=f"of {', '.join(names)}; unless given: {', '.join(quick)}",
    )  # fmt: skip
    for part in (benchmark_sets, end_to_end, reward_curves, linearity):
        part.add_arguments(parser)


def run(arguments: argparse.Namespace) -> PaperTables:
    """Run the items, in the paper's order."""
    tables = {}
    for name, item in ITEMS.items():
        if name in arguments.only and item.run is not None:
            tables[name] = item.run(arguments)
    rows = [
        {
            "item": item.name,
            "paper": item.paper,
            "here": tables[name].details.get("here", "failed") if name in tables else item.here,
            "command": item.command,
        }
        for name, item in ITEMS.items()
    ]
    return PaperTables({**tables, "all": BenchTable("The paper's tables and figures", rows)})
