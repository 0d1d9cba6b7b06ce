"""Small jobs of the command line whose ranks may be killed, and what is left of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from spmdrl.cli.command_line import main
from spmdrl.observability.jsonl import read_jsonl
from spmdrl.verbs.doctor.commands import MARK, marked_processes
from tests.bench.faults.noted_passes import Passes, note_passes
from tests.bench.faults.planned_faults import VARIABLE, arm_fault
from tests.bench.harness.bench_ranks import launch_variables, store_of_launcher
from tests.support.ranks import fork

_VARIABLES = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
_LONGEST_SECONDS = 120.0
_LEAVING_SECONDS = 5.0
_POLL_SECONDS = 0.02
_POLL_PASSES_SECONDS = 0.002
_MOST_PLACES = 5
_BANNER = re.compile("^run ", re.MULTILINE)
_REWARD = """
def share_of_digits(completions, **columns):
    return [sum(letter.isdigit() for letter in text) / 8 for text in completions]
"""
_SETTINGS = (
    "model.make={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, "
    "intermediate_size: 64, max_position_embeddings: 32, chars: '0123456789+= '}",
    "data.train=synthetic://addition?low=0&high=9&count=40", "data.eval=synthetic://addition?low=0&high=9&count=8",
    "rollout.prompts_per_step=8", "rollout.num_generations=4", "rollout.max_completion_length=8", "optim.lr=1e-3",
    "train.max_steps=3", "train.epochs_per_step=2", "checkpoint.interval=1", "checkpoint.keep_last=30",
    "eval.interval=2", "eval.before_train=false", "resources.device=cpu", "resources.timeout_seconds=60",
)  # fmt: skip
# Files of a checkpoint that hold times or the run's folder, and the account that is compared by its parts.
_OF_THE_RUN = ("manifest.json", "run.json", "config.resolved.yaml", "samples.json")
# Warnings are counted with them: a slow rank or a slow disk has one.
_MEASURED = re.compile(
    "(time|perf|checkpoint|mem|fusion)/|reshard/.*(seconds|per_second|hidden_share)$|environment/(open_)?seconds|"
    "log/warnings$"
)


@dataclass(frozen=True)
class TimedKill:
    """SIGKILL for ranks from outside, wherever they are by then."""

    ranks: Sequence[int]
    seconds: float
    """from the start of the processes, from the run's banner, or from the beginning of a stage"""
    in_run: bool
    """whether they count from the run's banner or a stage; otherwise the others get SIGTERM then, as from torchrun"""
    stage: str = ""
    """the stage of the first of these ranks from whose beginning they count"""
    step: int = 0
    """the first step in which that may be"""


@dataclass(frozen=True)
class JobEnd:
    """How a job ended."""

    codes: list[int]
    """exit codes by rank, negative for a signal"""
    survivor_seconds: float
    """from the end of the first rank to that of the last one"""
    screen: str
    left: list[int]
    """processes that its ranks started and that still ran some seconds later"""

    @property
    def is_done(self) -> bool:
        return not any(self.codes)

    @property
    def is_killed(self) -> bool:
        return -signal.SIGKILL in self.codes


@dataclass(frozen=True)
class RunningJob:
    """A job under way: its ranks, and what they print."""

    processes: Sequence[BaseProcess]
    screen: Path
    mark: str
    store: object
    """the launcher's, which lasts as long as this object"""

    def printed(self) -> str:
        """What all ranks have printed so far."""
        return self.screen.read_text(errors="replace") if self.screen.exists() else ""

    def end(self) -> JobEnd:
        """Wait for the ends of all ranks, which come by themselves, or after two minutes."""
        seconds = _wait_for_all(self.processes)
        codes = [process.exitcode or 0 for process in self.processes]
        return JobEnd(codes, seconds, self.printed(), _left_of(self.mark))


class FaultJobs:
    """Runs a verb on a tiny model, in folders below one."""

    def __init__(self, root: Path, num_ranks: int, *settings: str, verb: str = "train"):
        self.root = root
        self.num_ranks = num_ranks
        reward, config = root / "reward.py", root / "jobs.yaml"
        reward.write_text(_REWARD)
        # In a file, which verbs that read less of it take too.
        lines = [": ".join(setting.split("=", 1)) for setting in _SETTINGS]
        config.write_text("\n".join([*lines, f"reward.functions: ['{reward}:share_of_digits']", ""]))
        self._words = [verb, str(config), *settings]

    def command(self, name: str, *settings: str) -> list[str]:
        """The words of a run in the folder `name`."""
        return [*self._words, *settings, f"run.dir={self.root / name}"]

    def run(self, name: str, *settings: str, fault: str = "", kill: TimedKill | None = None) -> JobEnd:
        """Run a job to its end, with a fault, a kill from outside, or none."""
        passes = self.passes(name)
        if kill is None:
            return self.start(name, *settings, fault=fault).end()
        for path in passes.glob("*"):
            path.unlink()
        job = self.start(name, *settings, fault=fault, prepare=partial(note_passes, passes))
        _kill_in_time(job, kill, passes)
        return job.end()

    def passes(self, name: str) -> Path:
        """Where the ranks of a run note their passes, if they do; those of a run with a kill do."""
        return self.root / f"{name}.passes"

    def start(
        self, name: str, *settings: str, fault: str = "", prepare: Callable[[], None] | None = None
    ) -> RunningJob:
        """Start a job; each of its ranks calls `prepare` first, which must be importable."""
        store = store_of_launcher()
        mark, screen = uuid.uuid4().hex, self.root / f"{name}.screen"
        screen.unlink(missing_ok=True)
        processes = []
        for rank in range(self.num_ranks):
            variables = _VARIABLES | {VARIABLE: fault, MARK: f"{os.environ.get(MARK, '')}/{mark}"}
            if self.num_ranks > 1:
                variables |= launch_variables(rank, self.num_ranks)
                variables |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            processes.append(fork(_be_rank, variables, screen, self.command(name, *settings), prepare))
        return RunningJob(processes, screen, mark, store)


def _be_rank(
    variables: Mapping[str, str], screen: Path, words: Sequence[str], prepare: Callable[[], None] | None
) -> None:
    file = os.open(screen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.environ.update(variables)
    # The server that forked this process had imported torch before the variables came.
    torch.set_num_threads(1)
    arm_fault(os.environ)
    if prepare is not None:
        prepare()
    raise SystemExit(main(list(words)))


def _kill_in_time(job: RunningJob, kill: TimedKill, passes: Path) -> None:
    """Kill the ranks at their moment, unless a rank has ended before."""
    sentinels = [process.sentinel for process in job.processes]
    while kill.in_run and not _BANNER.search(job.printed()):
        if wait(sentinels, _POLL_SECONDS):
            return
    passed = Passes(passes, kill.ranks[0])
    while kill.stage and not any(one.stage == kill.stage and one.in_step >= kill.step for one in passed.new()):
        if wait(sentinels, _POLL_PASSES_SECONDS):
            return
    if wait(sentinels, kill.seconds):
        return
    for rank in kill.ranks:
        job.processes[rank].kill()
    if not kill.in_run:
        # Ranks that have not met yet learn of each other from their launcher alone, which ends them.
        for process in job.processes:
            process.terminate()


def _wait_for_all(processes: Sequence[BaseProcess]) -> float:
    """Wait for the ends of all ranks; returns the seconds between the first one and the last."""
    running, first = {process.sentinel: process for process in processes}, 0.0
    deadline = time.monotonic() + _LONGEST_SECONDS
    while running:
        ended = wait(list(running), max(0.0, deadline - time.monotonic()))
        first = first or time.monotonic()
        for sentinel in ended:
            running.pop(sentinel).join()  # type: ignore[index]
        if not ended:
            for process in running.values():
                process.kill()
            deadline += _LONGEST_SECONDS
    return time.monotonic() - first


def _left_of(mark: str) -> list[int]:
    deadline = time.monotonic() + _LEAVING_SECONDS
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def outcome_of(run: Path, unlike: str = " ") -> dict[str, Any]:
    """What two runs have alike that made the same of the same rows: all that steps go on with, rows and metrics.

    Metrics that the pattern `unlike` matches are left out.
    """
    left_out = re.compile(f"{_MEASURED.pattern}|{unlike}")
    newest = max((run / "checkpoints").glob("step_*"))
    files = [path for path in newest.rglob("*") if path.is_file() and path.name not in _OF_THE_RUN]
    files = [path for path in files if path.parent.name != "model" or path.suffix == ".safetensors"]
    lines = read_jsonl(run / "metrics.jsonl")
    return {
        "step": newest.name,
        "account of rows": json.loads((newest / "samples.json").read_text())
        if (newest / "samples.json").exists()
        else None,
        "digests of rows": {path.name: path.read_text().splitlines() for path in run.glob("rows/rank_*.jsonl")},
        "state": {str(path.relative_to(newest)): _sha256(path) for path in files},
        "metrics": [{name: step[name] for name in step if not left_out.match(name)} for step in lines],
    }


def difference(whole: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """In which part two outcomes differ, and where in it, if they do."""
    part = next((part for part in whole if whole[part] != other[part]), None)
    return part and f"other {part}: {', '.join(_places(whole[part], other[part])[:_MOST_PLACES])}"


def _places(one: Any, two: Any) -> list[str]:
    """What differs below two values: keys and places, as in `3.loss`."""
    if isinstance(one, dict) and isinstance(two, dict):
        pairs = {key: (one.get(key), two.get(key)) for key in sorted({*one, *two})}
    elif isinstance(one, list) and isinstance(two, list):
        pairs = dict(enumerate(zip_longest(one, two)))
    else:
        return [""]
    return [f"{key}.{place}".rstrip(".") for key, (a, b) in pairs.items() if a != b for place in _places(a, b)]


def trainer_digests(run: Path, step: int) -> dict[str, str]:
    return {path.name: _sha256(path) for path in (run / f"checkpoints/step_{step:06d}/trainer").glob("*")}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def processes_below(pid: int) -> set[int]:
    """The processes that one has started and that still run."""
    found = set[int]()
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        found |= set(map(int, listed.read_text().split()))
    return found
