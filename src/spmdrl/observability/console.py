"""What a person sees while a run goes on: the step line, notes, a progress bar on a terminal, the final summary."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from spmdrl.observability.units import count, duration, fixed, percent, scientific

MAX_COLUMNS = 160
STEPS_FOR_ETA = 20
STAGE_NAMES = {
    "generation": "gen", "reward": "rew", "reference": "ref", "old_logprobs": "lp", "inference": "lp",
    "advantage": "adv", "update": "upd", "resharding": "reshard", "evaluation": "eval", "checkpoint": "ckpt",
}  # fmt: skip
# What leaves the step line first when it would be too wide; metrics.jsonl keeps everything.
LEAST_NEEDED = ("gnorm", "ent", "mem", "zero-adv", "kl", "tok/s", "mismatch", "len", "eta")


def step_line(
    step: int, max_steps: int | None, metrics: Mapping[str, float], *, seconds_per_step: float | None = None
) -> str:
    """One line of at most 160 columns about a step: what isn't in `metrics` is left out, then what matters least.

    `seconds_per_step` is what the remaining time is reckoned with; without it, this step's own seconds.
    """
    parts = {
        "step": f"step {step}" if max_steps is None else f"step {step}/{max_steps}",
        "seconds": _seconds_part(metrics),
        "reward": _reward_part(metrics),
        "zero-adv": _part(metrics, "frac_reward_zero_std", "zero-adv {}", percent),
        "len": _length_part(metrics),
        "kl": _part(metrics, "kl", "kl {}", lambda value: fixed(value, 3)),
        "ent": _part(metrics, "entropy", "ent {}", lambda value: fixed(value, 2)),
        "gnorm": _part(metrics, "grad_norm", "gnorm {}", lambda value: fixed(value, 2)),
        "mismatch": _part(metrics, "mismatch/abs_mean", "mismatch {}", scientific),
        "tok/s": _part(metrics, "perf/tokens_per_second", "{} tok/s", count),
        "mem": _memory_part(metrics),
        "eta": _eta_part(step, max_steps, seconds_per_step or metrics.get("time/step")),
    }
    return _fitted({name: text for name, text in parts.items() if text})


class Console:
    """Prints on rank 0; one made with `enabled=False`, for the other ranks, stays silent."""

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None):
        self._stream = stream if stream is not None else sys.stdout
        self._enabled = enabled
        self._max_steps: int | None = None
        self._progress: Progress | None = None
        self._step_seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)

    def start(self, max_steps: int, *, title: str = "train", done_steps: int = 0) -> None:
        """Begin a loop of `max_steps` steps; a terminal also gets a progress bar below the lines."""
        self.close()
        self._max_steps = max_steps
        if self._enabled and self._stream.isatty():
            terminal = Terminal(file=self._stream, highlight=False)
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
            self._progress = Progress(*columns, console=terminal, transient=True)
            self._progress.start()
            self._progress.add_task(title, total=max_steps, completed=done_steps)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step and move the bar."""
        if "time/step" in metrics:
            self._step_seconds.append(metrics["time/step"])
        pace = fmean(self._step_seconds) if self._step_seconds else None
        self._print(step_line(step, self._max_steps, metrics, seconds_per_step=pace))
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def note(self, text: str) -> None:
        """Print a message between steps, such as `warm start: 40 steps, loss 0.31`."""
        self._print(text)

    def summary(self, fields: Mapping[str, Any], *, next_command: str = "") -> None:
        """End the loop and print the run's outcome from the fields of summary.json."""
        self.close()
        self._print(summary_block(fields, next_command=next_command))

    def close(self) -> None:
        """End the loop that `start` began."""
        self._max_steps = None
        self._step_seconds.clear()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, text: str) -> None:
        if not self._enabled:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)


def summary_block(fields: Mapping[str, Any], *, next_command: str = "") -> str:
    """The last lines of a run: verdict, rewards, accuracies with intervals, where things are, what to do next."""
    steps, seconds = fields.get("steps"), fields.get("seconds")
    head = str(fields.get("verdict") or "ended")
    head += f": {steps} steps" if steps is not None else ""
    head += f" in {duration(float(seconds))}" if seconds is not None else ""
    rows = {
        "reward": _first_to_last(fields, "reward_first", "reward_last"),
        "accuracy": _first_to_last(fields, "accuracy_before", "accuracy_after"),
        "checkpoint": fields.get("checkpoint"),
        "report": fields.get("report"),
        "next": next_command,
    }
    return "\n".join([head] + [f"  {name:<11}{text}" for name, text in rows.items() if text])


def _first_to_last(fields: Mapping[str, Any], first: str, last: str) -> str:
    if fields.get(first) is None and fields.get(last) is None:
        return ""
    return " -> ".join(_with_interval(fields.get(name), fields.get(f"{name}_interval")) for name in (first, last))


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "?"
    ends = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{value:.3f}{ends}"


def _fitted(parts: dict[str, str]) -> str:
    for name in LEAST_NEEDED:
        if len(" | ".join(parts.values())) <= MAX_COLUMNS:
            break
        parts.pop(name, None)
    line = " | ".join(parts.values())
    return line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 3] + "..."


def _part(metrics: Mapping[str, float], name: str, shape: str, text_of: Callable[[float], str]) -> str:
    return shape.format(text_of(metrics[name])) if name in metrics else ""


def _seconds_part(metrics: Mapping[str, float]) -> str:
    # A deeper name, such as time/update/forward, is part of its stage's seconds.
    times = {name[5:]: value for name, value in metrics.items() if name.startswith("time/") and name.count("/") == 1}
    whole = times.pop("step", None)
    longest = whole if whole is not None else max(times.values(), default=0.0)
    decimals = 0 if longest >= 100 else 1 if longest >= 1 else 2
    seconds: dict[str, float] = {}
    for stage in _loop_order(times):
        short = STAGE_NAMES.get(stage, stage)
        seconds[short] = seconds.get(short, 0.0) + times[stage]
    # Stages that would read as 0 only cost columns.
    shown = [f"{name} {value:.{decimals}f}" for name, value in seconds.items() if value >= 0.5 * 10**-decimals]
    stages = f"({' '.join(shown)})" if shown else ""
    return stages if whole is None else f"{whole:.{decimals}f}s {stages}".rstrip()


def _loop_order(stages: Mapping[str, float]) -> list[str]:
    order = list(STAGE_NAMES)
    return sorted(stages, key=lambda stage: (order.index(stage) if stage in order else len(order), stage))


def _reward_part(metrics: Mapping[str, float]) -> str:
    if "reward" not in metrics:
        # Supervised steps have a loss in the reward's place.
        return _part(metrics, "loss", "loss {}", lambda value: fixed(value, 3))
    spread = f" +-{fixed(metrics['reward_std'], 2)}" if "reward_std" in metrics else ""
    return f"reward {fixed(metrics['reward'], 3)}{spread}"


def _length_part(metrics: Mapping[str, float]) -> str:
    clipped = _part(metrics, "completions/clipped_ratio", " (clip {})", percent)
    return _part(metrics, "completions/mean_length", "len {}" + clipped, lambda value: fixed(value, 0))


def _memory_part(metrics: Mapping[str, float]) -> str:
    peaks = [value for name, value in metrics.items() if name.startswith("mem/") and name.endswith("_peak_gib")]
    if not peaks:
        return ""
    decimals = 0 if max(peaks) >= 10 else 1
    whole = f"/{metrics['mem/total_gib']:.0f}" if "mem/total_gib" in metrics else ""
    return f"mem {max(peaks):.{decimals}f}{whole} GiB"


def _eta_part(step: int, max_steps: int | None, seconds_per_step: float | None) -> str:
    if max_steps is None or seconds_per_step is None or not math.isfinite(seconds_per_step):
        return ""
    return f"eta {duration(max(0, max_steps - step) * seconds_per_step)}"
