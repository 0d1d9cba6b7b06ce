from __future__ import annotations

import pytest

from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.runtime.network.network_interface import check_private, choose_interface

TWO_NODES = LaunchEnvironment(rank=0, world_size=2)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700:4700::1111"])
def test_a_public_address_is_refused(address):
    with pytest.raises(ValueError, match="public address"):
        check_private(address, "eth0")


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.7.7", "100.64.0.1"])
def test_a_private_address_is_accepted(address):
    check_private(address, "eth0")


def test_several_nodes_listen_on_the_interface_towards_the_master():
    environ: dict[str, str] = {}
    choose_interface(TWO_NODES, environ)
    assert environ == {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_the_users_interface_is_kept():
    environ = {"GLOO_SOCKET_IFNAME": "lo,lo"}
    choose_interface(TWO_NODES, environ)
    assert environ == {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo,lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_an_unknown_interface_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match="'nowhere0', which has no IP address; this host has: .*lo"):
        choose_interface(TWO_NODES, {"TP_SOCKET_IFNAME": "nowhere0"})
