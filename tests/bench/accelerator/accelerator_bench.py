"""The stages of `spmdrl doctor`, and beside them each kernel, the device's memory and its speed.

What launch/accelerator_check.sh runs: stages in processes of their own, whose verdicts are kept, so that what passed
isn't run again. Figures below their goals are shown with a remedy, but fail nothing. docs/accelerators.md explains
each stage.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

from spmdrl.verbs.doctor import doctor
from spmdrl.verbs.doctor.doctor import Stage
from spmdrl.verbs.doctor.stage_run import CheckReport, StageVerdict

_HERE = "tests.bench.accelerator"
STAGES = (
    *doctor.STAGES,
    Stage(
        "kernels", f"{_HERE}.kernel_parity:check_kernels", "each operation of the kernel table computes the plain one"
    ),
    Stage("packed_attention", f"{_HERE}.attention_parity:check_packed_attention", "rows attend to themselves alone"),
    Stage(
        "ring_attention", f"{_HERE}.attention_parity:check_ring_attention", "attention in parts is that of the whole"
    ),
    Stage(
        "graphs",
        f"{_HERE}.graph_parity:check_graphs",
        "decoding steps as graphs draw what plain ones draw",
        only_on_cuda="graphs are captured on CUDA only",
    ),
    Stage(
        "swap",
        f"{_HERE}.swap_speed:check_swap",
        "training state leaves and comes back whole, as fast as pinned copies",
        not_on_cpu="a CPU's training state goes to a file",
    ),
    Stage(
        "ledger",
        f"{_HERE}.memory_accounts:check_ledger",
        "the ledger holds what the allocator holds",
        not_on_cpu="a CPU has no allocator that counts; `python -m tests.bench memory` watches resident memory",
    ),
    Stage(
        "switch_peak",
        f"{_HERE}.memory_accounts:check_switch_peak",
        "a switch needs about the larger of the two states",
        not_on_cpu="a CPU has no allocator that counts; `python -m tests.bench memory` watches resident memory",
    ),
    Stage("decode", f"{_HERE}.decoding:check_decode_speed", "decoding is bound by reading weights and cache"),
    Stage("update", f"{_HERE}.update_speed:check_update_speed", "an update is bound by its matrix products"),
    Stage("step", f"{_HERE}.step_parts:check_step", "where the time of a step goes", starts_jobs=True),
)


@dataclass(frozen=True)
class Goal:
    """The least that a figure should be at full sizes; small ones are bound by other things than the device."""

    least: float
    remedy: str


_PINNED = Goal(
    0.9,
    "compare with pinned_to_host_gb_per_second of the stage device; ranks that share a bus slow each other down, so "
    "bind each to the CPU socket beside its device, and see with --nproc 1 whether it is that",
)
_READING = Goal(
    0.6,
    "a small batch or model is bound by the host, which starts each kernel: see the stage graphs; "
    "a large one by attention over the cache",
)
GOALS: Mapping[str, Goal] = {
    "to_host_share_of_pinned": _PINNED,
    "from_host_share_of_pinned": _PINNED,
    "0.5B_batch_64_share_of_limit": _READING,
    "7B_batch_64_share_of_limit": _READING,
    "share_of_large_product": Goal(
        0.45,
        "raise train.max_tokens_per_microbatch where memory allows; with several ranks, compare with --nproc 1, as the "
        "difference is communication; see a trace (docs/metrics.md) for kernels that aren't matrix products",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    doctor.add_arguments(parser, STAGES)


def run(arguments: argparse.Namespace) -> CheckReport:
    report = doctor.run(arguments, STAGES)
    if doctor.scale_on(report.device["kind"], small=arguments.small) == "small":
        return report
    return replace(report, stages=[beside_goals(verdict) for verdict in report.stages])


def beside_goals(verdict: StageVerdict) -> StageVerdict:
    """The verdict of a stage at full sizes, with the figures that are below their goals as its reason."""
    below = [
        f"below goal: {name} is {verdict.figures[name]:.2f}, not {goal.least:g} or more: {goal.remedy}"
        for name, goal in GOALS.items()
        if verdict.figures.get(name, goal.least) < goal.least
    ]
    return replace(verdict, reason="; ".join(filter(None, (verdict.reason, *below))))
