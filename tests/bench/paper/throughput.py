"""The paper's Figure 11: tokens per second and NPU of DeepSeek-R1-671B on 384 NPUs, by the plan.

The run is planned as configs/paper reads it; then one assumption at a time is another. Rates are of data sheets.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace

from spmdrl.config.config import load_config
from spmdrl.plan.device_profile import CROSS_NODE, NODE, DeviceProfile, LinkRate
from spmdrl.plan.run_plan import Plan, PlannedRun, plan_run
from spmdrl.plan.slot_times import Moved, StepTimes, step_times
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.verbs.planned_run import planned_run
from tests.bench.harness.bench_table import BenchTable
from tests.support.jobs import ROOT

PAPER = "200 to 250"
_NUM_RANKS, _RANKS_PER_NODE, _DEVICE = 384, 16, "910b"
_NAME = "deepseek_r1"
Change = Callable[[DeviceProfile], DeviceProfile]


def figure11(arguments: argparse.Namespace) -> BenchTable:
    """Plan the run, and plan its times anew under other assumptions. Takes minutes."""
    del arguments
    run = _run()
    plan = plan_run(run)
    base = _times(run, plan, run.device)
    rows = [_row(name, _times(run, plan, change(run.device)), base) for name, change in _changes()]
    most = max(rows, key=lambda row: float(str(row["times"])))
    return BenchTable(
        title="Figure 11: planned throughput of DeepSeek-R1-671B on 384 NPUs",
        rows=[_row("as configs/paper has it", base, base), *rows],
        notes=(
            f"The paper's curve lies at {PAPER} tokens per second and NPU (Eq. 5). Prompts of 1K and responses of 2K "
            "tokens, all as long as they may be.",
            f"Most depends on: {most['assumption']} ({most['times']:.2f} times the rate).",
        ),
        details={"here": f"{base.tokens_per_second_per_device:.0f} by the plan", "most": most["assumption"]},
    )


def _run() -> PlannedRun:
    folder = ROOT / "configs/paper"
    loaded = load_config([folder / f"{_NAME}_{_NUM_RANKS}.yaml"], [], "train")
    launch = LaunchEnvironment(0, _NUM_RANKS, 0, _RANKS_PER_NODE)
    return planned_run(loaded, launch, _DEVICE, None, None, folder / "sizes" / _NAME)


def _times(run: PlannedRun, plan: Plan, device: DeviceProfile) -> StepTimes:
    moved = Moved(plan.flow, plan.switch, plan.is_swapped)
    times = step_times(run.checked, plan.ranks, moved, device, run.launch, run.lengths)
    assert times is not None, "the device has rates"
    return times


def _changes() -> Iterator[tuple[str, Change]]:
    """Yield assumptions about the device, each with what it changes."""

    def rates(**factors: float) -> Change:
        def change(device: DeviceProfile) -> DeviceProfile:
            assert device.rates is not None
            faster = {
                kind: replace(rate, **{name: getattr(rate, name) * factor for name, factor in factors.items()})
                for kind, rate in device.rates.items()
            }
            return replace(device, rates=faster)

        return change

    def links(name: str, rate: float, latency: float = 1.0) -> Change:
        def change(device: DeviceProfile) -> DeviceProfile:
            assert device.links is not None
            link = device.links[name]
            faster = LinkRate(link.gib_per_second * rate, link.message_us * latency)
            return replace(device, links={**device.links, name: faster})

        return change

    yield "products at twice the rate", rates(tflops=2.0)
    yield "memory at twice the rate", rates(gib_per_second=2.0)
    yield "launches in no time, as graphs have them", rates(launch_us=0.0)
    yield "links between nodes at twice the rate", links(CROSS_NODE, 2.0)
    yield "messages between nodes without latency", links(CROSS_NODE, 1.0, 0.0)
    yield "links within nodes at twice the rate", links(NODE, 2.0)
    yield "messages not beside products", lambda device: replace(device, overlaps=False)


def _row(name: str, times: StepTimes, base: StepTimes) -> dict[str, object]:
    rate = times.tokens_per_second_per_device
    stages = {state: times.stages.get(state, 0.0) for state in ("generation", "reference", "update")}
    return {
        "assumption": name, "tokens/s/device": rate, "times": rate / base.tokens_per_second_per_device,
        "step_s": times.step_seconds, **{f"{state}_s": seconds for state, seconds in stages.items()},
    }  # fmt: skip
