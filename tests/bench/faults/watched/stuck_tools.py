"""Tools that hang, raise, exit or return nonsense or too much, and ones that one group waits for: the job goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.bench.faults.fault_jobs import FaultJobs, JobEnd
from tests.bench.faults.fault_tally import Tally

_NUM_ROWS = 32
_STEP_SECONDS = 0.02
_SLOWER = 100
_TURNS = ("rollout.stop=[1, 2, 3, 4, 5, 6]", "rollout.max_completion_length=12", "data.eval=null", "train.max_steps=3")
_POISONED = """
import os, sys, time
from pathlib import Path
from spmdrl.engines.environment.episode import End, Episode, Observation

def with_child():
    os.fork()
    time.sleep(60)

def hog():
    blocks = []
    while True:
        blocks.append(bytearray(1 << 24))

POISONS = {
    "hangs": lambda: time.sleep(60), "raises": lambda: 1 / 0, "exits": lambda: sys.exit(0),
    "ends its process": lambda: os._exit(0), "hangs beside a child of its own": with_child,
    "takes all memory": hog, "returns 100 MB": lambda: Observation("1" * 100_000_000),
    "returns no observation": lambda: 7, "returns half a surrogate": lambda: Observation(chr(0xD800)),
}

class Tool:
    def step(self, episode: Episode):
        if episode.seed % 10 == 0:
            with open(Path(__file__).with_suffix(".poisoned"), "a") as file:
                file.write("1")
            return POISONS["POISON"]()
        return End() if len(episode.turns) == 2 else Observation("1")
"""
_VERDICTS = {
    "hangs": "timed_out", "hangs beside a child of its own": "timed_out", "raises": "crashed", "exits": "crashed",
    "ends its process": "crashed", "takes all memory": "crashed", "returns 100 MB": "malformed",
    "returns no observation": "malformed", "returns half a surrogate": "malformed",
}  # fmt: skip
_STRAGGLING = """
import os, time
from pathlib import Path
from spmdrl.engines.environment.episode import End, Episode, Observation

class Tool:
    def step(self, episode: Episode):
        path = Path(__file__).with_suffix(".straggler")
        try:
            with open(path, "x") as file:
                file.write(str(episode.prompt))
        except FileExistsError:
            pass
        time.sleep(SECONDS * (SLOWER if path.read_text() == str(episode.prompt) else 1))
        return End() if len(episode.turns) == 2 else Observation("1")
"""


def tools(root: Path, *, is_short: bool, part: tuple[int, int]) -> list[Tally]:
    """Each poison in a tenth of the rows, on one rank and on two; then one group whose tool takes 100 x longer."""
    poisoned = Tally("tools", f"a tool that {', '.join(_VERDICTS)}: rows without a reward, and no process left")
    cases = [(poison, num_ranks) for num_ranks in (1, 2) for poison in _VERDICTS]
    for index, (poison, num_ranks) in enumerate(cases[4:5] if is_short else cases):
        if index % part[1] == part[0]:
            folder = root / f"poison_{index}"
            folder.mkdir()
            with poisoned.timed(f"{poison}, {num_ranks} ranks") as problems:
                problems += _poison_problems(folder, poison, num_ranks)
    return [poisoned, *_stragglers(root, is_short, part)]


def _poison_problems(folder: Path, poison: str, num_ranks: int) -> list[str]:
    tool = folder / "tool.py"
    tool.write_text(_POISONED.replace('POISON"', f'{poison}"'))
    jobs = FaultJobs(folder, num_ranks, *_TURNS)
    end = jobs.run(
        "run", f"environment.function={tool}:Tool", "environment.timeout_seconds=2",
        "environment.memory_limit_gib=0.2", "reward.max_error_rate=1",
    )  # fmt: skip
    if problem := _not_gone_on(end, folder / "run"):
        return [problem]
    marks, steps = tool.with_suffix(".poisoned"), _metrics(folder / "run")
    num_poisoned = len(marks.read_text()) if marks.exists() else 0
    errors = {name: sum(step.get(f"reward/errors/{name}", 0) for step in steps) for name in set(_VERDICTS.values())}
    # On a loaded machine, the time may be over before the memory is.
    of_this = {_VERDICTS[poison], "timed_out"} if poison == "takes all memory" else {_VERDICTS[poison]}
    num_right = sum(errors[name] for name in of_this)
    is_right = num_poisoned == num_right == sum(errors.values())
    return [] if num_poisoned and is_right else [f"{num_poisoned} poisoned, {errors}"]


def _stragglers(root: Path, is_short: bool, part: tuple[int, int]) -> list[Tally]:
    tally = Tally("tools", f"a group whose tool takes {_SLOWER} x longer than the others'")
    several = ("rollout.partial_max_rounds=3", "rollout.partial_extra_prompts=4")
    cases = [(num_ranks, settings) for num_ranks in (1, 2) for settings in ((), several)]
    cases.append((2, ("resources.generation.tensor=2",)))
    for index, (num_ranks, settings) in enumerate(cases[:1] if is_short else cases):
        if index % part[1] == part[0]:
            folder = root / f"straggler_{index}"
            folder.mkdir()
            tool = folder / "tool.py"
            words = _STRAGGLING.replace("SECONDS", str(_STEP_SECONDS)).replace("SLOWER", str(_SLOWER))
            tool.write_text(words)
            with tally.timed(f"{num_ranks} ranks {settings}") as problems:
                jobs = FaultJobs(folder, num_ranks, *_TURNS, *settings)
                end = jobs.run("run", f"environment.function={tool}:Tool", "environment.workers=4")
                problem = _not_gone_on(end, folder / "run")
                trained = [step["dock/trained"] for step in _metrics(folder / "run")]
                problem = problem or (None if trained == [_NUM_ROWS] * 3 else f"rows trained {trained}")
                problems += [problem] if problem else []
    return [tally]


def _not_gone_on(end: JobEnd, run: Path) -> str | None:
    if not end.is_done:
        return f"exit codes {end.codes}: {end.screen[-400:]}"
    if end.left:
        return f"processes {end.left} are left"
    return None if len(_metrics(run)) == 3 else "steps are missing"


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
