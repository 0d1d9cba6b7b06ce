"""Settings of every test: the marks themselves are registered in pyproject.toml."""

from __future__ import annotations

import fcntl
import gc
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import torch

    from spmdrl.resources.world import World

# Set before torch is imported: many small ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when torch is imported, also by the process that ranks are forked from.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

# A busy machine may take its time for an example; what hangs is found by other means.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

SHARED_MEMORY = Path("/dev/shm")
FIXTURES_ON_DEVICE = pytest.StashKey[set[str]]()
"""The names of those that used the device, of the module, package or session that they were made for."""


def named_memory() -> set[str]:
    """The files of shared memory that have a name, and so could outlive their processes."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def memory_of_others() -> set[str]:
    """The named shared memory that processes other than this one map."""
    inodes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines() if maps.parent.name != str(os.getpid()) else []
        except OSError:  # The process ended, or isn't ours.
            continue
        inodes |= {int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/" in line}
    # By inode: a semaphore gets its name after it is mapped under another one.
    return {entry.name for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes}


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default=os.environ.get("SPMDRL_TEST_DEVICE", "cpu"),
        help="where tests run what can run on a device: cpu, cuda, npu, or sim, a simulated accelerator",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have this process and those that tests start use the device of `--device`."""
    kind = config.getoption("--device")
    os.environ["SPMDRL_TEST_DEVICE"] = kind
    if kind == "cpu":
        return
    from tests.support.chosen_device import install_chosen, why_missing

    try:
        if why_missing() is None:
            install_chosen()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import and collect without looking for garbage among objects that all stay, nor later on."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse marks that launch/test.sh would miss. Elsewhere than on a CPU, skip what holds only there, or all tests
    where a simulated device can't be made.
    """
    for mark in ("slow", "on_device"):
        for path in {item.path for item in items if item.get_closest_marker(mark)}:
            if f"mark.{mark}" not in path.read_text():
                raise pytest.UsageError(f"{path} gets marks without `mark.{mark}` in its text, as launch/test.sh seeks")
    if config.getoption("--device") == "cpu":
        return
    from tests.support.chosen_device import why_missing

    missing = why_missing()
    for item in items:
        if missing is not None:
            item.add_marker(pytest.mark.skip(reason=missing))
        elif (mark := item.get_closest_marker("cpu_only")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"on a CPU only: {mark.kwargs['reason']}"))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> Generator[None, object, object]:
    """Note whether the fixture used the device, as its tests do then."""
    from tests.support.chosen_device import Uses

    uses = Uses.count
    result = yield
    if Uses.count > uses and request.fixturename is not None:
        request.node.stash.setdefault(FIXTURES_ON_DEVICE, set()).add(request.fixturename)
    return result


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out slow tests once CI's time for them is over."""
    until = os.environ.get("SLOW_TESTS_UNTIL")
    if until and time.time() > float(until) and item.get_closest_marker("slow"):
        pytest.skip("left out: the time for slow tests was over (SLOW_TESTS_UNTIL)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Note whether the test used the device, and fail it where the device noticed a race."""
    from tests.support.chosen_device import Uses, chosen_kind, races_found

    uses, num_races = Uses.count, len(races_found())
    result = yield
    fixtures = set().union(*(node.stash.get(FIXTURES_ON_DEVICE, set()) for node in item.listchain()))
    if Uses.count > uses or fixtures & set(getattr(item, "fixturenames", ())):
        item.user_properties.append(("device", chosen_kind()))
    races = races_found()[num_races:]
    assert not races, "\n".join(races)
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Count the tests that ran on the device: a run in which none did proves nothing about it."""
    kind = config.getoption("--device")
    if kind == "cpu":
        return
    passed = terminalreporter.stats.get("passed", [])
    on_device = sum(("device", kind) in report.user_properties for report in passed)
    terminalreporter.write_line(f"on {kind}: {on_device} of the {len(passed)} tests that passed")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the process that ranks are forked from import what it needs, while the first tests run without it."""
    if any(item.get_closest_marker("ranks") for item in session.items):
        from tests.support.ranks import start_server

        start_server()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of `--device`, for tensors, models and engines of a test's own process."""
    from tests.support.chosen_device import chosen_device

    return chosen_device()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A world of one rank, this process, on the device of `--device`."""
    from spmdrl.resources.world import open_world
    from tests.support.chosen_device import chosen_device

    with open_world(chosen_device().type) as opened:
        yield opened


@pytest.fixture(autouse=True)
def room(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Other tests may run meanwhile, in other workers of pytest-xdist, unless this one is marked `alone`."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent
    with open(folder / "door.lock", "w") as door, open(folder / "room.lock", "w") as inside:
        # A test that waits for an empty room holds the door, so that no other enters first.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(inside, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_behind(room: None) -> Iterator[None]:
    """After a test, kills included, no named shared memory and no process of it is left."""
    memory, processes = named_memory(), running_below()
    yield
    deadline = time.monotonic() + 5
    while running := running_below() - processes:
        # A process that was killed is gone once its parent has taken notice.
        assert time.monotonic() < deadline, f"processes are left behind: {sorted(running)}"
        time.sleep(0.01)
    while (left := named_memory() - memory) and (left := left - memory_of_others()):
        # What another worker has just made has a name before it is mapped.
        assert time.monotonic() < deadline, f"shared memory is left behind: {sorted(left)}"
        time.sleep(0.01)
