"""What a person sees while a run goes on: the step line, notes, a progress bar on a terminal, the final summary."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from spmdrl.observability.jsonl import number
from spmdrl.observability.screen import safe_text, show
from spmdrl.observability.step_line import StepFacts, fitted_line, full_line
from spmdrl.observability.units import duration, fixed

MAX_COLUMNS = 160
STEPS_FOR_ETA = 20


class Console:
    """Prints on rank 0; one made with `enabled=False`, for the other ranks, stays silent."""

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None):
        self._stream = stream if stream is not None else sys.stdout
        self._enabled = enabled
        self._on_terminal = self._stream.isatty()
        self._max_steps: int | None = None
        self._phase = ""
        self._progress: Progress | None = None
        self._step_seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)

    def start(self, max_steps: int, *, phase: str = "train", done_steps: int = 0) -> None:
        """Begin a loop of `max_steps` steps, whose lines start with `phase`; a terminal also gets a progress bar."""
        self.close()
        self._max_steps, self._phase = max_steps, phase
        if self._enabled and self._on_terminal:
            terminal = Terminal(file=self._stream, highlight=False)
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
            self._progress = Progress(*columns, console=terminal, transient=True)
            self._progress.start()
            self._progress.add_task(phase, total=max_steps, completed=done_steps)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step and move the bar."""
        if "time/step" in metrics:
            self._step_seconds.append(metrics["time/step"])
        pace = fmean(self._step_seconds) if self._step_seconds else None
        facts = StepFacts(step, metrics, self._max_steps, self._phase, pace)
        self._print(fitted_line(facts, self._width()) if self._on_terminal else full_line(facts))
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def note(self, text: str) -> None:
        """Print a message between steps, such as `warm start: 40 steps, loss 0.31`."""
        self._print(text)

    def summary(self, fields: Mapping[str, Any], *, phase: str = "") -> None:
        """End the loop and print the run's outcome from the fields of summary.json."""
        self.close()
        self._print(summary_block(fields, phase=phase))

    def close(self) -> None:
        """End the loop that `start` began."""
        self._max_steps, self._phase = None, ""
        self._step_seconds.clear()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _width(self) -> int:
        """Columns of the terminal, at most 160; 160 where it doesn't say."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return min(columns or MAX_COLUMNS, MAX_COLUMNS)

    def _print(self, text: str) -> None:
        if not self._enabled:
            return
        text = safe_text(text)
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            show(text, stream=self._stream)


def summary_block(fields: Mapping[str, Any], *, phase: str = "") -> str:
    """The last lines of a run: verdict, rewards, accuracies with intervals, and where things are."""
    steps, seconds = fields.get("steps"), number(fields.get("seconds"))
    length = f"{steps} steps" if steps is not None else ""
    length += f" in {duration(seconds)}" if seconds is not None else ""
    head = f"{phase} {outcome(fields)}".lstrip()
    # After the trouble's own colons another one would be lost.
    head += f" ({length.strip()})" if length and fields.get("trouble") else f": {length.strip()}" if length else ""
    rows = {
        "reward": _first_to_last(fields, "reward_first", "reward_last"),
        "accuracy": _first_to_last(fields, "accuracy_before", "accuracy_after"),
        "checkpoint": fields.get("checkpoint"),
        "report": fields.get("report"),
    }
    return "\n".join([head] + [f"  {name:<11}{text}" for name, text in rows.items() if text])


def outcome(fields: Mapping[str, Any]) -> str:
    """The verdict of a summary, with the trouble that it would hide: `done, but 4 of 5 updates were skipped: ...`."""
    trouble = fields.get("trouble")
    verdict = str(fields.get("verdict") or "ended")
    return f"{verdict}, but {'; '.join(map(str, trouble))}" if isinstance(trouble, list) and trouble else verdict


def _first_to_last(fields: Mapping[str, Any], first: str, last: str) -> str:
    if fields.get(first) is None and fields.get(last) is None:
        return ""
    return " -> ".join(_with_interval(fields.get(name), fields.get(f"{name}_interval")) for name in (first, last))


def _with_interval(value: object, interval: object) -> str:
    known = number(value)
    if known is None:
        return "?"
    ends = [number(end) for end in interval] if isinstance(interval, list) else []
    shown = ", ".join(fixed(end, 3) for end in ends if end is not None)
    return fixed(known, 3) + (f" [{shown}]" if shown else "")
