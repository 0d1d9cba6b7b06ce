"""A launcher of several nodes goes on where its store is silent, and knows its own address."""

from __future__ import annotations

import threading
import time
from argparse import Namespace

import pytest

from spmdrl.resources.startup.patient_rendezvous import PatientRendezvous, know_this_node
from spmdrl.runtime.network.network_interface import address_towards


class SilentStore:
    """A rendezvous whose store doesn't answer until the test ends."""

    def __init__(self):
        self.ended = threading.Event()
        self.num_waiting = 1

    def num_nodes_waiting(self) -> int:
        self.ended.wait(30)
        return self.num_waiting

    def shutdown(self) -> bool:
        return self.ended.wait(30)


def test_a_launcher_whose_store_is_silent_goes_on_looking_at_its_ranks_and_ends():
    inner = SilentStore()
    rendezvous = PatientRendezvous(inner, leaving_seconds=0.2)
    started = time.monotonic()
    assert [rendezvous.num_nodes_waiting() for _ in range(50)] == [0] * 50
    assert rendezvous.shutdown() is False
    assert time.monotonic() - started < 5
    inner.ended.set()
    assert rendezvous.shutdown() is True
    deadline = time.monotonic() + 20
    while rendezvous.num_nodes_waiting() != 1:
        assert time.monotonic() < deadline, "nodes that wait to join are found once the store answers"
        time.sleep(0.02)


def arguments(endpoint: str, **others: str) -> Namespace:
    return Namespace(
        **{"rdzv_backend": "c10d", "rdzv_endpoint": endpoint, "rdzv_conf": "", "local_addr": None} | others
    )


def test_a_node_knows_its_address_and_whether_it_is_the_head_whatever_it_is_called():
    try:
        own = address_towards("192.0.2.1")
    except ValueError:
        pytest.skip("this machine has no network")
    head, other = arguments(f"{own}:29400"), arguments("192.0.2.1")
    for one in (head, other):
        # As where a host's name leads to loopback, or nowhere.
        know_this_node(one, is_named=lambda head: False)
    assert (head.local_addr, head.rdzv_conf) == (own, "is_host=1")
    assert (other.local_addr, other.rdzv_conf) == (own, "")
    by_name = arguments(own)
    know_this_node(by_name, is_named=lambda head: True)
    assert (by_name.local_addr, by_name.rdzv_conf) == (own, "")
    given = arguments(own, rdzv_conf="is_host=0,timeout=5", local_addr="me")
    know_this_node(given)
    assert (given.local_addr, given.rdzv_conf) == ("me", "is_host=0,timeout=5")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:29400", "localhost", "", "no.such.host.invalid:1"])
def test_a_job_on_one_machine_is_left_as_it_is(endpoint):
    found = arguments(endpoint)
    know_this_node(found)
    assert (found.local_addr, found.rdzv_conf) == (None, "")
