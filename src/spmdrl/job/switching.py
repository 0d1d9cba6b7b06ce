"""The resharding flow as the loop calls it: timed, counted, and with the memory ledger written at each switch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spmdrl.dataflow.resharding.flow import ReshardingFlow, ReshardStats
from spmdrl.job.run import Run
from spmdrl.resources.memory import MemoryLedger, resident_bytes


class Switching:
    """Switches the actor between its update and its generation state. Its verbs are collective over all ranks."""

    def __init__(self, flow: ReshardingFlow, ledger: MemoryLedger, run: Run):
        self._flow = flow
        self._ledger = ledger
        self._run = run

    def to_generation(self, step: int) -> None:
        """Move the slices that generation lacks, and free the update state."""
        with self._run.timeline.stage("resharding", step):
            stats = self._flow.to_generation()
        self._count(stats)
        self.note_memory(step, "to_generation")

    def start_return(self, step: int) -> None:
        """Put generation to sleep; the update state comes back while the next stages run."""
        with self._run.timeline.stage("resharding", step):
            stats = self._flow.start_return()
        self._count(stats)
        self.note_memory(step, "start_return")

    def to_update(self, step: int) -> None:
        """Wait until the update state is back."""
        with self._run.timeline.stage("resharding", step):
            stats = self._flow.to_update()
        self._count(stats)
        self._note_return(step, stats)
        self.note_memory(step, "to_update")

    @contextmanager
    def reference_present(self) -> Iterator[None]:
        """The reference weights are on the device inside this block."""
        self._flow.bring_reference()
        try:
            yield
        finally:
            self._flow.release_reference()

    def note_memory(self, step: int, stage: str) -> None:
        """Write the ledger at a boundary, and record what the whole process holds."""
        self._flow.account()
        self._run.write_memory(step, stage, self._ledger)
        device, recorder = self._run.world.device, self._run.recorder
        memory = device.memory_bytes()
        if memory is None:
            recorder.maximum("mem/resident_gib", resident_bytes() / 2**30)
        else:
            recorder.maximum(f"mem/{stage}_peak_gib", device.take_peak_bytes() / 2**30)
            recorder.maximum("mem/total_gib", memory[1] / 2**30)

    def _note_return(self, step: int, stats: ReshardStats) -> None:
        """Put the copy back to the device on the timeline, beside the stages that ran meanwhile."""
        copied = stats.returned
        if copied is not None:
            self._run.timeline.background("return", step, start=copied.start, end=copied.end)
            self._run.recorder.mean("reshard/return_hidden_share", stats.hidden_share, copied.end - copied.start)

    def _count(self, stats: ReshardStats) -> None:
        self._run.recorder.total("reshard/bytes", stats.received_bytes)
        self._run.recorder.total("reshard/swapped_bytes", stats.swapped_bytes)
