"""Settings of every test: the marks themselves are registered in pyproject.toml."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before torch is imported: many small ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED_MEMORY = Path("/dev/shm")


def named_memory() -> set[str]:
    """The files of shared memory that have a name, and so could outlive their processes."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def children() -> set[int]:
    """This process's children that still run; with them would go whatever ports they hold."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in listed.read_text().split()} if listed.exists() else set()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that starts ranks, kills included, no named shared memory and no process of it is left."""
    if request.node.get_closest_marker("ranks") is None:
        yield
        return
    memory, processes = named_memory(), children()
    yield
    left = named_memory() - memory
    assert not left, f"shared memory is left behind: {sorted(left)}"
    running = {pid for pid in children() - processes if not _is_resource_tracker(pid)}
    assert not running, f"processes are left behind: {sorted(running)}"


def _is_resource_tracker(pid: int) -> bool:
    """Python starts one helper for all processes that it spawns, and keeps it."""
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and b"resource_tracker" in command.read_bytes()
