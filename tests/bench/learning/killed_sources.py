"""Sources' runs that are killed at a moment and started again, and what then differs from a run that nothing disturbs.

Runs have two ranks, 4 steps of 32 rows, and checkpoints after steps 2 and 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.observability.jsonl import read_jsonl
from tests.bench.faults.fault_jobs import FaultJobs, JobEnd, difference, outcome_of
from tests.bench.harness.train_runs import run_verb, words_of
from tests.bench.learning.foreign_sources import ANSWERS, VERIFIERS, Source, settings_of, tool_call
from tests.bench.learning.recipes import Settings
from tests.support.jobs import IN_ONE_ORDER, weights_digest

MOMENTS: Mapping[str, str] = {
    # The call is made, and the rank dies before it has recorded the answer.
    "in a call": "environment.answer:1:4:sigkill:1",
    # The answer is recorded, and its row isn't back in the engine.
    "between turns": "environment.record:0:4:sigkill:3",
    "in decoding": "generate:1:4:sigkill:1",
    "while saving": "checkpoint.rename:0:2:sigkill",
    "in an update": "backward:1:3:sigkill",
}
"""Planned faults; each costs a step of which all answers are recorded, two if the first checkpoint is lost."""
# Each step of their supervised start has a backward pass too.
_WITHOUT_ENVIRONMENT = {
    "in a call": "reward:1:4:sigkill",
    "between turns": "",
    "in an update": "backward:1:3:sigkill:1",
}
EQUAL, ONCE, NOT_TRIED = "equal", "calls once", "-"
COMPARED = "weights, optimizer, account of rows, their tokens, log-probs and observations, metrics but times"

_LAST_STEP = 4
_SHORT: Settings = {
    "train.max_steps": _LAST_STEP,
    "train.epochs_per_step": 1,
    "checkpoint.interval": 2,
    "rollout.prompts_per_step": 8,
    "rollout.num_generations": 4,
    "log.samples_per_step": 32,
    "data.eval": "null",
}
# Its jobs have to end within the time limit of FaultJobs; that of one rank has more rows.
_FEW_ROWS: Settings = {"rollout.prompts_per_step": 4, "rollout.num_generations": 2}
_FEW_STEPS: Settings = {"train.max_steps": 2}
# Of a shorter one, rewards of a prompt's rows hardly differ.
_LONG_START: Settings = {"sft.max_steps": 400, "checkpoint.interval": 0}

_IMPURE = '''
import json, secrets, time
from pathlib import Path
from spmdrl.engines.environment.episode import End, Reply

CALLS, SCRIPT = (Path(__file__).with_name(name) for name in ("calls", "script"))

def answer_to(call):
    """A counter, a clock and a random number, or what the script has."""
    if SCRIPT.exists():
        return json.loads(SCRIPT.read_text())[call]
    with CALLS.open("a") as calls:
        answer = f"{calls.tell()}.{time.time_ns() % 10**9}.{secrets.randbits(30)}"
        calls.write(json.dumps([call, answer]) + "\\n")
    return answer

class Asking:
    def open(self, row):
        return Session(row.seed)

class Session:
    def __init__(self, seed):
        self.seed, self.num_turns = seed, 0

    def step(self, turn):
        self.num_turns += 1
        if self.num_turns == 4:
            return End()
        return Reply([{"role": "user", "content": answer_to(f"{self.seed} {self.num_turns}")}])

    def restore(self, turns):
        self.num_turns = len(turns)

def ask(number: int) -> str:
    """
    Asks.

    Args:
        number: Any number.
    """
    return answer_to("")
'''
_IMPURE_SERVER = """
from impure import ask
from mcp.server.mcpserver import MCPServer

server = MCPServer("asking")
server.tool()(ask)
server.run()
"""
_ASKS_AND_ANSWERS = [tool_call("ask", number=1), tool_call("ask", number=2), *ANSWERS]
# A row without room for an observation wouldn't show it.
_ROOM: Settings = {"rollout.max_completion_length": 1024}
_SESSION = "impure: a session"
IMPURE: Mapping[str, Source] = {
    _SESSION: Source("environment.function=FOLDER/impure.py:Asking", ANSWERS, _ROOM),
    "impure: TRL's tools": Source("environment.tools=[FOLDER/impure.py:ask]", _ASKS_AND_ANSWERS, _ROOM),
    "impure: an MCP server": Source("environment.mcp=[PYTHON,FOLDER/impure_server.py]", _ASKS_AND_ANSWERS, _ROOM),
}
"""Tools that never answer alike; the session's calls are known by row and turn, so that a script can repeat them."""


def killed(name: str, source: Source, folder: Path, moments: Sequence[str]) -> dict[str, object]:
    """Return the row of a source, by moment and for one rank: `equal`, what differs, or `-` if it wasn't tried.

    `folder` has the files that the source names. Raises RuntimeError if an undisturbed run fails.
    """
    (folder / "impure.py").write_text(_IMPURE)
    (folder / "impure_server.py").write_text(_IMPURE_SERVER)
    settings = {**settings_of(source, folder, folder / "model"), **_SHORT, **(_FEW_ROWS if name == VERIFIERS else {})}
    settings |= {"model.make": "null"} if source.turns else {"sft.max_steps": 60}
    jobs = FaultJobs(folder, 2, *_words(settings))
    calls = Calls(folder) if name in IMPURE else None
    whole = None if calls else _outcome(_finished(jobs, "whole"))
    row: dict[str, object] = {"source": name}
    faults = MOMENTS if "environment." in source.setting else {**MOMENTS, **_WITHOUT_ENVIRONMENT}
    for number, moment in enumerate(moments):
        fault, run = faults[moment], folder / f"killed_{number}"
        if not fault:
            row[moment] = NOT_TRIED
        elif calls is None:
            row[moment] = _killed_once(jobs, run, fault) or difference(whole, _outcome(run)) or EQUAL
        else:
            row[moment] = _killed_beside(calls, jobs, run, fault, is_scripted=name == _SESSION)
    settings |= _FEW_STEPS if name == VERIFIERS else {}
    row["one rank"] = NOT_TRIED if calls and name != _SESSION else _on_one_rank(folder, settings, calls)
    return row


def is_kept(row: Mapping[str, object]) -> bool:
    """Return True if nothing differs and no call was made again."""
    found = [str(value) for name, value in row.items() if name != "source"]
    return all(set(value.split(", ")) <= {EQUAL, ONCE, NOT_TRIED} for value in found)


class Calls:
    """Calls of an impure tool, as it wrote them down, and the script that it follows if there is one."""

    def __init__(self, folder: Path):
        self._calls, self._script = folder / "calls", folder / "script"

    def begin(self) -> None:
        """Forget calls and script."""
        self._calls.unlink(missing_ok=True)
        self._script.unlink(missing_ok=True)

    def made(self) -> list[str]:
        """Return the answers to the calls so far."""
        return [answer for _, answer in self._lines()]

    def repeat(self) -> None:
        """Let each call be answered as its last one was."""
        self._script.write_text(json.dumps(dict(self._lines())))

    def _lines(self) -> list[list[str]]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


def made_again(run: Path, recorded: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return answers that no row of the run has, of those that were recorded before a kill or made after it.

    A call that is made again leaves one: its first answer, or its second one if that is dropped.
    """
    observations = [observation for sample in _samples(run) for _, observation in sample["turns"]]
    return sorted({*recorded, *later} - {*_found("\n".join(observations))})


def _found(text: str) -> list[str]:
    return re.findall(r"\d+\.\d+\.\d+", text)


def _killed_beside(calls: Calls, jobs: FaultJobs, run: Path, fault: str, *, is_scripted: bool) -> str:
    calls.begin()
    if problem := _killed(jobs, run, fault):
        return problem
    recorded = [text for path in (run / "environment").glob("*.jsonl") for text in _found(path.read_text())]
    before = len(calls.made())
    if problem := _again(jobs, run):
        return problem
    if again := made_again(run, recorded, calls.made()[before:]):
        return f"{len(again)} of {len(calls.made())} calls made again"
    if not is_scripted:
        return ONCE
    calls.repeat()
    whole = _outcome(_finished(jobs, f"{run.name}_whole"))
    return f"{difference(whole, _outcome(run)) or EQUAL}, {ONCE}"


def _killed_once(jobs: FaultJobs, run: Path, fault: str) -> str | None:
    return _killed(jobs, run, fault) or _again(jobs, run)


def _killed(jobs: FaultJobs, run: Path, fault: str) -> str | None:
    end = jobs.run(run.name, fault=fault)
    return None if end.is_killed else f"no rank was killed: {_tail(end)}"


def _again(jobs: FaultJobs, run: Path) -> str | None:
    end = jobs.run(run.name)
    return None if end.is_done else f"it didn't go on: {_tail(end)}"


def _finished(jobs: FaultJobs, name: str) -> Path:
    end = jobs.run(name)
    if not end.is_done:
        raise RuntimeError(f"the undisturbed run failed: {_tail(end)}")
    return jobs.root / name


def _tail(end: JobEnd) -> str:
    return f"exit codes {end.codes}, {end.screen[-400:]}"


def _outcome(run: Path) -> dict[str, Any]:
    return {**outcome_of(run), "tokens and observations": _samples(run)}


def _samples(run: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(run / "samples.jsonl"))


def _on_one_rank(folder: Path, settings: Settings, calls: Calls | None) -> str:
    """Compare rows and weights of two ranks and one, which sum up gradients in one order."""
    if "sft.max_steps" in settings:
        # A step of the supervised start has so many rows that its sums have an order per number of ranks.
        start = folder / "start"
        run_verb(words_of("sft", {**settings, **_LONG_START}, start), num_ranks=1)
        settings = {**settings, "model.make": "null", "model.path": start, "sft.max_steps": 0}
    words, found = [*_words(settings), *IN_ONE_ORDER], []
    last_step = int(str(settings["train.max_steps"]))
    if calls:
        calls.begin()
    for num_ranks in (2, 1):
        run = _finished(FaultJobs(folder, num_ranks, *words), f"ranks_{num_ranks}")
        found.append({"tokens and observations": _samples(run), "weights": weights_digest(run, last_step)})
        if calls and num_ranks == 2:
            calls.repeat()
    return difference(*found) or EQUAL


def _words(settings: Settings) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]
