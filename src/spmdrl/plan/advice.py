"""Changes of a run's settings by which it fits its devices, found by planning it anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from spmdrl.config.config import Config
from spmdrl.plan.run_plan import Plan, PlannedRun, plan_run

Setting = tuple[str, Any]
Planned = Callable[[Config], PlannedRun]
"""Returns the run with other settings; raises ValueError for some that its ranks would refuse."""
_LARGEST_SHARE = 0.9


def advice(plan: Plan, run: PlannedRun, planned: Planned) -> list[Setting]:
    """Return settings by which a run that doesn't fit would, the first one of `_candidates` that suffices alone.

    Otherwise they are as many of them together as it takes; none if all together don't suffice.
    """
    config = run.checked.config
    for settings in _candidates(plan, run):
        found = _plan_with(config, settings, planned)
        if found is not None and found.fits:
            return settings
    together: list[Setting] = []
    least = plan.ranks[0].fullest.peak_bytes
    for settings in _candidates(plan, run):
        found = _plan_with(config, [*together, *settings], planned)
        if found is None or found.ranks[0].fullest.peak_bytes >= least:
            continue
        together, least = [*together, *settings], found.ranks[0].fullest.peak_bytes
        if found.fits:
            return together
    return []


def _candidates(plan: Plan, run: PlannedRun) -> Iterator[list[Setting]]:
    """Yield changes that could help, those that cost least first."""
    config, kind = run.checked.config, run.device.kernels
    slots = [slot for one in plan.ranks for slot in one.slots]
    too_large = {slot.name for slot in slots if slot.refusal or slot.peak_bytes > run.device.memory_bytes}
    generates = bool(too_large & {"generation", "switch"})
    if not plan.is_swapped and not config.resources.ranks.generation:
        yield [("reshard.swap", "always")]
    if any(slot.refusal for slot in slots) and config.rollout.gpu_memory_utilization < _LARGEST_SHARE:
        yield [("rollout.gpu_memory_utilization", _LARGEST_SHARE)]
    if too_large - {"generation", "switch"}:
        tokens, longest = config.train.tokens_per_microbatch(kind), run.lengths.prompt + run.lengths.response
        while tokens // 2 >= longest:
            tokens //= 2
            yield [("train.max_tokens_per_microbatch", tokens)]
        if config.train.activation_checkpointing == "none":
            yield [("train.activation_checkpointing", "full")]
        layout = run.checked.layout
        if layout.data % 2 == 0:
            halves = layout.data // 2, layout.shard * 2
            yield [("resources.update.data", halves[0]), ("resources.update.shard", halves[1])]
        elif layout.shard % 2 == 0:
            yield [("resources.update.shard", layout.shard // 2), ("resources.update.tensor", layout.tensor * 2)]
    if generates:
        yield [("resources.generation.tensor", config.resources.generation.tensor * 2)]


def _plan_with(config: Config, settings: Sequence[Setting], planned: Planned) -> Plan | None:
    """Return the plan with other settings; None if they are refused."""
    try:
        return plan_run(planned(with_settings(config, settings)))
    except ValueError:
        return None


def with_settings(config: Config, settings: Sequence[Setting]) -> Config:
    """Return the config with other values of some keys, unchecked."""
    for key, value in settings:
        config = _with(config, key.split("."), value)
    return config


def _with(section: Any, names: Sequence[str], value: Any) -> Any:
    first, *rest = names
    return replace(section, **{first: _with(getattr(section, first), rest, value) if rest else value})
