"""A rank of the samples bench, run by a launcher: the first one produces all rows, the second one consumes them.

They run a step as a training run does, state by state, through the product's dock, with states that only one of them
works in. Their turns don't overlap, so that each has the machine to itself.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from spmdrl.bench.samples.sample_driver import Measured, Settings, check_came_once, timed
from spmdrl.bench.samples.sample_rows import COLUMNS, PROMPT, RESPONSE_COLUMNS, ROW_NUMBER, SCALARS, KeptMemory, Rows
from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.balancing.sharing import RowGroups
from spmdrl.dataflow.samples.control.controller import Controller
from spmdrl.dataflow.samples.control.row_lives import RowLives
from spmdrl.dataflow.samples.control.row_news import RowMetadata, announced_lengths
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import columns_mask, needs_by_state, rule_of
from spmdrl.dataflow.samples.transport.transport import DockConfig
from spmdrl.dataflow.samples.volume import Link
from spmdrl.resources.collectives import barrier, gather_bytes
from spmdrl.resources.memory import resident_bytes
from spmdrl.resources.mesh import Axis
from spmdrl.resources.world import World, open_world
from spmdrl.types import Batch, WorkerState

_TIMEOUT_SECONDS = 60.0
_STATES = (WorkerState.GENERATION, WorkerState.REWARD, WorkerState.REFERENCE, WorkerState.OLD_LOGPROBS)


@dataclass
class MeasuredDock(Measured):
    """What the dock took; `get_seconds` are those of taking views."""

    copy_seconds: list[float] = field(default_factory=list)
    """of copying all that was taken into the consumer's own memory"""
    commit_seconds: list[float] = field(default_factory=list)
    """of the collectives at the ends of states, on the slower rank"""
    get_bytes_by_link: dict[str, int] = field(default_factory=dict)


@dataclass
class _Step:
    """What one rank measured in one step, in seconds."""

    put: float = 0.0
    get: float = 0.0
    copy: float = 0.0
    commit: float = 0.0
    requests: list[float] = field(default_factory=list)
    row_numbers: list[int] = field(default_factory=list)
    num_bytes: int = 0


class BatchedRows:
    """The rows as batches of the dock."""

    def __init__(self, rows: Rows):
        self.group_size = rows.group_size
        self.num_rows = rows.num_rows
        self._all = Batch(torch.arange(rows.num_rows))
        offsets = torch.from_numpy(rows.offsets)
        for name in RESPONSE_COLUMNS:
            self._all.put_ragged(name, torch.from_numpy(rows.columns[name]), offsets)
        for name in SCALARS:
            self._all.put_dense(name, torch.from_numpy(rows.columns[name]))
        values = rows.columns[PROMPT].reshape(rows.num_rows, -1)[:: rows.group_size]
        self.prompts = [Prompt("", array("i", ids.tobytes()), "", None, {}, "") for ids in values]
        self._made: dict[tuple[WorkerState, int], list[Batch]] = {}

    def made_by(self, state: WorkerState, chunk: int) -> list[Batch]:
        """The state's columns of all rows, so many at a time."""
        key = state, chunk
        if key not in self._made:
            names = [name for name in COLUMNS if rule_of(name).made_by is state]
            starts = range(0, self.num_rows, chunk)
            self._made[key] = [
                self._all.select(torch.arange(start, min(start + chunk, self.num_rows)), names) for start in starts
            ]
        return self._made[key]


def groups_of_bench(world: World) -> dict[WorkerState, RowGroups]:
    """The first rank makes all columns, and the last one takes all rows for the update."""
    alone = Axis("model", 1, 0, None, (world.rank,))
    producer, consumer = RowGroups((0,), alone), RowGroups((world.size - 1,), alone)
    return dict.fromkeys(_STATES, producer) | {WorkerState.UPDATE: consumer}


class DockBench:
    """Runs steps of one shape. All of its methods are collective over all ranks."""

    def __init__(self, dock: TransferDock, world: World, settings: Settings):
        self._dock = dock
        self._world = world
        self._settings = settings
        self._kept = KeptMemory()
        self._num_steps = 0

    def measure(self, rows: Rows) -> MeasuredDock:
        """Warm up, then measure; the figures of all ranks, on every rank."""
        batches, found, settings = BatchedRows(rows), MeasuredDock(), self._settings
        before = self._dock.volume.copy()
        for number in range(settings.warm_up + settings.steps):
            is_last = number == settings.warm_up + settings.steps - 1
            own = self._step(batches, settings.requests if is_last else 0)
            steps = [_Step(**json.loads(part)) for part in gather_bytes(json.dumps(asdict(own)).encode())]
            check_came_once([n for step in steps for n in step.row_numbers], rows, sum(s.num_bytes for s in steps))
            if number >= settings.warm_up:
                found.put_seconds.append(sum(step.put for step in steps))
                found.get_seconds.append(sum(step.get for step in steps))
                found.copy_seconds.append(sum(step.copy for step in steps))
                found.commit_seconds.append(max(step.commit for step in steps))
            found.request_seconds += steps[-1].requests
        gets = self._dock.volume.since(before).get_bytes
        mine = {"resident": resident_bytes(), **{link.value: gets[link].total() for link in Link}}
        ranks = [json.loads(part) for part in gather_bytes(json.dumps(mine).encode())]
        found.resident_bytes = [rank["resident"] for rank in ranks]
        found.get_bytes_by_link = {link.value: sum(rank[link.value] for rank in ranks) for link in Link}
        return found

    def _step(self, rows: BatchedRows, num_requests: int) -> _Step:
        step, start = _Step(), time.perf_counter()
        samples = self._dock.open_batch(self._num_steps, rows.prompts, rows.group_size)
        step.put += time.perf_counter() - start if self._world.is_main else 0.0
        self._num_steps += 1
        for state in _STATES:
            self._run_state(state, samples, rows, step)
        if self._world.rank == self._world.size - 1:
            controller = controller_of_ready_rows(rows.num_rows)
            step.requests = [timed(controller.ready_rows) for _ in range(num_requests)]
        self._read_all(samples, samples.take(WorkerState.UPDATE, ()).rows.tolist(), step)
        samples.commit(WorkerState.UPDATE)
        self._dock.close_batch(samples)
        return step

    def _run_state(self, state: WorkerState, samples: Samples, rows: BatchedRows, step: _Step) -> None:
        """Put what the state makes: generation as rows finish, in chunks; others all at once."""
        if num_rows := self._take_rows(state, samples):
            made = rows.made_by(state, self._settings.chunk if state is WorkerState.GENERATION else num_rows)
            step.put += sum(timed(samples.put, state, batch) for batch in made)
        barrier()
        step.commit += timed(samples.commit, state)

    def _take_rows(self, state: WorkerState, samples: Samples) -> int:
        """Take the rows that the state works on; how many they are on this rank."""
        if state is WorkerState.GENERATION:
            return len(samples.deal_generation())
        if state is WorkerState.REWARD:
            return len(samples.take_generated(state))
        return len(samples.take(state, ()))

    def _read_all(self, samples: Samples, taken: list[int], step: _Step) -> None:
        """Read the rows that this rank took, a chunk at a time, and copy each chunk out."""
        for first in range(0, len(taken), self._settings.chunk):
            start = time.perf_counter()
            batch = samples.read(taken[first : first + self._settings.chunk], COLUMNS)
            step.get += time.perf_counter() - start
            step.copy += timed(self._copy_out, batch, len(step.row_numbers))
            step.row_numbers += batch.dense(ROW_NUMBER).tolist()
            step.num_bytes += sum(_values(batch, name).nbytes for name in COLUMNS)

    def _copy_out(self, batch: Batch, place: int) -> None:
        for name in COLUMNS:
            self._kept.copy((place, name), _values(batch, name))
            if batch.is_ragged(name):
                self._kept.copy((place, name, "offsets"), batch.offsets(name).numpy())


def controller_of_ready_rows(num_rows: int) -> Controller:
    """The update's controller in a rank that has read that all rows have all columns."""
    lives = RowLives(needs_by_state(COLUMNS), step=0, num_rows=num_rows)
    rows, columns = np.arange(num_rows), columns_mask(COLUMNS)
    lives.observe([RowMetadata(rows, 0 * rows, columns, dict.fromkeys(announced_lengths(columns), rows))])
    return lives.controller(WorkerState.UPDATE)


def open_dock(world: World) -> TransferDock:
    config = DockConfig(_TIMEOUT_SECONDS)
    return TransferDock(world, needs_by_state(COLUMNS), config, row_groups=groups_of_bench(world))


def _values(batch: Batch, name: str) -> np.ndarray:
    return (batch.values(name) if batch.is_ragged(name) else batch.dense(name)).numpy()


def main() -> None:
    """Measure the rows of all shapes in a folder, and write the figures there."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    settings = Settings.load(folder)
    with open_world("cpu", _TIMEOUT_SECONDS) as world, open_dock(world) as dock:
        bench = DockBench(dock, world, settings)
        found = {shape: asdict(bench.measure(Rows.load(folder / f"{shape}.npz"))) for shape in settings.shapes}
        if world.is_main:
            (folder / "result.json").write_text(json.dumps({"shapes": found}))


if __name__ == "__main__":
    main()
