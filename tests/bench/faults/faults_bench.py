"""Faults on purpose against what docs/reliability.md promises: how many were injected, and how many survived.

Jobs are those of the verb train on a tiny model, on CPU ranks. A row passes where all injections were survived.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from spmdrl.config.reader import ConfigError
from spmdrl.runtime.screen import show
from tests.bench.faults import checkpoint_faults, disturbed_jobs, lost_nodes, row_faults, weight_faults
from tests.bench.faults.fault_tally import Tally
from tests.bench.faults.kills import killed_jobs, resumed_jobs
from tests.bench.faults.kills.random_kills import KINDS, PLAN_IF_SHORT, Plan, random_kills
from tests.bench.faults.poisoned_rewards import poisons
from tests.bench.faults.watched import hung_jobs, hung_sets, interrupted_switch, slow_jobs, stopped_jobs, stuck_tools
from tests.bench.harness.bench_table import BenchTable

_MOST_SHOWN = 5


def _promises(arguments: argparse.Namespace) -> Mapping[str, Callable[[Path], list[Tally]]]:
    """What each promise is tried by; short ones leave out most injections."""
    short, part, hangs = arguments.short, _part_of(arguments.part), arguments.hangs
    kinds = [KINDS[name] for name in arguments.kinds or KINDS]
    plan = PLAN_IF_SHORT if short else Plan(arguments.kills, arguments.seed, kinds=kinds)
    return {
        "R1": lambda root: killed_jobs.kills(root, is_short=short, part=part),
        "R2": lambda root: [
            *hung_jobs.hangs(root, hung_jobs.few_hangs() if short else hung_jobs.all_hangs(hangs), part=part),
            *hung_jobs.healthy(root, count=1 if short else hangs // 2, part=part),
        ],
        "R3": lambda root: checkpoint_faults.crashes(root, is_short=short),
        "R4": lambda root: checkpoint_faults.changes(root, count=50 if short else 500),
        "R5": lambda root: [
            *resumed_jobs.resumed(root, is_short=short),
            *resumed_jobs.fewer_ranks(root, is_short=short),
        ],
        "R6": lambda root: disturbed_jobs.memory(root, is_short=short),
        "R8": lambda root: poisons(root, count=1 if short else 10),
        "R9": lambda root: disturbed_jobs.values(root, is_short=short),
        "R10": lambda root: [*checkpoint_faults.full_disk(root), *([] if short else disturbed_jobs.full_disk(root))],
        "R11": lambda root: stopped_jobs.stops(root, is_short=short, part=part),
        "R12": lambda root: row_faults.sequences(root, count=100 if short else 10_000),
        "R13": lambda root: [
            *weight_faults.received(count=20 if short else 100),
            *([] if short else disturbed_jobs.weights(root)),
        ],
        # Slow-downs hide in what other work costs, beside which short ones run; tests/observability/test_slow_ranks.py
        # has a job whose slow rank is slower than that.
        "R15": lambda root: [] if short else slow_jobs.slow_ranks(root, num_healthy=8, part=part),
        "tools": lambda root: stuck_tools.tools(root, is_short=short, part=part),
        "nodes": lambda root: lost_nodes.lost_nodes(root, is_short=short, part=part),
        "switch": lambda root: interrupted_switch.switches(root, is_short=short, part=part),
        "sets": lambda root: hung_sets.hung_sets(root, hung_sets.FEW if short else hung_sets.MANY, part),
        "kills": lambda root: random_kills(root, plan, part),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", metavar="R1,R3", help="these promises alone; R14 is counted with R1 and kills, sets belong to R2"
    )
    parser.add_argument("--short", action="store_true", help="a few injections of each kind, in minutes")
    parser.add_argument("--hangs", type=int, default=200, help="of R2, beside half as many runs that don't hang")
    parser.add_argument("--kills", type=int, default=420, help="number of SIGKILLs at random moments (default 420)")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), metavar="KIND", help=f"of jobs: {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks and moments of these kills")
    parser.add_argument(
        "--part",
        default="1/1",
        metavar="K/N",
        help="the K-th of N shares of R1, R2, R11, R15, tools, nodes, switch, sets, kills",
    )


def run(arguments: argparse.Namespace) -> BenchTable:
    """Passes where every injection was survived."""
    if arguments.kills < 1:
        raise ConfigError(f"--kills is {arguments.kills}, but must be at least 1")
    promises = _promises(arguments)
    wanted = arguments.only.split(",") if arguments.only else list(promises)
    if unknown := [name for name in wanted if name not in promises]:
        raise ConfigError(f"--only names {unknown[0]!r}, but there are {', '.join(promises)}")
    tallies: list[Tally] = []
    for name in wanted:
        with tempfile.TemporaryDirectory(prefix="spmdrl-faults-", ignore_cleanup_errors=True) as folder:
            found = promises[name](Path(folder))
        for one in found:
            for failure in one.failures[:_MOST_SHOWN]:
                show(f"{one.id}, {one.fault}: {failure}", stream=sys.stderr)
        tallies += found
    return BenchTable(
        title="bench faults: injected and survived",
        rows=[one.row() for one in tallies],
        passed=all(one.survived == one.injected for one in tallies),
    )


def _part_of(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"--part is {text!r}, but must be K/N with K from 1 to N, as in 1/3")
    return int(number) - 1, int(count)
