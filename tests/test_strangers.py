"""Strangers attack whole jobs while they train: in namespaces of their own, where nothing else is."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.bench.harness.bench_ranks import launch_variables
from tests.bench.harness.emulated_nodes import Node, emulated_nodes, refusal
from tests.support.jobs import ROOT, be_job, environment, metrics_of, tiny_config, weights_digest
from tests.support.ranks import end, fork

pytestmark = pytest.mark.ranks
NUM_STEPS = 12
IS_THOROUGH = "SPMDRL_FUZZ" in os.environ
NUM_CONNECTIONS = 10_000 if IS_THOROUGH else 400
# Those that don't wait for a gate's patience to end; all of them where there is time.
QUICK = [
    "connect and leave", "4 KB of zeros", "HTTP", "random bytes 0", "a TensorPipe frame of 2^62 bytes", "a pickle",
    "gloo's handshake", "a gate's hello with a false proof", "a gate's proof reflected", "resets", "many half hellos",
    "list the store", "read a file by a built-in operator", "put forged rows",
]  # fmt: skip
LAYOUTS = [(2, 1), (1, 2), (1, 1), (1, 4)]
# Trains freely, but doesn't end while it is attacked.
PATIENT_REWARD = """
import pathlib, time
def share_of_digits(completions, **columns):
    here = pathlib.Path(__file__).parent
    metrics = here / "attacked" / "metrics.jsonl"
    while (here / "under_attack").exists() and metrics.exists() and len(metrics.read_text().splitlines()) > 6:
        time.sleep(0.1)
    return [sum(letter.isdigit() for letter in text) / 8 for text in completions]
"""
# What a gate sends before it has seen a proof: its mark, a fresh number and its own proof.
ANSWER_BYTES = 72
LISTEN = "0A"
"""the state of a socket that listens, in Linux's tables"""


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if reason := refusal():
        pytest.skip(reason)


def train(config: Path, folder: Path, num_steps: int, *more: str) -> list[str]:
    keys = (f"run.dir={folder}", f"train.max_steps={num_steps}", "reward.timeout_seconds=900", *more)
    return ["train", str(config), *keys]


@contextlib.contextmanager
def ranks_on(
    nodes: Sequence[Node], ranks_per_node: int, arguments: list[str], log: Path
) -> Iterator[list[BaseProcess]]:
    """One process per rank, as a launcher without a store starts them."""
    ranks = []
    try:
        num_ranks = len(nodes) * ranks_per_node
        for rank in range(num_ranks):
            own = launch_variables(rank, num_ranks, nodes) if num_ranks > 1 else {}
            if len(nodes) == 1:
                own.pop("GLOO_SOCKET_IFNAME", None), own.pop("TP_SOCKET_IFNAME", None)
            screens = [Path(f"{log}.{rank}")] * 2
            ranks.append(fork(be_rank_on, nodes[rank // ranks_per_node], environment(**own), screens, arguments))
        yield ranks
    finally:
        for process in ranks:
            end(process, 0.0)


def be_rank_on(node: Node, own: dict[str, str], screens: list[Path], arguments: list[str]) -> None:
    node.enter()
    be_job(own, screens, arguments, None)


def finish(ranks: Sequence[BaseProcess], log: Path) -> None:
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks), Path(f"{log}.0").read_text()[-3000:]


def wait_for_steps(folder: Path, num_steps: int, ranks: Sequence[BaseProcess], log: Path) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(metrics_of(folder)) < num_steps:
        assert all(rank.exitcode is None for rank in ranks), "\n".join(
            Path(f"{log}.{number}").read_text()[-2000:] for number in range(len(ranks))
        )
        assert time.monotonic() < deadline, "the job takes too long to start"
        time.sleep(0.1)


def on_node(node: Node, *command: str) -> str:
    """Stdout of a command that a stranger runs on a node."""
    env = environment(TORCH_CPP_LOG_LEVEL="FATAL", PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
    command = ("ip", "netns", "exec", node.name, *command)
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env, cwd=ROOT, timeout=600).stdout


def listening_ports(node: Node) -> list[int]:
    """All that listens on a node, as any of its users can find out."""
    lines = [line.split() for line in on_node(node, "cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()]
    return sorted({int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == LISTEN})


def attack(node: Node, folder: Path, hosts: list[str], ports: list[int], names: Sequence[str]) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    arguments = [json.dumps(part) for part in (NUM_CONNECTIONS, hosts, ports, list(names))]
    said = on_node(node, sys.executable, "-m", "tests.support.stranger", str(folder), *arguments)
    return json.loads(said.splitlines()[-1])


def undisturbed(tmp_path: Path, config: Path, nodes: Sequence[Node], ranks_per_node: int) -> str:
    folder, log = tmp_path / "undisturbed", tmp_path / "undisturbed.log"
    with ranks_on(nodes, ranks_per_node, train(config, folder, NUM_STEPS), log) as ranks:
        finish(ranks, log)
    return weights_digest(folder, NUM_STEPS)


def check_nothing_was_had(got: dict[str, Any], folder: Path) -> None:
    for name, result in got.items():
        if name == "reachable":
            continue
        if isinstance(result, str):
            # Raw bytes: at most answers of gates, none of which holds anything.
            came = bytes.fromhex(result)
            assert len(came) % ANSWER_BYTES == 0 and came[:8] in (b"", b"spmdrl 1"), (name, came[:200])
        else:
            assert not any(result), (name, result)
    assert sorted(path.name for path in folder.iterdir()) == ["private.bin"], "nothing was written, nothing ran"


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes, ranks_per_node", LAYOUTS if IS_THOROUGH else LAYOUTS[:1])
def test_strangers_read_nothing_write_nothing_and_do_no_harm(num_nodes, ranks_per_node, tmp_path):
    config = tiny_config(tmp_path)
    (tmp_path / "reward.py").write_text(PATIENT_REWARD)
    with emulated_nodes(num_nodes + 1, 1e9) as all_nodes:
        nodes, outside = all_nodes[:num_nodes], all_nodes[-1]
        expected = undisturbed(tmp_path, config, nodes, ranks_per_node)
        folder, log = tmp_path / "attacked", tmp_path / "attacked.log"
        (tmp_path / "under_attack").touch()
        with ranks_on(nodes, ranks_per_node, train(config, folder, NUM_STEPS), log) as ranks:
            wait_for_steps(folder, 1, ranks, log)
            ports = {node: listening_ports(node) for node in nodes}
            within = [(node, ["127.0.0.1", node.address], ports[node]) for node in nodes]
            beside = [(outside, [node.address for node in nodes], sorted({*chain(*ports.values())}))]
            names = [] if IS_THOROUGH else QUICK
            with ThreadPoolExecutor() as pool:
                folders = [tmp_path / f"stranger{number}" for number in range(len(within + beside))]
                found = list(
                    pool.map(lambda where, own: attack(where[0], own, *where[1:], names), within + beside, folders)
                )
            assert all(rank.exitcode is None for rank in ranks), Path(f"{log}.0").read_text()[-3000:]
            (tmp_path / "under_attack").unlink()
            finish(ranks, log)
        assert weights_digest(folder, NUM_STEPS) == expected
    for got, own in zip(found, folders, strict=True):
        check_nothing_was_had(got, own)
    # Gates, and the ways of ranks to other ranks' gates, which end connections of strangers.
    num_ranks = num_nodes * ranks_per_node
    assert max(len(got["reachable"]) for got in found[:num_nodes]) <= ranks_per_node * (num_ranks + 2)
    assert len(found[-1]["reachable"]) == (num_ranks if num_nodes > 1 else 0)
    print(json.dumps({"attacks": len(found[0]) - 1, "reachable": [got["reachable"] for got in found]}))


@pytest.mark.slow
@pytest.mark.alone
def test_where_the_network_is_trusted_the_same_stranger_reads_files(tmp_path):
    """What the other test finds closed is open without the gates, and the stranger knows how to use it."""
    config, folder, log = tiny_config(tmp_path), tmp_path / "run", tmp_path / "log"
    name = "read a file at the address that a store shows"
    with emulated_nodes(2, 1e9) as nodes:
        arguments = train(config, folder, 10_000, "resources.trusted_network=true", "dock.network=tcp")
        with ranks_on(nodes, 1, arguments, log) as ranks:
            wait_for_steps(folder, 1, ranks, log)
            # The master's port is all that it must know.
            got = attack(nodes[0], tmp_path / "stranger", [nodes[0].address], [29500], [name])
    assert any("31.0, 41.0, 59.0, 26.0" in result for result in got[name])
