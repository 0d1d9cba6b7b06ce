"""Starts fresh ranks on this host, each of which runs one function on the tests' device, and collects the results.

Ranks are forked from one process that has imported what takes long (see preloaded.py) and done nothing else, so they
start at once.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import pytest
from torch.distributed import TCPStore

from spmdrl.runtime.workers.descent import die_with_parent
from tests.support.chosen_device import VARIABLE, Uses, chosen_kind, skip_without_devices

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]


def run_ranks(
    world_size: int,
    function: Callable,
    *args: Any,
    timeout: float = 60,
    ranks_per_node: int | None = None,
    device: str | None = None,
) -> list[Any]:
    """Call `function(world, *args)` on each rank and return the picklable results in rank order.

    `function` must be importable (a module's top level). The first rank that fails ends all of them, and its traceback
    is raised as a RuntimeError; ranks that take longer than `timeout` seconds in all are killed with a TimeoutError.
    `ranks_per_node` pretends that the ranks live on several nodes. `device`: the kind of device if it isn't the tests'.
    """
    if device is None:
        skip_without_devices(min(world_size, ranks_per_node or world_size))
        Uses.count += 1
    if (device or chosen_kind()) == "sim":
        # Small operations take it a few times as long as a CPU.
        timeout *= 4
    # The parent holds the rendezvous store itself, as torchrun's agent does, so the port is bound before ranks get it.
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    chosen = {VARIABLE: device or chosen_kind()}
    ranks = [
        _start(
            rank_environment(rank, world_size, ranks_per_node or world_size, store.port) | chosen,
            function,
            args,
        )
        for rank in range(world_size)
    ]
    grace_seconds = 0.0
    try:
        results = _collect([pipe for _, pipe in ranks], time.monotonic() + timeout)
        grace_seconds = 10.0
    finally:
        for process, pipe in ranks:
            end(process, grace_seconds)
            pipe.close()
    return results


def rank_environment(rank: int, world_size: int, ranks_per_node: int, port: int) -> dict[str, str]:
    """What a launcher sets for a rank."""
    node, local_rank = divmod(rank, ranks_per_node)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": min(ranks_per_node, world_size - node * ranks_per_node),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": -(-world_size // ranks_per_node),
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    texts = {
        "MASTER_ADDR": HOST,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "SPMDRL_SECRET_FILE": os.path.join(tempfile.gettempdir(), f"spmdrl-tests-{os.geteuid()}", "secret"),
    }
    return {name: str(number) for name, number in numbers.items()} | texts


def _start(environment: dict[str, str], function: Callable, args: tuple) -> tuple[BaseProcess, Connection]:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = fork(_rank_main, environment, theirs, function, args)
    theirs.close()
    return process, ours


def fork(function: Callable, *args: Any, method: Literal["forkserver", "spawn"] = "forkserver") -> BaseProcess:
    """Start a process that calls a function."""
    if method == "forkserver":
        start_server()
        function, args = _ending_with_its_parent, (function, *args)
    process = multiprocessing.get_context(method).Process(target=function, args=args)
    process.start()
    return process


def _ending_with_its_parent(function: Callable, *args: Any) -> None:
    # The server ends with the last process that holds this: the one that starts ranks, however that one ends.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    forkserver._forkserver._forkserver_alive_fd = None
    die_with_parent()
    function(*args)


@functools.cache
def start_server() -> None:
    """Start the process that others are forked from; it goes on importing while this one does something else."""
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        # First on its path: the copy that is tested, not an installed one.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


def _rank_main(environment: dict[str, str], pipe: Connection, function: Callable, args: tuple) -> None:
    os.environ.update(environment)
    try:
        from spmdrl.resources.world import open_world
        from tests.support.chosen_device import install_chosen, races_found

        with open_world(install_chosen()) as world:
            try:
                result = function(world, *args)
                races = races_found()
                assert not races, races
            except BaseException:
                # Sent before the process group closes, so that the peers' connection errors come second.
                pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
                raise
        pipe.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise SystemExit(1) from None


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} of {len(pipes)} did not finish in time")
        for pipe in ready:
            rank = waiting[pipe]
            results[rank] = _receive(pipe, rank)
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection, rank: int) -> Any:
    try:
        succeeded, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise RuntimeError(f"rank {rank} died without an exception") from None
    if not succeeded:
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return value


def end(process: BaseProcess, grace_seconds: float) -> None:
    """Wait for a process, kill it if it takes longer, and forget it."""
    process.join(timeout=grace_seconds)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
