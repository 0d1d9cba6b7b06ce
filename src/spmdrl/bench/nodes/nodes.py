"""The sample flow over emulated nodes: transfer dock, the paper's placement of rows, and a central buffer.

Nodes are network namespaces with links of --link-mb each way; every rank is a process. Compute is emulated by sleeping
in proportion to the tokens that a rank took, so that the cores of this machine don't limit it. Work a node is constant:
linearity is the step's time on the fewest nodes over that on more. Dispatch is what a step takes beyond the slowest
rank's compute in each state. All ranks share this machine's cores, so it is more than on machines of their own:
rank_cpu_s is the processor time of the busiest rank in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from spmdrl.bench.harness.bench_table import BenchTable
from spmdrl.bench.harness.emulated_nodes import Node, emulated_nodes, refusal
from spmdrl.bench.nodes.flow_rank import FAILURE_FILE, RESULT_FILE, VARIANTS, Measured, RankTask
from spmdrl.bench.nodes.sample_flow import FlowSize

_LONGEST_RUN_SECONDS = 600.0
# In the namespace of the first node, where no other process can have it.
_PORT = 29500
_SHORT_NAMES = {"dock": "", "dock, locality off": "_locality_off", "central buffer": "_central"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=_counts, default=[1, 2, 4, 8], metavar="N,...", help="1,2,4,8 unless given")
    parser.add_argument("--link-mb", type=float, default=300.0, help="megabytes a second of a link, each way")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--rows-per-node", type=int, default=FlowSize.rows_per_node)
    parser.add_argument("--steps", type=int, default=3, help="counted steps; figures are medians over them")
    parser.add_argument("--trusted-network", action="store_true", help="connect without gates, to see what they cost")


def _counts(text: str) -> list[int]:
    counts = sorted({int(part) for part in text.split(",")})
    if counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{text} holds {counts[0]}, but every job needs a node")
    return counts


def run(arguments: argparse.Namespace) -> BenchTable:
    """Measure all node counts. Where namespaces aren't permitted, the table says why, and didn't pass."""
    if reason := refusal():
        return BenchTable("bench nodes: not run", ("reason",), [{"reason": reason}], passed=False)
    size = FlowSize(rows_per_node=arguments.rows_per_node)
    with emulated_nodes(max(arguments.nodes), arguments.link_mb * 1e6) as nodes:
        measured = {count: _measure(nodes[:count], size, arguments) for count in arguments.nodes}
    rows = summarize(measured)
    return BenchTable(
        title=f"bench nodes: {size.rows_per_node} rows a node, {arguments.ranks_per_node} ranks a node, links of "
        f"{arguments.link_mb:g} MB/s, medians of {arguments.steps} steps",
        columns=tuple(rows[0]),
        rows=rows,
        notes=("cross_node_share: of the payload bytes put and taken; megabytes: of one step, veth_mb over all links",),
        details={"ratios": ratios(rows), "size": asdict(size)},
    )


def _measure(nodes: Sequence[Node], size: FlowSize, arguments: argparse.Namespace) -> dict[str, list[Measured]]:
    """What every rank measured, by variant."""
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        task = RankTask(size, arguments.steps, nodes[0].interface, name, arguments.trusted_network)
        run_ranks(nodes, arguments.ranks_per_node, task)
        return read_measured(Path(name) / RESULT_FILE)


def read_measured(path: Path) -> dict[str, list[Measured]]:
    """What rank 0 wrote: by variant, each rank's measurements."""
    measured = json.loads(path.read_text())
    return {variant: [Measured.from_json(part) for part in parts] for variant, parts in measured.items()}


def run_ranks(nodes: Sequence[Node], ranks_per_node: int, task: RankTask) -> None:
    """Run the ranks of one job to their end. Raises RuntimeError with what the first rank that failed said."""
    deadline = time.monotonic() + _LONGEST_RUN_SECONDS
    with _started_ranks(nodes, ranks_per_node, task) as ranks:
        while True:
            codes = {number: rank.poll() for number, rank in enumerate(ranks)}
            if any(codes.values()):
                raise RuntimeError(_failure(codes, Path(task.folder)))
            if None not in codes.values():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks on {len(nodes)} nodes took longer than {_LONGEST_RUN_SECONDS:g} s")
            time.sleep(0.05)


def _failure(codes: Mapping[int, int | None], folder: Path) -> str:
    """What is known of the failure: first of a rank that a signal ended, which could say nothing itself."""
    code, rank = min((code, number) for number, code in codes.items() if code)
    noted = folder / FAILURE_FILE
    words = (noted if noted.exists() else folder / f"{rank}.log").read_text(errors="replace")
    return f"rank {rank} ended with status {code}; {words[-3000:]}"


@contextmanager
def _started_ranks(
    nodes: Sequence[Node], ranks_per_node: int, task: RankTask
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One process a rank, each on its node; none of them is left afterwards."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(len(nodes) * ranks_per_node):
            argv = nodes[rank // ranks_per_node].command(
                [sys.executable, "-m", "spmdrl.bench.nodes.flow_rank", task.to_json()]
            )
            with open(Path(task.folder) / f"{rank}.log", "wb") as log:
                environment = rank_environment(nodes, ranks_per_node, rank)
                started = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
            ranks.append(started)
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.communicate()


def rank_environment(nodes: Sequence[Node], ranks_per_node: int, rank: int) -> dict[str, str]:
    """This process's environment with what a launcher would set, and the node's link as the only interface."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": len(nodes) * ranks_per_node,
        "LOCAL_RANK": rank % ranks_per_node,
        "LOCAL_WORLD_SIZE": ranks_per_node,
        "GROUP_RANK": rank // ranks_per_node,
        "GROUP_WORLD_SIZE": len(nodes),
        "MASTER_PORT": _PORT,
        "OMP_NUM_THREADS": 1,
    }
    texts = {
        "MASTER_ADDR": nodes[0].address,
        "GLOO_SOCKET_IFNAME": nodes[0].interface,
        "TP_SOCKET_IFNAME": nodes[0].interface,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return inherited | {name: str(number) for name, number in numbers.items()} | texts


@dataclass(frozen=True)
class StepTimes:
    """Medians over the steps of one variant on one number of nodes."""

    step_seconds: float
    dispatch_seconds: float
    cpu_seconds: float
    """of the busiest rank; a mean over the steps"""

    @classmethod
    def of(cls, ranks: Sequence[Measured]) -> StepTimes:
        """A step lasts as long as on its slowest rank; a state's compute too, as all ranks wait at its end."""
        steps = [max(seconds) for seconds in zip(*(rank.step_seconds for rank in ranks), strict=True)]
        by_step = zip(*(rank.sleep_seconds for rank in ranks), strict=True)
        compute = [sum(max(state) for state in zip(*sleeps, strict=True)) for sleeps in by_step]
        dispatch = [step - slept for step, slept in zip(steps, compute, strict=True)]
        cpu = max(rank.cpu_seconds for rank in ranks) / len(steps)
        return cls(statistics.median(steps), statistics.median(dispatch), cpu)


def summarize(measured: Mapping[int, Mapping[str, Sequence[Measured]]]) -> list[dict[str, object]]:
    """A row for each variant and number of nodes."""
    fewest = measured[min(measured)]
    rows: list[dict[str, object]] = []
    for variant in VARIANTS:
        base = StepTimes.of(fewest[variant]).step_seconds
        for count, variants in measured.items():
            times = StepTimes.of(variants[variant])
            row = {"variant": variant, "nodes": count, "step_s": times.step_seconds}
            row |= {"dispatch_s": times.dispatch_seconds, "rank_cpu_s": times.cpu_seconds}
            row |= {"linearity": base / times.step_seconds}
            rows.append(row | _traffic(variants[variant], count))
    return rows


def _traffic(ranks: Sequence[Measured], num_nodes: int) -> dict[str, object]:
    """Megabytes of one step: payload by link, and what went over all links and over the busiest."""
    num_steps, ranks_per_node = len(ranks[0].step_seconds), len(ranks) // num_nodes
    payload = {link: sum(rank.payload_bytes[link] for rank in ranks) for link in ranks[0].payload_bytes}
    # Ranks of one node read the same counters.
    links = [rank.over_link for rank in ranks[::ranks_per_node]]
    busiest = max(max(link.sent, link.received) for link in links)
    megabytes = {f"{link}_mb": count / num_steps / 1e6 for link, count in payload.items()}
    return {
        **megabytes,
        "cross_node_share": payload["cross_node"] / sum(payload.values()),
        "veth_mb": sum(link.sent for link in links) / num_steps / 1e6,
        "busiest_veth_mb": busiest / num_steps / 1e6,
    }


def ratios(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Of the most nodes, the cross-node share; of all node counts, the linearity; plain names are the dock's."""
    most = max(int(str(row["nodes"])) for row in rows)
    found: dict[str, object] = {}
    for row in rows:
        suffix = _SHORT_NAMES[str(row["variant"])]
        found[f"linearity_{row['nodes']}{suffix}"] = row["linearity"]
        found[f"dispatch_seconds_{row['nodes']}{suffix}"] = row["dispatch_s"]
        if row["nodes"] == most:
            found[f"cross_node_share{suffix}"] = row["cross_node_share"]
    return found
