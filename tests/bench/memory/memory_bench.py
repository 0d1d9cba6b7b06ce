"""Memory of one rank over a step, with the swap of the training state and without it (as the paper's Figure 10).

A step is run twice on CPU ranks of their own: update, switch, generation, return and the next update. Resident memory
is what a rank holds beyond an idle one; the host's side of the swap is an unlinked file there, which doesn't count.
The ledger has no activations and no gradients, which end with the update. MindSpeed RL (arXiv:2507.19017).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.harness.bench_ranks import BenchRanks
from tests.bench.harness.bench_table import BenchTable
from tests.bench.memory.memory_plot import memory_svg
from tests.bench.memory.memory_ranks import Look, WatchedStep, watch_step

MIB = 1 << 20
_AWAY = ("update_weights", "optimizer")

Phases = Mapping[str, Sequence[Look]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12, help="6.9M parameters each, besides 6.3M")
    parser.add_argument("--rows", type=int, default=8, help="responses of a rank, and rows of its update")
    parser.add_argument("--length", type=int, default=32, help="tokens of a prompt, and of its response")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the curves into an SVG file")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Watch a step of each kind. Raises RuntimeError with the traceback of a rank that fails."""
    curves = {}
    for name, swap in (("swap", True), ("no swap", False)):
        step = WatchedStep(arguments.layers, arguments.rows, arguments.length, swap)
        curves[name] = BenchRanks(arguments.ranks, start_method="forkserver").call(watch_step, step)[0]
    if arguments.plot is not None:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_text(memory_svg(curves))
    ratios = _ratios(curves)
    return BenchTable(
        title=f"bench memory: rank 0 of {arguments.ranks}, {arguments.layers} layers, MiB",
        rows=[_row(phase, curves) for phase in curves["swap"]],
        notes=(
            f"during generation the swap frees {ratios['freed_resident_vs_state']:.2f} x the training state by "
            f"resident memory, {ratios['freed_ledger_vs_state']:.2f} x by ledger",
            f"its switch peaks at {ratios['switch_peak_vs_without']:.2f} x the peak of one without it",
        ),
        details={"ratios": ratios, "owners_at_end": _owners_at_end(curves)},
    )


def _row(phase: str, curves: Mapping[str, Phases]) -> dict[str, object]:
    row: dict[str, object] = {"phase": phase}
    for name, phases in curves.items():
        looks = phases[phase]
        row[f"{name}: resident at end"] = looks[-1].resident // MIB
        row[f"{name}: peak"] = max(look.resident for look in looks) // MIB
        row[f"{name}: ledger at end"] = sum(looks[-1].ledger.values()) // MIB
        row[f"{name}: ledger peak"] = max(sum(look.ledger.values()) for look in looks) // MIB
    return row


def _ratios(curves: Mapping[str, Phases]) -> dict[str, float]:
    swapped, stayed = curves["swap"], curves["no swap"]
    with_swap, without = swapped["generation"][-1], stayed["generation"][-1]
    state = sum(without.ledger[owner] for owner in _AWAY)
    peaks = [max(look.resident for look in phases["switch"]) for phases in (swapped, stayed)]
    freed = sum(without.ledger.values()) - sum(with_swap.ledger.values())
    return {
        "freed_resident_vs_state": (without.resident - with_swap.resident) / state,
        "freed_ledger_vs_state": freed / state,
        "switch_peak_vs_without": peaks[0] / peaks[1],
    }


def _owners_at_end(curves: Mapping[str, Phases]) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes by owner at the end of each phase of both runs."""
    return {
        name: {phase: {owner: size for owner, size in looks[-1].ledger.items() if size} for phase, looks in run.items()}
        for name, run in curves.items()
    }
