"""The paper's Figure 9: linearity measured over emulated nodes, and planned and modelled, at the paper's 24 and 48 too.

The plan's line needs nothing measured beyond 2 nodes (planned_line.py). The models' are fits:

A step on n nodes takes its compute, seconds of processors, and the bytes of the busiest link over its rate. Seconds and
bytes are a + b (1 - 1/n) + c n each: what every node does, rows that live elsewhere, and metadata. The three are least
squares over the measured numbers of nodes, none below 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.bench.harness.bench_table import BenchTable
from tests.bench.nodes import nodes
from tests.bench.nodes.sample_flow import FlowSize
from tests.bench.paper.planned_line import APART, AS_EMULATED, CALIBRATED, MeasuredNodes, planned_lines

PAPER = {"dock": "0.811 (MSRL)", "dock, locality off": "0.811 (MSRL)"}
PAPER_NODES = 24
OTHERS = "0.619 (a central buffer), 0.404 (VeRL)"
MODELLED_NODES = (PAPER_NODES, 48)
GOAL = 0.03
"""relative error of the plan's linearity at each number of nodes, and of a model's step at one that it hasn't seen"""

Line = Sequence[tuple[int, float]]
"""linearity by number of nodes"""


@dataclass(frozen=True)
class NodeStep:
    """The median step on so many nodes."""

    num_nodes: int
    compute_seconds: float
    processor_seconds: float
    """beyond compute: as measured, or of the busiest rank's processor"""
    link_megabytes: float
    """of the busiest link"""

    def seconds(self, link_megabytes_per_second: float) -> float:
        return self.compute_seconds + self.processor_seconds + self.link_megabytes / link_megabytes_per_second


@dataclass(frozen=True)
class StepModel:
    """Seconds of a step by the number of nodes."""

    compute_seconds: float
    processor: np.ndarray
    """a, b, c in seconds"""
    link: np.ndarray
    """a, b, c in megabytes"""
    link_megabytes_per_second: float

    @classmethod
    def of(cls, steps: Sequence[NodeStep], link_megabytes_per_second: float) -> StepModel:
        """Fit to two or more numbers of nodes."""
        counts = [step.num_nodes for step in steps]
        processor = _fit(counts, [step.processor_seconds for step in steps])
        link = _fit(counts, [step.link_megabytes for step in steps])
        # Work a node is constant; how evenly its ranks share it isn't.
        compute = float(np.mean([step.compute_seconds for step in steps]))
        return cls(compute, processor, link, link_megabytes_per_second)

    def dispatch_seconds(self, num_nodes: int) -> float:
        terms = _terms([num_nodes])[0]
        return float(terms @ self.processor + terms @ self.link / self.link_megabytes_per_second)

    def step_seconds(self, num_nodes: int) -> float:
        return self.compute_seconds + self.dispatch_seconds(num_nodes)

    def line(self, counts: Sequence[int]) -> Line:
        return [(count, self.step_seconds(1) / self.step_seconds(count)) for count in counts]


def _terms(counts: Sequence[int]) -> np.ndarray:
    num_nodes = np.array(counts, dtype=float)
    return np.stack([np.ones_like(num_nodes), 1 - 1 / num_nodes, num_nodes], axis=1)


def _fit(counts: Sequence[int], values: Sequence[float]) -> np.ndarray:
    """Least squares without negative weights: the most negative term is left out until none is."""
    terms, weights = _terms(counts), np.zeros(3)
    kept = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, kept], np.array(values), rcond=None)
        if found.min() >= 0 or len(kept) == 1:
            weights[kept] = found
            return weights
        del kept[int(found.argmin())]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", default="1,2,4,8", metavar="N,...", help="fig9: emulated nodes; 1,2,4,8 by default")
    parser.add_argument("--link-mb", type=float, default=300.0, help="fig9: megabytes a second of a link, each way")


def figure9(arguments: argparse.Namespace) -> BenchTable:
    """Measure, fit, and print both beside the paper's figure."""
    parser = argparse.ArgumentParser()
    nodes.add_arguments(parser)
    measured = nodes.run(parser.parse_args(["--nodes", arguments.nodes, "--link-mb", str(arguments.link_mb)]))
    return table_of(measured.rows, arguments.link_mb) if measured.passed else measured


def table_of(measured: Sequence[Mapping[str, object]], link_mb: float, size: FlowSize | None = None) -> BenchTable:
    """The rows of the nodes bench, the plan's beside them, and models fitted to them."""
    rows: list[dict[str, object]] = []
    errors = {}
    plan_errors: dict[str, dict[str, dict[int, float]]] = {}
    for variant in dict.fromkeys(str(row["variant"]) for row in measured):
        of_variant = [row for row in measured if row["variant"] == variant]
        rows += rows_of(
            variant, "measured", [(int(str(row["nodes"])), _number(row, "linearity")) for row in of_variant]
        )
        lines = _planned(of_variant, link_mb, size or FlowSize(), locality=variant == "dock")
        for kind, line in lines.items():
            rows += rows_of(variant, kind, line)
        plan_errors[variant] = _plan_errors(of_variant, lines, link_mb)
        for kind, steps in (("as emulated", _emulated(of_variant, link_mb)), ("machines apart", _apart(of_variant))):
            *fewer, last = steps
            if fewer:
                line = StepModel.of(steps, link_mb).line(sorted({*MODELLED_NODES, last.num_nodes}))
                rows += rows_of(variant, f"modelled, {kind}", line)
            if len(fewer) > 1:
                model = StepModel.of(fewer, link_mb)
                errors[f"{variant}, {kind}"] = (
                    model.step_seconds(last.num_nodes) / last.seconds(link_mb) - 1,
                    model.dispatch_seconds(last.num_nodes) / (last.seconds(link_mb) - last.compute_seconds) - 1,
                )
    return BenchTable(
        title=f"Figure 9: linearity over nodes, links of {link_mb:g} MB/s",
        rows=rows,
        notes=(
            f"The paper at {PAPER_NODES} nodes of 8 NPUs: 0.811 (MSRL), {OTHERS}. 'locality off' is its placement of "
            "rows, 'dock' ours. There is no central buffer here, and no VeRL.",
            "Emulated: one rank per node, half of the lengths of Table 1's first row, compute slept, all processes on "
            "this machine's cores, for which they wait. Machines apart: compute, the busiest rank's processor seconds "
            "and the busiest link's bytes, all measured here, one after another without a wait.",
            f"Plan: bytes and compute are planned; processor seconds and waits are those of 1 and 2 nodes here. As "
            f"emulated: ranks take turns on the cores. Goal: {GOAL:.0%} at each number of nodes.",
            *(
                f"{variant}: {name}: {', '.join(f'{error:+.1%} at {count}' for count, error in by_nodes.items())}"
                for variant, by_name in plan_errors.items()
                for name, by_nodes in by_name.items()
            ),
            *(
                f"{name}: fitted without the most nodes, the model's step there is {step:+.1%} off (goal: {GOAL:.0%}), "
                f"what it adds to compute {dispatch:+.0%}"
                for name, (step, dispatch) in errors.items()
            ),
        ),
        details={
            "here": _here(rows), "errors": errors, "plan_errors": plan_errors,
            "measured": [dict(row) for row in measured],
        },
    )  # fmt: skip


def rows_of(variant: str, kind: str, line: Line) -> list[dict[str, object]]:
    """Table rows of one line, measured or modelled by anyone."""
    return [
        {"variant": variant, "kind": kind, "nodes": count, "linearity": linearity,
         "paper": PAPER.get(variant) if count == PAPER_NODES else None}
        for count, linearity in line
    ]  # fmt: skip


def _planned(
    rows: Sequence[Mapping[str, object]], link_mb: float, size: FlowSize, *, locality: bool
) -> dict[str, Line]:  # fmt: skip
    """The plan's lines of one variant; empty unless it was measured on the nodes that calibrate them."""
    found = {
        int(str(row["nodes"])): MeasuredNodes(_number(row, "dispatch_s"), _number(row, "rank_cpu_s")) for row in rows
    }
    if not found.keys() >= CALIBRATED:
        return {}
    counts = sorted({*found, *MODELLED_NODES})
    return {**planned_lines(found, counts, size, locality=locality, link_mb=link_mb)}


def _plan_errors(
    rows: Sequence[Mapping[str, object]], lines: Mapping[str, Line], link_mb: float
) -> dict[str, dict[int, float]]:  # fmt: skip
    """Relative errors of planned linearity by number of nodes, beside what was measured."""
    if not lines:
        return {}
    measured = {int(str(row["nodes"])): _number(row, "linearity") for row in rows}
    steps = {step.num_nodes: step.seconds(link_mb) for step in _apart(rows)}
    apart = {count: steps[1] / seconds for count, seconds in steps.items()}
    compared = (
        (f"{AS_EMULATED}, beside the measured line", lines[AS_EMULATED], measured),
        (f"{APART}, beside the measured line", lines[APART], measured),
        (f"{APART}, beside the sum of measured parts", lines[APART], apart),
    )
    return {
        name: {count: linearity / found[count] - 1 for count, linearity in line if count in found}
        for name, line, found in compared
    }


def _emulated(rows: Sequence[Mapping[str, object]], link_mb: float) -> list[NodeStep]:
    """The link's seconds are in the measured dispatch."""
    return [
        _step(row, _number(row, "dispatch_s") - _number(row, "busiest_veth_mb") / link_mb) for row in rows
    ]  # fmt: skip


def _apart(rows: Sequence[Mapping[str, object]]) -> list[NodeStep]:
    return [_step(row, _number(row, "rank_cpu_s")) for row in rows]


def _step(row: Mapping[str, object], processor_seconds: float) -> NodeStep:
    megabytes = _number(row, "busiest_veth_mb")
    return NodeStep(int(str(row["nodes"])), _number(row, "compute_s"), processor_seconds, megabytes)


def _number(row: Mapping[str, object], name: str) -> float:
    return float(str(row[name]))


def _here(rows: Sequence[Mapping[str, object]]) -> str:
    """The dock's lines at the most measured nodes and at the paper's."""
    dock = [row for row in rows if row["variant"] == "dock"]
    shown = [row for row in dock if row["kind"] == "measured"][-1:]
    shown += [row for row in dock if row["kind"] != "measured" and row["nodes"] == PAPER_NODES]
    return "; ".join(f"{_number(row, 'linearity'):.3f} at {row['nodes']} ({row['kind']})" for row in shown)
