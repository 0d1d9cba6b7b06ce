"""Settings of every test: the marks themselves are registered in pyproject.toml."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Set before torch is imported: many small ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when torch is imported, also by the process that ranks are forked from.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

# A busy machine may take its time for an example; what hangs is found by other means.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

SHARED_MEMORY = Path("/dev/shm")


def named_memory() -> set[str]:
    """The files of shared memory that have a name, and so could outlive their processes."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def children_of(pid: int) -> set[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return {int(child) for child in listed.read_text().split()}
    except OSError:
        return set()


def running_below() -> set[int]:
    """Processes that tests started and that still run; with them would go whatever ports they hold."""
    found = set()
    for child in children_of(os.getpid()):
        # Python keeps two helpers: one that tracks resources, and one that ranks are forked from.
        found |= children_of(child) if _is_helper(child) else {child}
    return found


def _is_helper(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"resource_tracker" in command or b"multiprocessing.forkserver" in command


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """After a test, kills included, no named shared memory and no process of it is left."""
    memory, processes = named_memory(), running_below()
    yield
    left = named_memory() - memory
    assert not left, f"shared memory is left behind: {sorted(left)}"
    deadline = time.monotonic() + 5
    while running := running_below() - processes:
        # A process that was killed is gone once its parent has taken notice.
        assert time.monotonic() < deadline, f"processes are left behind: {sorted(running)}"
        time.sleep(0.01)
