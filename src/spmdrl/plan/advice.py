"""Changes of a run's settings by which it fits its devices, found by planning it anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

from spmdrl.config.config import Config
from spmdrl.nouns.roles import WorkerState
from spmdrl.plan.planned_device import NAME
from spmdrl.plan.run_plan import Plan, PlannedRun, plan_run
from spmdrl.resources.layout import GenerationLayout

Setting = tuple[str, Any]
Change = tuple[Setting, ...]
Planned = Callable[[Config], PlannedRun]
"""Returns the run with other settings; raises ValueError for some that its ranks would refuse."""
_GENERATION = frozenset({"generation", "switch"})
_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)


def advice(plan: Plan, run: PlannedRun, planned: Planned) -> list[Setting]:
    """Return settings by which a run that doesn't fit would, the first of `candidates` that suffices alone.

    Otherwise they are several of them, none of which can be left out or be milder; none if all together don't suffice.
    """
    changes = list(candidates(plan, run))

    @cache
    def plan_with(settings: Change) -> Plan | None:
        try:
            return plan_run(planned(with_settings(run.checked.config, settings)))
        except ValueError:
            return None

    def fits(settings: Change) -> bool:
        found = plan_with(settings)
        return found is not None and found.fits

    for change in changes:
        if fits(change):
            return list(change)
    together: dict[str, Change] = {}
    least = _excess(plan)
    for change in changes:
        wider = together | {_subject(change): change}
        found = plan_with(_all(wider))
        if found is None or _excess(found) > least:
            continue
        together, least = wider, _excess(found)
        if found.fits:
            return list(_all(_mildest(together, changes, fits)))
    return []


def candidates(plan: Plan, run: PlannedRun) -> Iterator[Change]:
    """Yield changes that could help, those that cost least first; milder ones come before others of their kind."""
    config, layout = run.checked.config, run.checked.layout
    slots = [slot for one in plan.ranks for slot in one.slots]
    too_large = {slot.name for slot in slots if slot.refusal or slot.peak_bytes > run.device.memory_bytes}
    share, is_refused = config.rollout.gpu_memory_utilization, any(slot.refusal for slot in slots)
    if is_refused and share < _SHARES[0]:
        yield (("rollout.gpu_memory_utilization", _SHARES[0]),)
    if not plan.is_swapped and not config.resources.ranks.generation:
        yield (("reshard.swap", "always"),)
    if "generation" in too_large and config.rollout.kv_cache_gib is not None:
        yield (("rollout.kv_cache_gib", None),)
    if "generation" in too_large and not is_refused:
        yield from ((("rollout.gpu_memory_utilization", less),) for less in _SHARES if less < share)
    judge, num_ranks = config.reward.judge, run.launch.world_size
    if judge is not None and WorkerState.JUDGE.value in too_large:
        yield (("reward.judge.kv_cache_gib", judge.kv_cache_gib / 4),)
        for tensor in _multiples(run.checked.judge_layout.tensor, num_ranks):
            yield (("reward.judge.layout.tensor", tensor),)
    if too_large - _GENERATION - {WorkerState.JUDGE.value}:
        tokens, longest = config.train.tokens_per_microbatch(NAME), run.lengths.prompt + run.lengths.response
        while tokens // 2 >= longest:
            tokens //= 2
            yield (("train.max_tokens_per_microbatch", tokens),)
        if config.train.activation_checkpointing == "none":
            yield (("train.activation_checkpointing", "full"),)
        degrees = {"data": layout.data, "shard": layout.shard, "tensor": layout.tensor}
        for less, more in (("data", "shard"), ("shard", "tensor")):
            while (factor := _smallest_factor(degrees[less])) > 1:
                degrees |= {less: degrees[less] // factor, more: degrees[more] * factor}
                yield tuple(
                    (f"resources.update.{name}", degree)
                    for name, degree in degrees.items() if degree != getattr(config.resources.update, name)
                )  # fmt: skip
    if too_large & _GENERATION:
        num_generating = len(run.checked.sets_of(num_ranks)[1])
        for tensor in _multiples(config.resources.generation.tensor, num_generating):
            yield (("resources.generation.tensor", tensor),)


def _multiples(degree: int, num_ranks: int) -> Iterator[int]:
    """Yield higher degrees that cut so many ranks evenly, each a multiple of the one before."""
    while (factor := _smallest_factor(num_ranks // degree)) > 1:
        degree *= factor
        yield degree


def _smallest_factor(number: int) -> int:
    """Return the smallest prime factor; 1 of 1."""
    return next((factor for factor in range(2, number + 1) if number % factor == 0), 1)


def with_settings(config: Config, settings: Sequence[Setting]) -> Config:
    """Return the config with other settings. Raises ValueError for some that it can't have."""
    for key, value in settings:
        config = _with(config, key.split("."), value)
    return config


def settings_text(settings: Sequence[Setting]) -> str:
    """Return settings as the command line takes them."""
    return " ".join(f"{key}={'null' if value is None else value}" for key, value in settings)


def _with(section: Any, names: Sequence[str], value: Any) -> Any:
    # A judge's layout is the only section that may be missing.
    section, (first, *rest) = GenerationLayout() if section is None else section, names
    return replace(section, **{first: _with(getattr(section, first), rest, value) if rest else value})


def _mildest(
    together: dict[str, Change], changes: Sequence[Change], fits: Callable[[Change], bool]
) -> dict[str, Change]:
    """Return the changes without those that aren't needed, and others in a milder form where it suffices."""
    for subject, change in reversed(together.items()):
        others = {name: one for name, one in together.items() if name != subject}
        milder = changes[: changes.index(change)]
        forms = [together | {subject: one} for one in milder if _subject(one) == subject]
        together = next((form for form in (others, *forms) if fits(_all(form))), together)
    return together


def _subject(change: Change) -> str:
    """Return the subject of a change, which two changes of the same one can't have together."""
    first = change[0][0]
    return "resources.update" if first.startswith("resources.update.") else first


def _all(changes: dict[str, Change]) -> Change:
    return tuple(chain.from_iterable(changes.values()))


def _excess(plan: Plan) -> tuple[int, int]:
    """Return the numbers of refused parts of a step and of bytes beyond the device's."""
    slots, room = [slot for one in plan.ranks for slot in one.slots], plan.device.memory_bytes
    return sum(bool(slot.refusal) for slot in slots), sum(max(slot.peak_bytes - room, 0) for slot in slots)
