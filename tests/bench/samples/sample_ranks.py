"""A rank of the samples bench: the first one produces all rows, the second one consumes them.

They run a step as a training run does, state by state, through the product's dock, with states that only one of them
works in. Their turns don't overlap, so that each has the machine to itself.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.balancing.dealing import RowGroups
from spmdrl.dataflow.samples.catalogue import RowMetadata, announced_lengths
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.row_lives import Controller, RowLives
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import columns_mask, needs_by_state, rule_of
from spmdrl.dataflow.samples.volume import Link
from spmdrl.nouns.batch import Batch, WorkerState
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.resources.collectives import barrier
from spmdrl.resources.memory import resident_bytes
from spmdrl.resources.mesh import Axis
from spmdrl.resources.world import World
from tests.bench.harness.in_turn import seconds_of
from tests.bench.samples.sample_rows import COLUMNS, PROMPT, RESPONSE_COLUMNS, ROW_NUMBER, SCALARS, KeptMemory, Rows

_TIMEOUT_SECONDS = 60.0
_STATES = (WorkerState.GENERATION, WorkerState.REWARD, WorkerState.REFERENCE, WorkerState.OLD_LOGPROBS)


@dataclass
class StoreFigures:
    """Seconds and memory of one store with rows of one shape, by counted step; each step puts and gets all rows."""

    put_seconds: list[float] = field(default_factory=list)
    get_seconds: list[float] = field(default_factory=list)
    request_seconds: list[float] = field(default_factory=list)
    """of requests for the number of rows that are ready"""
    resident_bytes: list[int] = field(default_factory=list)
    """of producer and consumer, shared memory included"""


@dataclass(frozen=True)
class StoreTask:
    """What is done with the rows of each shape."""

    chunk: int
    """rows of one put or get"""
    warm_up: int
    """steps that aren't counted"""
    steps: int
    requests: int


@dataclass
class DockStep:
    """What one rank measured in one step, in seconds."""

    put: float = 0.0
    get: float = 0.0
    """of taking views"""
    copy: float = 0.0
    """of copying all that was taken into the rank's own memory"""
    commit: float = 0.0
    """of the collectives at the ends of states"""
    requests: list[float] = field(default_factory=list)
    row_numbers: list[int] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(frozen=True)
class DockShare:
    """What one rank measured with rows of one shape."""

    steps: list[DockStep]
    resident_bytes: int
    get_bytes: dict[str, int]
    """by link"""


@dataclass
class DockFigures:
    """What both ranks measured with rows of one shape."""

    store: StoreFigures
    copy_seconds: list[float]
    """of copying what was taken into the consumer's own memory"""
    commit_seconds: list[float]
    """of the collectives at the ends of states, on the slower rank"""
    get_bytes_by_link: dict[str, int]

    @classmethod
    def of(cls, shares: Sequence[DockShare], rows: Rows, warm_up: int) -> DockFigures:
        """Join what the ranks measured. Raises RuntimeError if a step didn't bring every row once."""
        steps = list(zip(*(share.steps for share in shares), strict=True))
        for parts in steps:
            numbers = [number for part in parts for number in part.row_numbers]
            check_came_once(numbers, rows, sum(part.num_bytes for part in parts))
        counted = steps[warm_up:]
        links = Counter[str]()
        for share in shares:
            links.update(share.get_bytes)
        store = StoreFigures(
            put_seconds=[sum(part.put for part in parts) for parts in counted],
            get_seconds=[sum(part.get for part in parts) for parts in counted],
            request_seconds=[seconds for *_, consumer in steps for seconds in consumer.requests],
            resident_bytes=[share.resident_bytes for share in shares],
        )
        copies = [sum(part.copy for part in parts) for parts in counted]
        return cls(store, copies, [max(part.commit for part in parts) for parts in counted], dict(links))


def check_came_once(row_numbers: Sequence[int], rows: Rows, num_bytes: int) -> None:
    """Refuse figures of a step in which not each row came once, and whole."""
    if sorted(row_numbers) != list(range(rows.num_rows)) or num_bytes != rows.payload_bytes:
        raise RuntimeError(
            f"{len(row_numbers)} rows with {num_bytes} bytes came, {len(set(row_numbers))} different ones, but "
            f"{rows.num_rows} with {rows.payload_bytes} bytes were put"
        )


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

    def __init__(self, dock: TransferDock, world: World, task: StoreTask):
        self._dock = dock
        self._world = world
        self._task = task
        self._kept = KeptMemory()
        self._num_steps = 0

    def measure(self, rows: Rows) -> DockShare:
        """Warm up, then measure. Requests are timed in the last step."""
        batches, before = BatchedRows(rows), self._dock.volume.copy()
        num_steps = self._task.warm_up + self._task.steps
        num_requests = [0] * (num_steps - 1) + [self._task.requests]
        steps = [self._step(batches, number) for number in num_requests]
        gets = self._dock.volume.since(before).get_bytes
        return DockShare(steps, resident_bytes(), {link.value: gets[link].total() for link in Link})

    def _step(self, rows: BatchedRows, num_requests: int) -> DockStep:
        barrier()
        step, start = DockStep(), time.perf_counter()
        samples = self._dock.open_batch(self._num_steps, rows.prompts, rows.group_size)
        step.put += time.perf_counter() - start if self._world.is_main else 0.0
        self._num_steps += 1
        for state in _STATES:
            self._run_state(state, samples, rows, step)
        if self._world.rank == self._world.size - 1:
            controller = controller_of_ready_rows(rows.num_rows)
            step.requests = [seconds_of(controller.ready_rows) for _ in range(num_requests)]
        self._read_all(samples, samples.take(WorkerState.UPDATE, ()).rows.tolist(), step)
        samples.commit(WorkerState.UPDATE)
        self._dock.close_batch(samples)
        return step

    def _run_state(self, state: WorkerState, samples: Samples, rows: BatchedRows, step: DockStep) -> None:
        """Put what the state makes: generation as rows finish, in chunks; others all at once."""
        if num_rows := self._take_rows(state, samples):
            made = rows.made_by(state, self._task.chunk if state is WorkerState.GENERATION else num_rows)
            step.put += sum(seconds_of(samples.put, state, batch) for batch in made)
        barrier()
        step.commit += seconds_of(samples.commit, state)

    def _take_rows(self, state: WorkerState, samples: Samples) -> int:
        """Take the rows that the state works on; how many they are on this rank."""
        if state is WorkerState.GENERATION:
            return len(samples.rows.deal_generation())
        if state is WorkerState.REWARD:
            return len(samples.rows.take_generated(state))
        return len(samples.take(state, ()))

    def _read_all(self, samples: Samples, taken: list[int], step: DockStep) -> None:
        """Read the rows that this rank took, a chunk at a time, and copy each chunk out."""
        for first in range(0, len(taken), self._task.chunk):
            start = time.perf_counter()
            batch = samples.read(taken[first : first + self._task.chunk], COLUMNS)
            step.get += time.perf_counter() - start
            step.copy += seconds_of(self._copy_out, batch, len(step.row_numbers))
            step.row_numbers += batch.dense(ROW_NUMBER).tolist()
            step.num_bytes += sum(_values(batch, name).nbytes for name in COLUMNS)

    def _copy_out(self, batch: Batch, place: int) -> None:
        for name in COLUMNS:
            self._kept.copy((place, name), _values(batch, name))
            if batch.is_ragged(name):
                self._kept.copy((place, name, "offsets"), batch.offsets(name).numpy())


def controller_of_ready_rows(num_rows: int) -> Controller:
    """The update's controller in a rank that has read that all rows have all columns."""
    rows, columns = np.arange(num_rows), columns_mask(COLUMNS)
    lives = RowLives(needs_by_state(COLUMNS), 0 * rows, step=0)
    lives.observe([RowMetadata(rows, columns, dict.fromkeys(announced_lengths(columns), rows))])
    return lives.controllers[WorkerState.UPDATE]


def open_dock(world: World) -> TransferDock:
    config = DockConfig(_TIMEOUT_SECONDS)
    return TransferDock(world, needs_by_state(COLUMNS), config, row_groups=groups_of_bench(world))


def _values(batch: Batch, name: str) -> np.ndarray:
    return (batch.values(name) if batch.is_ragged(name) else batch.dense(name)).numpy()


def measure_dock(world: World, task: StoreTask, shapes: Mapping[str, Rows]) -> dict[str, DockShare]:
    """What this rank measured with the rows of each shape. Collective over all ranks."""
    with open_dock(world) as dock:
        bench = DockBench(dock, world, task)
        return {shape: bench.measure(rows) for shape, rows in shapes.items()}
