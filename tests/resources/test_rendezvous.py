from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.jobs import environment
from tests.support.ranks import HOST, end, fork, rank_environment, run_ranks
from torch.distributed import TCPStore

from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.device import Device
from spmdrl.resources.startup.rendezvous import Network, meet_at_store
from spmdrl.resources.world import World, connect, open_world
from spmdrl.runtime.launch import LaunchEnvironment, StartRefused
from spmdrl.runtime.network.secret import VARIABLE
from spmdrl.runtime.network.sockets import listening_sockets

SECONDS = timedelta(seconds=10)


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    """The store that torchrun makes, which answers anybody."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "secret"))
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=SECONDS)


def launch_of(rank: int, port: int) -> LaunchEnvironment:
    return LaunchEnvironment(
        rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_addr=HOST, master_port=port
    )


@contextlib.contextmanager
def meeting(rank: int, launcher: TCPStore, timeout: timedelta = SECONDS):
    met = meet_at_store(launch_of(rank, launcher.port), timeout, Network())
    try:
        yield met
    finally:
        assert met.gate is not None
        met.gate.close()


def test_the_launchers_store_holds_nothing_but_where_the_gate_is(launcher):
    with meeting(0, launcher) as first, meeting(1, launcher) as second:
        first.store.set("rewards", "of row 7")
        assert second.store.get("rewards") == b"of row 7"
        assert launcher.list_keys() == ["spmdrl/gate"]
        assert launcher.get("spmdrl/gate").startswith(b"127.0.0.1 ")


def test_a_rank_with_another_secret_is_refused_by_name(launcher, monkeypatch, tmp_path):
    with meeting(0, launcher):
        monkeypatch.setenv(VARIABLE, str(tmp_path / "other"))
        with pytest.raises(StartRefused, match=rf"rank 1 reads the job's secret from {tmp_path}/other, .*{VARIABLE}="):
            meet_at_store(launch_of(1, launcher.port), timedelta(seconds=2), Network())


def test_whatever_a_stranger_writes_where_the_gate_is_announced_ranks_meet(launcher):
    stop = threading.Event()
    lies = [b"127.0.0.1 9", b"", b"\xff" * 3000, b"10.255.255.1 80", b"127.0.0.1 99999999", b"x" * 100_000]

    def lie() -> None:
        while not stop.is_set():
            for content in lies:
                launcher.set("spmdrl/gate", content)
                time.sleep(0.02)
                launcher.delete_key("spmdrl/gate")

    liar = threading.Thread(target=lie)
    liar.start()
    try:
        patience = timedelta(seconds=60)
        with meeting(0, launcher, patience) as first, meeting(1, launcher, patience) as second:
            first.store.set("key", "ours")
            assert second.store.get("key") == b"ours"
    finally:
        stop.set()
        liar.join()


def test_a_restarted_job_never_uses_what_an_earlier_attempt_left(launcher):
    for attempt in range(3):
        with meeting(0, launcher) as first, meeting(1, launcher) as second:
            assert not first.store.check(["attempt"])
            first.store.set("attempt", str(attempt))
            assert second.store.get("attempt") == str(attempt).encode()


def test_a_rank_without_rank_0_is_refused_when_its_time_is_over(launcher):
    launcher.set("spmdrl/gate", "127.0.0.1 9")
    with pytest.raises(StartRefused, match="rank 1 doesn't reach rank 0 within 1 s: .*MASTER_PORT"):
        meet_at_store(launch_of(1, launcher.port), timedelta(seconds=1), Network())


def test_without_a_launchers_store_the_gate_listens_at_the_masters_port(launcher, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    with pytest.raises(StartRefused, match=f"rank 0 can't listen at 127.0.0.1, MASTER_PORT {launcher.port}"):
        meet_at_store(launch_of(0, launcher.port), SECONDS, Network())


def test_one_node_meets_whatever_its_host_is_called(launcher):
    ranks = [replace(launch_of(rank, launcher.port), master_addr="192.0.2.1") for rank in range(2)]
    with ExitStack() as stack:
        for launch in ranks:
            met = meet_at_store(launch, SECONDS, Network())
            assert met.gate is not None
            stack.callback(met.gate.close)
        met.store.set("key", "ours")


def test_ranks_of_the_masters_node_meet_where_its_name_is_a_loopback_address(monkeypatch, launcher):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    with socket.create_server((HOST, 0)) as bound:
        port = bound.getsockname()[1]
    # As Debian has it in /etc/hosts. Two nodes, of which these ranks are the first.
    ranks = [replace(launch_of(rank, port), world_size=4, master_addr="127.0.1.1") for rank in range(2)]
    with ExitStack() as stack:
        for launch in ranks:
            met = meet_at_store(launch, SECONDS, Network())
            assert met.gate is not None
            stack.callback(met.gate.close)
        met.store.set("key", "ours")


@pytest.mark.parametrize(("source", "option"), [("srun", "export MASTER_PORT=N"), ("msrun", "msrun --master_port=N")])
def test_where_the_masters_port_is_taken_the_launchers_option_is_named(monkeypatch, launcher, source, option):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    with pytest.raises(StartRefused, match=option):
        meet_at_store(replace(launch_of(0, launcher.port), source=source), SECONDS, Network())


def test_ranks_meet_on_a_trusted_network_without_torchruns_variables(monkeypatch):
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server((HOST, 0)) as bound:
        port = bound.getsockname()[1]
    trusted = Network(trusted=True)
    with ThreadPoolExecutor(1) as other:
        second = other.submit(meet_at_store, launch_of(1, port), SECONDS, trusted)
        first = meet_at_store(launch_of(0, port), SECONDS, trusted)
        first.store.set("key", "1")
        assert second.result().store.get("key") == b"1"


def test_a_job_of_one_rank_needs_no_secret(monkeypatch):
    monkeypatch.setenv(VARIABLE, "/nowhere/secret")
    met = meet_at_store(LaunchEnvironment(), SECONDS, Network())
    assert isinstance(met.store, dist.HashStore) and met.gate is None


def groups_and_listeners(world: World) -> dict:
    """What a stranger could connect to once all groups are made, and whether groups made later still work."""
    later = dist.new_group(list(range(world.size)), backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total, group=later)
    open_to_others = []
    for found in listening_sockets():
        name = found.getsockname()
        if os.fork() == 0:
            # Another process; ours may use its own way to rank 0's store.
            with socket.socket() as stranger:
                stranger.settimeout(0.3)
                os._exit(0 if stranger.connect_ex(name[:2]) else 1)
        if os.waitstatus_to_exitcode(os.wait()[1]):
            open_to_others.append(name[0])
    return {"total": float(total), "hosts": open_to_others, "gathered": len(gather_bytes(b"x"))}


@pytest.mark.ranks
def test_ranks_listen_on_loopback_and_gloo_is_closed_once_it_is_connected():
    for found in run_ranks(2, groups_and_listeners):
        assert found["total"] == 2.0 and found["gathered"] == 2
        # The gate, or the way to rank 0's, and the group made last, which nobody has closed.
        assert found["hosts"] == ["127.0.0.1"] * 2


def connect_two(monkeypatch, init: Callable[[int], None]) -> list[float | str]:
    """When each of two ranks, here threads, is connected, or the error that it gets instead."""
    monkeypatch.setattr(dist, "init_process_group", lambda *args, rank, **kwargs: init(rank))
    store = dist.HashStore()

    def enter(rank: int) -> float | str:
        world = World(launch_of(rank, 0), Device("cpu"), store)
        try:
            connect(world, 30)
        except RuntimeError as error:
            return str(world.first_failure(error))
        return time.monotonic()

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(enter, range(2)))


def test_no_rank_goes_on_before_all_have_made_their_connections(monkeypatch):
    def init(rank: int) -> None:
        time.sleep(0.5 * rank)

    started = time.monotonic()
    assert min(connect_two(monkeypatch, init)) > started + 0.5


def test_a_rank_that_cannot_connect_is_named_by_the_others_at_once(monkeypatch):
    def init(rank: int) -> None:
        if rank == 1:
            raise RuntimeError("no more sockets")

    started = time.monotonic()
    first, second = connect_two(monkeypatch, init)
    assert first == second and "no more sockets" in first
    assert time.monotonic() < started + 20


def answers_beside_a_wait(world: World) -> bool:
    """Whether the store answers a thread that watches while another one waits in it."""

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            world.store.wait([f"end of {world.rank}"], timedelta(seconds=6))

    beside = world.beside
    assert beside is not None
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    beside.set(f"of {world.rank}", "here")
    others = beside.get(f"of {1 - world.rank}")
    is_waiting = waiting.is_alive()
    beside.set(f"end of {world.rank}", "")
    waiting.join()
    return is_waiting and others == b"here"


@pytest.mark.ranks
def test_the_store_answers_threads_that_watch_while_the_main_one_waits_in_it():
    assert run_ranks(2, answers_beside_a_wait) == [True, True]


def watch_without_rank_0(own: dict[str, str], folder: Path) -> None:
    """Be one of two ranks, the first of which ends once both are inside; the other one wants to watch after that."""
    os.environ.update(own)
    rank = int(os.environ["RANK"])
    with contextlib.suppress(RuntimeError), open_world("cpu", 30.0, network=Network(folder)) as world:
        if rank == 0:
            # Rank 1 may still be connecting.
            world.store.wait(["rank 1 is inside"])
            os._exit(0)
        world.store.set("rank 1 is inside", "")
        with contextlib.suppress(RuntimeError):
            while not world.store.check(["what never comes"]):
                time.sleep(0.01)
        started = time.monotonic()
        with contextlib.suppress(RuntimeError):
            beside = world.beside
            assert beside is not None
            beside.check(["what never comes"])
        os._exit(0 if time.monotonic() < started + 10 else 1)


@pytest.mark.ranks
def test_a_rank_that_wants_to_watch_does_not_wait_for_a_rank_0_that_was_lost(tmp_path):
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    watch = partial(watch_without_rank_0, folder=tmp_path)
    ranks = [fork(watch, environment(**rank_environment(rank, 2, 2, store.port))) for rank in range(2)]
    for rank in ranks:
        rank.join(60)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        end(rank, 0.0)
    assert codes == [0, 0]
