"""How a training run ends: exit code, verdict and line, by what happened. docs/failures.md has the same table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spmdrl.runtime.supervision.stop_request import INTERRUPTED, UNSAVED, code_of_stop, stop_words


@dataclass(frozen=True)
class EndFacts:
    """Events of a run that decide its end, alike on all ranks."""

    place: str
    """such as `step 12 of 200`"""
    asked: str | None = None
    """what asked it to stop, such as SIGTERM; None: nothing did"""
    failure: str | None = None
    """the first failure of all ranks; None: none failed"""
    unsaved: str | None = None
    """why the last finished step is in no checkpoint; None where it is, and where there is none"""
    newest: Path | None = None
    """the newest checkpoint"""


@dataclass(frozen=True)
class End:
    """Exit code, verdict and line of a run that ends."""

    code: int
    """the exit code"""
    verdict: str
    """of summary.json"""
    line: str
    """for the screen and the summary's `error`; empty for a run that is done"""


def end_of(facts: EndFacts) -> End:
    """Decide how the run ends: a failure comes before a request, and 75 means that everything has been saved."""
    if facts.failure is not None:
        return End(1, "failed", facts.failure)
    if facts.asked is None and facts.unsaved is None:
        return End(0, "done", "")
    code = 0 if facts.asked is None else code_of_stop(facts.asked)
    what = "finished" if facts.asked is None else stop_words(facts.asked)
    goes_on = f"goes on from {facts.newest}" if facts.newest else "starts anew"
    if facts.unsaved is not None:
        return End(UNSAVED, "unsaved", f"{what} in {facts.place}, but {facts.unsaved}; the same command {goes_on}")
    before = ";" if facts.newest else ", before a checkpoint;"
    verdict = "interrupted" if code == INTERRUPTED else "stopped"
    return End(code, verdict, f"{what} in {facts.place}{before} the same command {goes_on}")
