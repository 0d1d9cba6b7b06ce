"""Output of a run: step lines, notes, a progress bar on a terminal, and the final summary."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from spmdrl.observability.jsonl import number
from spmdrl.observability.summary import passes_of
from spmdrl.observability.terminal.step_line import StepFacts, fitted_line, full_line
from spmdrl.observability.terminal.units import duration, fixed
from spmdrl.runtime.screen import safe_text, show

MAX_COLUMNS = 160
STEPS_FOR_ETA = 20
SILENT_SECONDS = 5.0
"""duration from which an activity is shown in a log too"""


class Console:
    """Console of rank 0; with `enabled=False`, for the other ranks, it stays silent."""

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None, silent_seconds: float = SILENT_SECONDS):
        self._silent_seconds = silent_seconds
        self._stream = stream if stream is not None else sys.stdout
        self._enabled = enabled
        self._on_terminal = self._stream.isatty()
        self._terminal = Terminal(file=self._stream, highlight=False) if self._on_terminal and enabled else None
        self._max_steps: int | None = None
        self._phase, self._every = "", 1
        self._fields: set[str] = set()
        """fields that steps of this loop had"""
        self._bar: Progress | None = None
        self._spinner: Progress | None = None
        self._doing: list[tuple[str, float]] = []
        """present activities, innermost last, with their start"""
        self._step_seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)

    def start(self, max_steps: int, *, phase: str = "train", done_steps: int = 0, every: int = 1) -> None:
        """Begin a loop of `max_steps` steps, whose lines start with `phase`; a terminal also gets a progress bar.

        Lines are printed for the first step and every multiple of `every`.
        """
        self.close()
        self._max_steps, self._phase, self._every = max_steps, phase, every
        if self._terminal is not None:
            columns = (BarColumn(bar_width=None), MofNCompleteColumn(), _Doing())
            text = TextColumn("{task.description}", markup=False)
            self._bar = Progress(text, *columns, console=self._terminal, transient=True)
            self._bar.start()
            self._bar.add_task(phase, total=max_steps, completed=done_steps, doing=None)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show this block's activity: at once on a terminal, after 5 seconds in a log."""
        started = time.monotonic()
        timer = threading.Timer(self._silent_seconds, self.note, [f"{what} ..."])
        timer.daemon = True
        if self._enabled and not self._on_terminal:
            timer.start()
        try:
            with self.stage(what):
                yield
        finally:
            timer.cancel()
        if (seconds := time.monotonic() - started) > self._silent_seconds:
            self.note(f"{what}: {duration(seconds)}")

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Show this block's activity and its duration on a terminal."""
        self._doing.append((safe_text(what), time.monotonic()))
        self._refresh()
        try:
            yield
        finally:
            self._doing.pop()
            self._refresh()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step and move the bar."""
        if "time/step" in metrics:
            self._step_seconds.append(metrics["time/step"])
        pace = fmean(self._step_seconds) if self._step_seconds else None
        facts = StepFacts(step, metrics, self._max_steps, self._phase, pace)
        if step <= 1 or step % self._every == 0:
            self._print(fitted_line(facts, self._width()) if self._on_terminal else full_line(facts, self._fields))
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def note(self, text: str) -> None:
        """Print a message between steps, such as `warm start: 40 steps, loss 0.31`."""
        self._print(text)

    def summary(self, fields: Mapping[str, Any], *, phase: str = "") -> None:
        """End the loop and print the run's outcome from the fields of summary.json."""
        self.close()
        self._print(summary_block(fields, phase=phase))

    def close(self) -> None:
        """End the loop that `start` began."""
        self._max_steps, self._phase, self._every = None, "", 1
        self._fields.clear()
        self._step_seconds.clear()
        for live in (self._bar, self._spinner):
            if live is not None:
                live.stop()
        self._bar = self._spinner = None

    def _refresh(self) -> None:
        """Show the innermost activity beside the bar, or with a spinner if there is none."""
        now = self._doing[-1] if self._doing else None
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], doing=now)
        elif self._terminal is not None and now is None and self._spinner is not None:
            self._spinner.stop()
            self._spinner = None
        elif self._terminal is not None and now is not None:
            if self._spinner is None:
                self._spinner = Progress(SpinnerColumn(), _Doing(), console=self._terminal, transient=True)
                self._spinner.start()
                self._spinner.add_task("", total=None)
            self._spinner.update(self._spinner.task_ids[0], doing=now)

    def _width(self) -> int:
        """Return the terminal's columns, at most 160; 160 if unknown."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return min(columns or MAX_COLUMNS, MAX_COLUMNS)

    def _print(self, text: str) -> None:
        if not self._enabled:
            return
        if self._terminal is not None:
            self._terminal.print(safe_text(text), markup=False, highlight=False, soft_wrap=True)
        else:
            show(text, stream=self._stream)


class _Doing(ProgressColumn):
    """Column with the present activity and its duration."""

    def render(self, task: Task) -> Text:
        doing = task.fields.get("doing")
        return Text("" if doing is None else f"{doing[0]} {duration(time.monotonic() - doing[1])}")


def summary_block(fields: Mapping[str, Any], *, phase: str = "") -> str:
    """Return the last lines of a run: verdict, rewards, accuracies with intervals, and paths."""
    steps, seconds = fields.get("steps"), number(fields.get("seconds"))
    length = f"{steps} steps" if steps is not None else ""
    length += f" in {duration(seconds)}" if seconds is not None else ""
    head = f"{phase} {outcome(fields)}".lstrip()
    # The trouble has colons of its own, so parentheses are clearer.
    head += f" ({length.strip()})" if length and fields.get("trouble") else f": {length.strip()}" if length else ""
    tenth = fields.get("reward_steps")
    sampled = f" (sampled, first and last {'step' if tenth == 1 else f'{tenth} steps'})" if tenth else ""
    how = "greedy" if fields.get("eval_num_samples") == 1 else "sampled"
    held_out = _first_to_last(fields, "eval_reward_before", "eval_reward_after")
    rows = {
        "reward": (text := _first_to_last(fields, "reward_first", "reward_last")) and text + sampled,
        "held-out": held_out and f"{held_out} ({how})",
        "accuracy": _accuracy(fields, how),
        **{name: _first_to_last(fields, f"{key}_before", f"{key}_after") for name, key in passes_of(fields).items()},
        "checkpoint": fields.get("checkpoint"),
        "best": best_text(fields),
        "report": fields.get("report"),
    }
    return "\n".join([head] + [f"  {name:<11}{text}" for name, text in rows.items() if text])


def outcome(fields: Mapping[str, Any]) -> str:
    """Return the verdict of a summary, with its trouble: `done, but 4 of 5 updates were skipped: ...`."""
    trouble = fields.get("trouble")
    verdict = str(fields.get("verdict") or "ended")
    return f"{verdict}, but {'; '.join(map(str, trouble))}" if isinstance(trouble, list) and trouble else verdict


def best_text(fields: Mapping[str, Any]) -> str:
    """Return the best checkpoint of a summary; empty if none was kept for its value."""
    best = fields.get("best")
    if not isinstance(best, list) or not best:
        return ""
    metric, value, step, folder = (best[0].get(name) for name in ("metric", "value", "step", "checkpoint"))
    return f"{folder} ({metric} {_with_interval(value, None)} in step {step})"


def _accuracy(fields: Mapping[str, Any], how: str) -> str:
    """Return the accuracy's text; empty if rewards aren't verdicts."""
    if fields.get("rewards_are_verdicts") is False:
        return ""
    text, rule = _first_to_last(fields, "accuracy_before", "accuracy_after"), fields.get("accuracy_rule")
    return f"{text} (held-out, {how}; {rule})" if text and rule else text


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
