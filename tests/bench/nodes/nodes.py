"""The sample flow over emulated nodes: the transfer dock, and the paper's placement of rows.

Nodes are network namespaces with links of --link-mb each way; every rank is a process. Compute is emulated by sleeping
in proportion to the tokens that a rank took, so that the cores of this machine don't limit it. Work a node is constant:
linearity is the step's time on the fewest nodes over that on more. Dispatch is what a step takes beyond the slowest
rank's compute in each state. All ranks share this machine's cores, so it is more than on machines of their own:
rank_cpu_s is the processor time of the busiest rank in a step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from spmdrl.config.reader import start_up
from spmdrl.resources.startup.rendezvous import Network
from tests.bench.harness.bench_ranks import BenchRanks
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.emulated_nodes import INTERFACE, emulated_nodes, refusal
from tests.bench.nodes.flow_rank import VARIANTS, FlowFigures, FlowTask, measure_variants
from tests.bench.nodes.sample_flow import FlowSize

_SHORT_NAMES = {"dock": "", "dock, locality off": "_locality_off"}


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
    """Measure all node counts. Where namespaces aren't permitted, the table has the reason, and hasn't passed."""
    with start_up():
        size = FlowSize(rows_per_node=arguments.rows_per_node)
    if reason := refusal():
        return BenchTable("bench nodes: not run", [{"reason": reason}], passed=False)
    task = FlowTask(size, arguments.steps, INTERFACE)
    measured = {}
    with emulated_nodes(max(arguments.nodes), arguments.link_mb * 1e6) as nodes:
        for count in arguments.nodes:
            network = Network(trusted=arguments.trusted_network)
            ranks = BenchRanks(count * arguments.ranks_per_node, nodes=nodes[:count], network=network)
            measured[count] = ranks.call(measure_variants, task)
    rows = summarize(measured)
    return BenchTable(
        title=f"bench nodes: {size.rows_per_node} rows per node, {arguments.ranks_per_node} ranks per node, links "
        f"of {arguments.link_mb:g} MB/s, medians of {arguments.steps} steps",
        rows=rows,
        notes=("cross_node_share: of the payload bytes put and taken; megabytes: of one step, veth_mb over all links",),
        details={"ratios": ratios(rows), "size": asdict(size)},
    )


@dataclass(frozen=True)
class StepTimes:
    """Medians over the steps of one variant on one number of nodes."""

    step_seconds: float
    compute_seconds: float
    dispatch_seconds: float
    cpu_seconds: float
    """of the busiest rank; a mean over the steps"""

    @classmethod
    def of(cls, ranks: Sequence[FlowFigures]) -> StepTimes:
        """A step lasts as long as on its slowest rank; a state's compute too, as all ranks wait at its end."""
        steps = [max(seconds) for seconds in zip(*(rank.step_seconds for rank in ranks), strict=True)]
        by_step = zip(*(rank.sleep_seconds for rank in ranks), strict=True)
        compute = [sum(max(state) for state in zip(*sleeps, strict=True)) for sleeps in by_step]
        dispatch = [step - slept for step, slept in zip(steps, compute, strict=True)]
        cpu = max(rank.cpu_seconds for rank in ranks) / len(steps)
        return cls(statistics.median(steps), statistics.median(compute), statistics.median(dispatch), cpu)


def summarize(measured: Mapping[int, Sequence[Mapping[str, FlowFigures]]]) -> list[dict[str, object]]:
    """A row for each variant and number of nodes, of what each rank measured by variant."""
    rows: list[dict[str, object]] = []
    for variant in VARIANTS:
        by_count = {count: [rank[variant] for rank in ranks] for count, ranks in measured.items()}
        base = StepTimes.of(by_count[min(by_count)]).step_seconds
        for count, ranks in by_count.items():
            times = StepTimes.of(ranks)
            row = {"variant": variant, "nodes": count, "step_s": times.step_seconds}
            row |= {"compute_s": times.compute_seconds, "dispatch_s": times.dispatch_seconds}
            row |= {"rank_cpu_s": times.cpu_seconds, "linearity": base / times.step_seconds}
            rows.append(row | _traffic(ranks, count))
    return rows


def _traffic(ranks: Sequence[FlowFigures], num_nodes: int) -> dict[str, object]:
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
