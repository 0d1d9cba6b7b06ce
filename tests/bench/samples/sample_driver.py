"""Drives a producer and a consumer over a store of another program, for the samples bench.

Needs nothing but numpy and the modules copied with it, so that it runs in an environment of its own. Rows are given to
stores as these are made for it: an array per row and column, or one per column where all of its rows are equally long.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.bench.harness.in_turn import seconds_of
from tests.bench.harness.replies import open_replies
from tests.bench.samples.sample_rows import COLUMNS, PROMPT, RESPONSE_COLUMNS, ROW_NUMBER, KeptMemory, Rows

Columns = dict[str, Any]
TASK_FILE = "task.json"


class Store(Protocol):
    """Holds rows until their consumer gets them. Both processes open it at the address that `serve` yields."""

    packed: bool
    """whether ragged columns are put as one array too"""

    def __init__(self, address: Any): ...
    @staticmethod
    def serve() -> AbstractContextManager[Any]: ...
    def put(self, rows: Sequence[int], columns: Columns) -> None: ...
    def get(self, num_rows: int, names: Sequence[str]) -> Columns: ...
    def num_ready(self) -> int: ...
    def clear(self) -> None: ...


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
    """What is done with every store and the rows in each of the named files."""

    shapes: tuple[str, ...]
    chunk: int
    """rows of one put or get"""
    warm_up: int
    """steps that aren't counted"""
    steps: int
    requests: int

    def save(self, folder: Path) -> None:
        (folder / TASK_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> StoreTask:
        return cls(**json.loads((folder / TASK_FILE).read_text()))


def columns_of(rows: Rows, *, packed: bool) -> Columns:
    """The columns in memory of their own."""
    columns: Columns = {name: values.copy() for name, values in rows.columns.items()}
    columns[PROMPT] = columns[PROMPT].reshape(rows.num_rows, -1)
    lengths = np.diff(rows.offsets)
    for name in RESPONSE_COLUMNS:
        if (lengths == lengths[0]).all():
            columns[name] = columns[name].reshape(rows.num_rows, -1)
        elif not packed:
            columns[name] = [values.copy() for values in np.split(columns[name], rows.offsets[1:-1])]
    return columns


def measure_memcpy(rows: Rows, task: StoreTask) -> StoreFigures:
    """Copy all columns into kept memory, and from there into other kept memory, in this process with one thread."""
    chunks, memory, found = list(rows.parts(task.chunk)), KeptMemory(), StoreFigures()
    for step in range(task.warm_up + task.steps):
        start = time.perf_counter()
        stored = [_copied(chunk, memory, ("in", number)) for number, chunk in enumerate(chunks)]
        middle = time.perf_counter()
        for number, chunk in enumerate(stored):
            _copied(chunk, memory, ("out", number))
        stop = time.perf_counter()
        if step >= task.warm_up:
            found.put_seconds.append(middle - start)
            found.get_seconds.append(stop - middle)
    return found


def _copied(rows: Rows, memory: KeptMemory, place: tuple[str, int]) -> Rows:
    columns = {name: memory.copy((*place, name), values) for name, values in rows.columns.items()}
    return Rows(rows.group_size, memory.copy(place, rows.offsets), columns)


def measure(kind: type[Store], task: StoreTask, folder: Path) -> dict[str, Any]:
    """Be the producer, beside a consumer in another process."""
    spawn = multiprocessing.get_context("spawn")
    found = {}
    with kind.serve() as address:
        pipe, theirs = spawn.Pipe()
        consumer = spawn.Process(target=_consume, args=(kind, address, theirs), daemon=True)
        consumer.start()
        theirs.close()
        try:
            store = kind(address)
            for shape in task.shapes:
                rows = Rows.load(folder / f"{shape}.npz")
                found[shape] = asdict(_measure_shape(store, pipe, task, rows))
        finally:
            consumer.kill()
            consumer.join()
    return found


def _measure_shape(store: Store, consumer: Connection, task: StoreTask, rows: Rows) -> StoreFigures:
    chunks = [
        (part.columns[ROW_NUMBER].tolist(), columns_of(part, packed=store.packed)) for part in rows.parts(task.chunk)
    ]
    counts, found = [len(numbers) for numbers, _ in chunks], StoreFigures()
    for step in range(task.warm_up + task.steps):
        put_seconds = sum(seconds_of(store.put, numbers, columns) for numbers, columns in chunks)
        is_last = step == task.warm_up + task.steps - 1
        consumer.send((task.requests if is_last else 0, counts))
        answer = consumer.recv()
        check_came_once(answer.row_numbers, rows, answer.num_bytes)
        if step >= task.warm_up:
            found.put_seconds.append(put_seconds)
            found.get_seconds.append(answer.get_seconds)
        found.request_seconds += answer.request_seconds
        found.resident_bytes = [_resident_bytes(), answer.resident_bytes]
        store.clear()
    return found


def check_came_once(row_numbers: Sequence[int], rows: Rows, num_bytes: int) -> None:
    """Refuse figures of a step in which not each row came once, and whole."""
    if sorted(row_numbers) != list(range(rows.num_rows)) or num_bytes != rows.payload_bytes:
        raise RuntimeError(
            f"{len(row_numbers)} rows with {num_bytes} bytes came, {len(set(row_numbers))} different ones, but "
            f"{rows.num_rows} with {rows.payload_bytes} bytes were put"
        )


@dataclass(frozen=True)
class _Answer:
    """What the consumer reports of one step."""

    request_seconds: list[float]
    get_seconds: float
    row_numbers: list[int]
    num_bytes: int
    resident_bytes: int


def _consume(kind: type[Store], address: Any, producer: Connection) -> None:
    """Get all rows whenever the producer sends their numbers per chunk."""
    store = kind(address)
    while True:
        num_requests, counts = producer.recv()
        requests = [seconds_of(store.num_ready) for _ in range(num_requests)]
        got: list[Columns] = []
        start = time.perf_counter()
        for count in counts:
            got.append(store.get(count, COLUMNS))
        seconds = time.perf_counter() - start
        numbers = [int(number) for columns in got for number in columns[ROW_NUMBER]]
        producer.send(_Answer(requests, seconds, numbers, sum(map(_num_bytes, got)), _resident_bytes()))


def _num_bytes(values: Any) -> int:
    """Bytes of columns' values, be they arrays, tensors or lists of them."""
    if isinstance(values, Mapping):
        return sum(_num_bytes(column) for column in values.values())
    if isinstance(values, list):
        return sum(row.nbytes for row in values)
    if getattr(values, "is_nested", False):
        return sum(row.nbytes for row in values.unbind())
    return values.nbytes


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main(stores: Mapping[str, type[Store]]) -> None:
    """Measure the store that the first argument names, with the task and the rows in the folder of the second."""
    reply, (name, folder) = open_replies(), sys.argv[1:]
    try:
        reply(measure(stores[name], StoreTask.load(Path(folder)), Path(folder)))
    except ImportError as error:
        reply({"missing": f"{error} in {sys.executable}"})
