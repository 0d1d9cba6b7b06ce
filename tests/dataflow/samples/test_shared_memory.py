from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from spmdrl.dataflow.samples.store.shared_memory import (
    Place,
    Pool,
    PoolHost,
    SharedFile,
    host_pool,
    memory_file,
    temporary_file,
)

MIB = 1 << 20
CAPACITY = 64 * MIB


@contextmanager
def child(function: Callable[..., None], *args):
    """A fresh process that runs `function(pipe, *args)`; it is killed at the end if it still runs."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=function, args=(other, *args), daemon=True)
    process.start()
    other.close()
    try:
        yield process, pipe
    finally:
        process.kill()
        process.join()
        pipe.close()


def receive(pipe: Connection):
    assert pipe.poll(60), "the other process sends nothing"
    return pipe.recv()


def pools(num_writers: int, create: Callable[[], SharedFile] | None = None) -> list[Pool]:
    host = host_pool(num_writers, CAPACITY, create=create)
    opened = [Pool(host.address, writer) for writer in range(num_writers)]
    host.forget_names()
    return opened


def store(pool: Pool, values: list[float]) -> Place:
    place = pool.allocate(8 * len(values))
    view(pool, place).view(np.float64)[:] = values
    return place


def view(pool: Pool, place: Place) -> np.ndarray:
    """The bytes at a place of any writer."""
    pool.check(np.array([place]))
    return pool.array(place.writer, np.dtype(np.uint8))[place.start : place.start + place.num_bytes]


def rewards(pool: Pool, place: Place) -> list[float]:
    return view(pool, place).view(np.float64).tolist()


def paths(host: PoolHost) -> list[str]:
    return [path for path, _ in json.loads(host.address)["files"]]


@pytest.mark.parametrize("create", [memory_file, temporary_file])
def test_every_writer_reads_what_any_writer_stored(create):
    opened = pools(3, create)
    places = [store(pool, [float(pool.writer), 0.5]) for pool in opened]
    assert [place.writer for place in places] == [0, 1, 2]
    for pool in opened:
        assert [rewards(pool, place) for place in places] == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]


@pytest.mark.parametrize("create", [memory_file, temporary_file])
def test_once_everybody_opened_the_pool_nobody_else_can(create):
    host = host_pool(1, CAPACITY, create=create)
    pool = Pool(host.address, 0)
    assert all(os.path.exists(path) for path in paths(host))
    host.forget_names()
    assert not any(os.path.exists(path) for path in paths(host))
    with pytest.raises(OSError, match="must run as one user"):
        Pool(host.address, 0)
    assert rewards(pool, store(pool, [1.0])) == [1.0]


def test_a_host_that_gives_up_leaves_no_temporary_file():
    host = host_pool(2, CAPACITY, create=temporary_file)
    left = paths(host)
    del host
    gc.collect()
    assert not any(os.path.exists(path) for path in left)


def test_another_file_under_the_same_path_is_refused():
    host = host_pool(1, CAPACITY)
    address = json.loads(host.address)
    address["files"][0][1] += 1
    with pytest.raises(OSError, match="isn't the sample memory"):
        Pool(json.dumps(address).encode(), 0)


def test_the_default_capacity_is_the_machine_and_costs_nothing():
    host = host_pool(1)
    pool = Pool(host.address, 0)
    assert pool.allocate(1 << 30).num_bytes == 1 << 30
    assert pool.held_bytes == 0


@pytest.mark.parametrize(
    "place",
    [
        Place(1, 0, 64),
        Place(-1, 0, 64),
        Place(0, -64, 64),
        Place(0, 0, CAPACITY + 1),
        Place(0, 2**63, 64),
        Place(0, 0, 0),
        Place(0, 0, -64),
    ],
)
def test_places_outside_of_the_pool_are_refused(place):
    (pool,) = pools(1)
    with pytest.raises(ValueError, match="lies outside of the pool"):
        view(pool, place)


def test_frames_never_share_a_cache_line_and_a_full_pool_says_what_is_taken():
    (pool,) = pools(1)
    assert [pool.allocate(size).start for size in (1, 64, 65, 64)] == [0, 64, 128, 256]
    with pytest.raises(MemoryError, match=f"{CAPACITY} bytes of samples find no room: 320 of {CAPACITY} bytes are"):
        pool.allocate(CAPACITY)
    pool.clear()
    assert pool.allocate(CAPACITY).start == 0
    with pytest.raises(MemoryError, match="lower the rows of a step"):
        pool.allocate(1)


@pytest.mark.parametrize("create", [memory_file, temporary_file])
def test_pages_that_only_an_earlier_batch_needed_return_to_the_system(create):
    (pool,) = pools(1, create)

    def run_batch(num_bytes: int) -> int:
        view(pool, pool.allocate(num_bytes)).fill(1)
        pool.clear()
        return pool.held_bytes

    def is_about(held: int, expected: int) -> bool:
        return expected <= held <= expected + MIB // 8

    assert is_about(run_batch(32 * MIB), 32 * MIB)
    assert is_about(run_batch(8 * MIB), 8 * MIB), "pages above what the last batch used go back"
    assert is_about(run_batch(4 * MIB), 4 * MIB)
    kept = pool.allocate(2 * MIB)
    assert view(pool, kept).sum() == 2 * MIB, "pages that are reused are kept"
    pool.clear()
    assert is_about(pool.held_bytes, 2 * MIB)


def test_views_outlive_a_closed_pool():
    (pool,) = pools(1)
    stored = view(pool, store(pool, [2.0]))
    pool.close()
    pool.close()
    assert stored.view(np.float64).tolist() == [2.0]


def join_pool(pipe: Connection, address: bytes) -> None:
    """Writer 1: doubles what writer 0 stored, then waits."""
    pool = Pool(address, 1)
    pipe.send("opened")
    values = rewards(pool, Place(*pipe.recv()))
    pipe.send(tuple(store(pool, [2 * value for value in values])))
    pipe.recv()


@pytest.mark.ranks
def test_frames_go_both_ways_between_two_processes():
    host = host_pool(2, CAPACITY)
    pool = Pool(host.address, 0)
    with child(join_pool, host.address) as (_, pipe):
        assert receive(pipe) == "opened"
        host.forget_names()
        pipe.send(tuple(store(pool, [1.0, 2.5])))
        answer = Place(*receive(pipe))
        assert answer.writer == 1 and rewards(pool, answer) == [2.0, 5.0]
        pipe.send("done")


def make_pool(pipe: Connection, create: Callable[[], SharedFile]) -> None:
    """Host and writer 0: stores, forgets the names on request, then waits."""
    host = host_pool(2, CAPACITY, create=create)
    pool = Pool(host.address, 0)
    pipe.send(host.address)
    pipe.recv()
    host.forget_names()
    pipe.send(tuple(store(pool, [1.0])))
    pipe.recv()


@pytest.mark.ranks
@pytest.mark.alone
@pytest.mark.parametrize("create", [memory_file, pytest.param(temporary_file, marks=pytest.mark.slow)])
def test_killed_processes_leave_no_file_and_no_memory(create):
    before = leftovers()
    with child(make_pool, create) as (host, host_pipe):
        address = receive(host_pipe)
        with child(join_pool, address) as (writer, writer_pipe):
            assert receive(writer_pipe) == "opened"
            host_pipe.send("forget")
            writer_pipe.send(receive(host_pipe))
            receive(writer_pipe)
            inodes = {inode for _, inode in json.loads(address)["files"]}
            assert mapped_inodes() & inodes
            for process in (host, writer):
                os.kill(process.pid, signal.SIGKILL)
                process.join()
    assert not mapped_inodes() & inodes
    assert leftovers() == before


@pytest.mark.ranks
@pytest.mark.alone
def test_a_host_killed_before_others_open_leaves_no_file():
    before = leftovers()
    with child(make_pool, memory_file) as (host, pipe):
        address = receive(pipe)
        os.kill(host.pid, signal.SIGKILL)
        host.join()
    with pytest.raises(OSError, match="can't open the node's sample memory"):
        Pool(address, 1)
    assert leftovers() == before


def leftovers() -> set[str]:
    """Files of pools that have a name."""
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    return {str(path) for folder in folders if folder.is_dir() for path in folder.glob("spmdrl-samples*")}


def mapped_inodes() -> set[int]:
    """Inodes of the pools' files that any process maps."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # The process ended, or isn't ours.
            continue
        found |= {int(line.split()[4]) for line in lines if "spmdrl-samples" in line}
    return found
