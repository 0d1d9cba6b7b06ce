"""A node whose link is cut in the middle of a job of four: the others stop and name it, and the same command finishes.

Nodes are network namespaces (emulated_nodes.py), each with a launcher of its own. A link that is cut carries nothing
more and closes no connection: nothing but silence shows that a node is lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spmdrl.runtime.workers.descent import ProcessTree
from tests.bench.faults.fault_jobs import FaultJobs, difference, outcome_of
from tests.bench.faults.fault_tally import Tally
from tests.bench.faults.planned_faults import MODULE, VARIABLE
from tests.bench.harness.bench_ranks import launch_variables
from tests.bench.harness.emulated_nodes import Node, emulated_nodes, refusal
from tests.support.jobs import environment, torchrun_script

_LINK_BYTES_PER_SECOND = 1e8
_LONGEST_SECONDS = 240.0
# The node that is cut off, and the stage of the second step that rank 0 makes long enough for that. Node 0 keeps the
# stores of the job and of the launchers.
_CUTS = ((2, "generate"), (0, "backward"), (3, "reward"), (1, "optim"))
_SHARE_SLOW = 0.5
"""of the limit"""


@dataclass(frozen=True)
class _Launched:
    """The launchers of one job, one per node."""

    processes: Sequence[subprocess.Popen[bytes]]
    screens: Sequence[Path]

    def ends(self, within_seconds: float) -> list[float | None]:
        """After how many seconds each of them ended; None for one that didn't in time."""
        started = time.monotonic()
        ended: list[float | None] = [None] * len(self.processes)
        while None in ended and time.monotonic() - started < within_seconds:
            for number, process in enumerate(self.processes):
                if ended[number] is None and process.poll() is not None:
                    ended[number] = time.monotonic() - started
            time.sleep(0.05)
        return ended

    @property
    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def line(self, node: int) -> str:
        """The last line of spmdrl's own on a node's screen."""
        lines = self.screens[node].read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith("spmdrl: ")), "")


@dataclass(frozen=True)
class _Scenario:
    """A job on so many nodes, and the cuts: each with the stage of rank 0 that is made long enough for it."""

    name: str
    num_nodes: int
    settings: Sequence[str]
    cuts: Sequence[tuple[int, str]]
    unlike: str = " "
    """pattern of metrics that may differ after a resume"""
    limit_seconds: float = 8.0

    @property
    def most_seconds(self) -> float:
        """The longest time until all launchers have ended, as docs/launching.md has it."""
        # A checkpoint may take three times the limit.
        return 1.5 * self.limit_seconds + 20.0


_ALIKE = _Scenario("all train and generate", 4, (), _CUTS)
# Two nodes are quicker than four, so that they need less to get through a stage.
_IF_SHORT = _Scenario("all train and generate", 2, (), _CUTS[-1:], limit_seconds=4.0)
_APART = _Scenario(
    "two of which only generate", 3, ("resources.ranks.generation=2", "rollout.lag=1"),
    ((2, "backward"), (0, "optim"), (1, "advantage")), unlike="dock/.*bytes",
)  # fmt: skip


def lost_nodes(root: Path, *, is_short: bool, part: tuple[int, int]) -> list[Tally]:
    """Cut nodes off, one per job, or one of two; where this system has no namespaces, nothing is tried."""
    if reason := refusal():
        return [Tally("nodes", f"not tried: {reason}")]
    tallies = []
    for number, scenario in enumerate((_IF_SHORT,) if is_short else (_ALIKE, _APART)):
        folder = root / f"{number}"
        folder.mkdir()
        tallies += _tried(folder, scenario, part)
    return tallies


def _tried(root: Path, scenario: _Scenario, part: tuple[int, int]) -> list[Tally]:
    num_nodes, (number, count) = scenario.num_nodes, part
    stopped, named, finished = (
        Tally("nodes", f"link of one of {num_nodes} nodes cut, {scenario.name}: {what}")
        for what in (
            f"all launchers end within {scenario.most_seconds:g} s",
            "each of the other nodes names it, and it what it lost",
            "link back, same command",
        )
    )
    limit = f"resources.stage_timeout_seconds={scenario.limit_seconds}"
    # A start that hangs ends with the names of the missing ranks before this bench gives up.
    start = f"resources.start_timeout_seconds={_LONGEST_SECONDS / 2}"
    jobs = FaultJobs(root, num_nodes, limit, start, "train.max_steps=4", *scenario.settings)
    with emulated_nodes(num_nodes, _LINK_BYTES_PER_SECOND) as nodes:
        _run_without_launchers(nodes, jobs, "whole")
        whole = outcome_of(root / "whole", unlike=scenario.unlike)
        for lost, stage in scenario.cuts[number::count]:
            name = f"cut_{lost}_{stage}"
            _cut_off(nodes, jobs, name, scenario, (lost, stage), stopped, named)
            with finished.timed(name) as problems:
                screen = (_run_without_launchers if scenario is _IF_SHORT else _run_to_end)(nodes, jobs, name)
                is_resumed = "resumed from" in screen
                problem = difference(whole, outcome_of(root / name, unlike=scenario.unlike))
                problems += [problem] if problem else ([] if is_resumed else ["it began anew"])
    return [stopped, named, finished]


def _run_without_launchers(nodes: Sequence[Node], jobs: FaultJobs, name: str) -> str:
    """Run a job whose ranks start at once: launchers would take most of the time. Returns what its ranks print.

    Raises RuntimeError where a rank fails.
    """
    end = jobs.start(name, prepare=partial(_enter, nodes)).end()
    if not end.is_done:
        raise RuntimeError(f"{name} ended with {end.codes}: {end.screen[-2000:]}")
    return end.screen


def _enter(nodes: Sequence[Node]) -> None:
    """Be the rank of the job without launchers that belongs on one of the nodes."""
    variables = launch_variables(int(os.environ["RANK"]), len(nodes), nodes)
    os.environ.update(variables)
    # The first rank has the store.
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    nodes[int(variables["GROUP_RANK"])].enter()


def _cut_off(
    nodes: Sequence[Node], jobs: FaultJobs, name: str, scenario: _Scenario, cut: tuple[int, str], stopped: Tally,
    named: Tally,
) -> None:  # fmt: skip
    (lost, stage), slow_seconds = cut, _SHARE_SLOW * scenario.limit_seconds
    with _launched(nodes, jobs, name, fault=f"{stage}:0:2:slow:{slow_seconds}") as job:
        deadline = time.monotonic() + _LONGEST_SECONDS
        while not (jobs.root / name / "checkpoints/step_000001").exists():
            if time.monotonic() > deadline or any(code is not None for code in job.codes):
                screens = "\n".join(screen.read_text()[-2000:] for screen in job.screens)
                raise RuntimeError(f"the job, with codes {job.codes}, didn't get to its second step: {screens}")
            time.sleep(0.05)
        time.sleep(slow_seconds / 2)
        with nodes[lost].cut_off():
            ended = job.ends(scenario.most_seconds)
        late = [f"node {node} still runs" for node, seconds in enumerate(ended) if seconds is None]
        late += [f"node {node} ended with 0" for node, code in enumerate(job.codes) if code == 0]
        seconds = max(one or scenario.most_seconds for one in ended)
        stopped.count(seconds, f"{name}: {', '.join(late)}" if late else None)
        lines = [job.line(node) for node in range(len(nodes))]
        unnamed = [
            f"node {node}: {line}"
            for node, line in enumerate(lines)
            if nodes[lost].address not in line or not ("is lost" in line or "is cut off" in line)
        ]
        named.count(seconds, f"{name}: {unnamed[0]}" if unnamed else None)


def _run_to_end(nodes: Sequence[Node], jobs: FaultJobs, name: str) -> str:
    """Returns what node 0 printed. Raises RuntimeError where a launcher fails, or takes too long."""
    with _launched(nodes, jobs, name) as job:
        job.ends(_LONGEST_SECONDS)
        screen = job.screens[0].read_text()
        if any(job.codes) or None in job.codes:
            raise RuntimeError(f"{name} ended with {job.codes}: {screen[-2000:]}")
        return screen


@contextlib.contextmanager
def _launched(nodes: Sequence[Node], jobs: FaultJobs, name: str, *, fault: str = "") -> Iterator[_Launched]:
    """Start a launcher with a rank on each node, and end what is left of them on the way out."""
    launcher = torchrun_script(jobs.root, "-m", MODULE)
    meeting = {"HEAD": nodes[0].address, "NODES": str(len(nodes)), "RUN_ID": name}
    kind = "cut" if fault else "whole"
    screens = [jobs.root / f"{name}.{kind}.{number}.screen" for number in range(len(nodes))]
    variables = environment(**{VARIABLE: fault, "RANKS_PER_NODE": "1", "PYTHON": sys.executable}, **meeting)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for node, screen in zip(nodes, screens, strict=True):
            with open(screen, "wb") as out:
                processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", node.name, *launcher, *jobs.command(name)],  # noqa: S607
                        env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                    )
                )  # fmt: skip
        yield _Launched(processes, screens)
    finally:
        for process in processes:
            # Ranks end with torchrun, and the script after it.
            for one in ProcessTree(process.pid).members():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
            process.wait()
