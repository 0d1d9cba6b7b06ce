"""What the ledger counts beside what the device's allocator counts, over one step of a rank."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.resources.device import Device
from spmdrl.verbs.doctor.stage_run import StageRun
from tests.bench.memory.memory_ranks import StepOfOneRank, WatchedStep

_STEPS = {
    "full": WatchedStep(num_layers=48, num_rows=64, length=256, swap=True, kv_cache_gib=2.0),
    "small": WatchedStep(num_layers=1, num_rows=4, length=16, swap=True, kv_cache_gib=0.0625),
}
"""340 and 13 million parameters"""
_LARGEST_SHARE = 0.01
_LARGEST_PEAK = 1.1
# cuBLAS keeps 32 MiB for each stream that multiplies on Hopper: the update's two, and that of the graphs.
_LARGEST_WORKSPACES = 4 * 32 << 20
_GIB = 1 << 30


def check_ledger(run: StageRun) -> None:
    """Compare both at the end of each phase, and find nothing of the training state while generating. Collective.

    What libraries keep from the first step on, whatever the phase, is a figure of its own.
    """
    differences = {}
    phases = list(_phases(run))
    workspaces = max(0, min(allocated - counted for _, allocated, counted, _ in phases))
    run.figures["workspaces_gib"] = workspaces / _GIB
    run.require(
        workspaces <= _LARGEST_WORKSPACES,
        f"the allocator holds {workspaces} bytes in all phases beyond the ledger, where libraries may keep "
        f"{_LARGEST_WORKSPACES}",
    )
    for phase, allocated, counted, _ in phases:
        counted += workspaces
        differences[phase] = abs(allocated - counted) / counted
        run.figures[f"{phase}_gib"] = allocated / _GIB
        run.require(
            differences[phase] <= _LARGEST_SHARE,
            f"after the {phase} the allocator holds {allocated} bytes, but the ledger {counted}",
        )
    run.figures["largest_difference"] = max(differences.values())


def check_switch_peak(run: StageRun) -> None:
    """Compare the allocator's peak during the switch with what is held before and after it. Collective."""
    held = {phase: (allocated, peak) for phase, allocated, _, peak in _phases(run)}
    larger = max(held["update"][0], held["switch"][0])
    peak, bucket = held["switch"][1], ReshardConfig().bucket_bytes
    run.figures["larger_state_gib"], run.figures["peak_gib"] = larger / _GIB, peak / _GIB
    run.figures["peak_of_larger_state"] = peak / larger
    run.figures["sum_of_states_gib"] = (held["update"][0] + held["switch"][0]) / _GIB
    run.require(
        peak <= _LARGEST_PEAK * (larger + bucket),
        f"a switch holds {peak} bytes at its peak, but the larger state is {larger} and a bucket {bucket}",
    )


def _phases(run: StageRun) -> Iterator[tuple[str, int, int, int]]:
    """Run a step; yields each phase with bytes allocated, bytes in the ledger and the allocator's peak. Collective."""
    device = run.device
    idle = _requested_bytes(device)
    step = StepOfOneRank(run.world, _STEPS[run.scale], run.folder)
    # The first step allocates what later ones keep.
    for work in (step.update, step.flow.to_generation, step.generate, step.come_back):
        work()
    phases = {
        "update": step.update,
        "switch": step.flow.to_generation,
        "generation": step.generate,
        "return": step.come_back,
    }
    for phase, work in phases.items():
        device.synchronize()
        device.take_peak_bytes()
        work()
        device.synchronize()
        counted = sum(step.ledger.snapshot(phase).device.values())
        yield phase, _requested_bytes(device) - idle, counted, device.take_peak_bytes() - idle
    step.flow.close()


def _requested_bytes(device: Device) -> int:
    """Bytes of all tensors, without what fills the allocator's blocks, where it tells them apart."""
    return device.module.memory_stats().get("requested_bytes.all.current") or device.module.memory_allocated()
