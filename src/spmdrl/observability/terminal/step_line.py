"""Line of a step: all of the run's fields in a file, and as many as fit on a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from spmdrl.nouns.roles import WorkerState
from spmdrl.observability.terminal.units import count, duration, fixed, percent, scientific

MISSING = "-"
# Short names of stages in step order; time in stages without one is `other`.
STAGE_NAMES = {state.value: state.short_name for state in WorkerState} | {
    "inference": "lp", "resharding": "reshard", "probe": "probe", "evaluation": "eval",
    "wait_for_generation": "idle-upd", "wait_for_update": "idle-gen",
}  # fmt: skip
OTHER = "other"
# Fields of a terminal's line beside reward, loss and gradient norm, the most important first.
WANTED = (
    "seconds", "pairs", "answer", "eta", "zero-adv", "longest", "len", "lr", "kl", "value", "turns", "mismatch",
    "tok/s", "ent", "mem", "timings",
)  # fmt: skip
NUM_LONGEST = 2
"""Number of stages under `longest`; the other timings come last."""


@dataclass(frozen=True)
class StepFacts:
    """Metrics of a step, and other contents of its line."""

    step: int
    metrics: Mapping[str, float]
    max_steps: int | None = None
    phase: str = ""
    """kind of the steps, such as grpo or sft"""
    seconds_per_step: float | None = None
    """pace for the estimate of the remaining time; None: this step's seconds"""


def full_line(facts: StepFacts, known: set[str]) -> str:
    """Return all fields in `known`, in a fixed order, with `-` for missing ones; adds the step's fields to `known`."""
    parts, timings = _parts(facts), _timings(facts.metrics)
    known |= {name for name, text in (parts | timings).items() if text}
    shown = {name: text or _missing(name) for name, text in parts.items() if name in known}
    inside = " ".join(f"{name} {text or MISSING}" for name, text in timings.items() if name in known)
    if inside:
        shown["seconds"] = f"{parts['seconds'] or MISSING} ({inside})"
    return " | ".join(shown[name] for name in parts if name in shown)


def fitted_line(facts: StepFacts, width: int) -> str:
    """Return the step's fields, as far as they fit; from 72 columns on, reward, loss and gradient norm always do."""
    parts = _parts(facts)
    # A terminal's columns are only spent on trouble.
    if not facts.metrics.get("health/updates_skipped"):
        parts["skipped"] = ""
    timings = {name: text for name, text in _timings(facts.metrics).items() if text is not None and float(text)}
    by_size = sorted(timings, key=lambda name: -float(timings[name] or 0))
    shown = {name for name in parts if name not in WANTED}
    for wanted in WANTED:
        stages = by_size[:NUM_LONGEST] if wanted == "longest" else by_size if wanted == "timings" else [wanted]
        for name in stages:
            if len(_joined(parts, timings, shown | {name})) <= width:
                shown.add(name)
    line = _joined(parts, timings, shown)
    return line if len(line) <= width else line[: width - 3] + "..."


def _missing(name: str) -> str:
    return f"{MISSING} {name}" if name == "tok/s" else f"{name} {MISSING}"


def _joined(parts: Mapping[str, str], timings: Mapping[str, str | None], shown: Collection[str]) -> str:
    texts = {name: text for name, text in parts.items() if name in shown}
    inside = " ".join(f"{name} {text}" for name, text in timings.items() if name in shown)
    if inside:
        texts["seconds"] = f"{texts.get('seconds', '')} ({inside})".strip()
    return " | ".join(texts[name] for name in parts if texts.get(name))


def _parts(facts: StepFacts) -> dict[str, str]:
    """Return the text of each field, empty if the step lacks it."""
    metrics, step, last = facts.metrics, facts.step, facts.max_steps
    head = f"{facts.phase} step {step}".lstrip() + ("" if last is None else f"/{last}")
    spread = f" +-{fixed(metrics['reward_std'], 2)}" if "reward_std" in metrics else ""
    margin = _part(metrics, "preference/margin", " (margin {})", lambda value: fixed(value, 3))
    explained = _part(metrics, "critic/explained_variance", " (explains {})", percent)
    cut = _part(metrics, "completions/clipped_ratio", " (cut {})", percent)
    return {
        "step": head,
        "seconds": f"{metrics['time/step']:.{_decimals(metrics)}f}s" if "time/step" in metrics else "",
        "reward": _part(metrics, "reward", "reward {}" + spread, lambda value: fixed(value, 3)),
        "pairs": _part(metrics, "preference/accuracy", "pairs {} right" + margin, percent),
        "answer": _part(metrics, "answer_probability", "answer {}", percent),
        "loss": _part(metrics, "loss", "loss {}", lambda value: fixed(value, 3)),
        "value": _part(metrics, "critic/loss", "value loss {}" + explained, lambda value: fixed(value, 3)),
        "lr": _part(metrics, "lr", "lr {}", scientific),
        "gnorm": _part(metrics, "grad_norm", "gnorm {}", lambda value: fixed(value, 2)),
        "skipped": _skipped_part(metrics),
        "zero-adv": _part(metrics, "frac_advantage_zero", "zero-adv {}", percent),
        "len": _part(metrics, "completions/mean_length", "len {}" + cut, lambda value: fixed(value, 0)),
        "turns": _part(metrics, "environment/turns", "turns {}", lambda value: fixed(value, 1)),
        "kl": _part(metrics, "kl", "kl {}", lambda value: fixed(value, 3)),
        "ent": _part(metrics, "entropy", "ent {}", lambda value: fixed(value, 2)),
        "mismatch": _part(metrics, "mismatch/abs_mean", "mismatch {}", scientific),
        "tok/s": _part(metrics, "perf/tokens_per_second", "{} tok/s", count),
        "mem": _memory_part(metrics),
        "eta": _eta_part(facts),
    }


def _part(metrics: Mapping[str, float], name: str, shape: str, text_of: Callable[[float], str]) -> str:
    return shape.format(text_of(metrics[name])) if name in metrics else ""


def _decimals(metrics: Mapping[str, float]) -> int:
    """Return the decimals of all seconds in a line, by the longest."""
    times = [value for name, value in metrics.items() if name.startswith("time/")]
    longest = metrics.get("time/step", max(times, default=0.0))
    return 0 if longest >= 100 else 1 if longest >= 1 else 2


def _timings(metrics: Mapping[str, float]) -> dict[str, str | None]:
    """Return seconds by a stage's short name; None if the step lacks it."""
    # A deeper name, such as time/update/forward, is part of its stage's seconds.
    times = {name[5:]: value for name, value in metrics.items() if name.startswith("time/") and name.count("/") == 1}
    times.pop("step", None)
    seconds: dict[str, float | None] = dict.fromkeys([*STAGE_NAMES.values(), OTHER])
    for stage, value in times.items():
        short = STAGE_NAMES.get(stage, OTHER)
        seconds[short] = (seconds[short] or 0.0) + value
    decimals = _decimals(metrics)
    return {name: None if value is None else f"{value:.{decimals}f}" for name, value in seconds.items()}


def _skipped_part(metrics: Mapping[str, float]) -> str:
    """Update of the run so far that changed nothing, of all."""
    if "health/updates" not in metrics:
        return ""
    return f"skipped {metrics.get('health/updates_skipped', 0.0):.0f}/{metrics['health/updates']:.0f}"


def _memory_part(metrics: Mapping[str, float]) -> str:
    """Return the highest peak of a device; without one, the largest process's memory."""
    peaks = [value for name, value in metrics.items() if name.startswith("mem/") and name.endswith("_peak_gib")]
    peaks = peaks or [metrics[name] for name in ("mem/resident_gib",) if name in metrics]
    if not peaks:
        return ""
    decimals = 0 if max(peaks) >= 10 else 1
    whole = f"/{metrics['mem/total_gib']:.0f}" if "mem/total_gib" in metrics else ""
    return f"mem {max(peaks):.{decimals}f}{whole} GiB"


def _eta_part(facts: StepFacts) -> str:
    pace = facts.seconds_per_step or facts.metrics.get("time/step")
    if facts.max_steps is None or pace is None or not math.isfinite(pace):
        return ""
    return f"eta {duration(max(0, facts.max_steps - facts.step) * pace)}"
