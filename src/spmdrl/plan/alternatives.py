"""The same run under other layouts, or on more nodes, each planned anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter

from spmdrl.config.config import Config
from spmdrl.job.start.estimates import rank_bytes
from spmdrl.nouns.roles import POLICY
from spmdrl.plan.advice import Planned, Setting, settings_text, with_settings
from spmdrl.plan.planned_device import NAME
from spmdrl.plan.run_plan import Plan, PlannedRun, plan_run
from spmdrl.resources.layout import UpdateLayout
from spmdrl.runtime.launch import LaunchEnvironment

MOST_DEVICES = 10_000
# Each plan takes seconds to minutes.
MOST_LAYOUTS = 10
_GROWTH = 4


@dataclass(frozen=True)
class Alternative:
    """A run with other settings."""

    settings: Sequence[Setting]
    plan: Plan

    @property
    def rate(self) -> float:
        """Tokens per second and device; 0 if it doesn't fit."""
        return self.plan.times.tokens_per_second_per_device if self.plan.times and self.plan.fits else 0.0

    def line(self) -> str:
        settings = settings_text(self.settings) or "(as it is)"
        peak = self.plan.ranks[0].fullest.peak_bytes / self.plan.device.memory_bytes
        rate = f"{self.rate:10.4g}" if self.plan.fits else "         -"
        return f"{rate}  {peak:4.0%} of memory  {settings}"


def better_layouts(run: PlannedRun, planned: Planned) -> list[Alternative]:
    """Return layouts, the fastest first: of updates, then, with the fastest of these, of generation and sets of ranks.

    A run with sets of ranks is planned without them, too. Layouts whose weights and optimizer alone don't fit are left
    out, and of the others the ones that cut a model least are planned.
    """
    config, found = run.checked.config, list[Alternative]()

    def try_all(candidates: Iterator[list[Setting]], most: int) -> list[Setting]:
        number = 0
        for settings in candidates:
            if number == most:
                break
            try:
                other = planned(with_settings(config, settings))
                if not _may_fit(other):
                    continue
                changed = [(key, value) for key, value in settings if _value(run, key) != value]
                found.append(Alternative(changed, plan_run(other)))
            except ValueError:
                # The ranks would refuse it.
                continue
            number += 1
        fastest = max(found, key=lambda one: one.rate, default=None)
        return [] if fastest is None else list(fastest.settings)

    best = try_all(_update_layouts(run), MOST_LAYOUTS)
    best = try_all(([*best, ("resources.generation.tensor", degree)] for degree in _degrees(run)), MOST_LAYOUTS)
    try_all(_rank_sets(run, best), MOST_LAYOUTS)
    return sorted(found, key=lambda one: -one.rate)


def _value(run: PlannedRun, key: str) -> object:
    """Return the run's value of a setting; open degrees of its layout are filled in."""
    section, _, name = key.rpartition(".")
    return getattr(
        run.checked.layout if section == "resources.update" else attrgetter(section)(run.checked.config), name
    )


def _may_fit(run: PlannedRun) -> bool:
    owners = rank_bytes(run.checked, {role: one.decoder for role, one in run.sources.items()}, run.launch, NAME)
    trained = sum(size for owner, size in owners.items() if owner not in ("generation_weights", "kv_cache"))
    return max(trained, owners.get("generation_weights", 0)) <= run.device.memory_bytes


def _degrees(run: PlannedRun) -> Iterator[int]:
    """Yield other degrees of tensor parallelism in generation, within a node."""
    degree = 1
    while degree <= run.launch.local_world_size:
        if degree != run.checked.config.resources.generation.tensor:
            yield degree
        degree *= 2


def _update_layouts(run: PlannedRun) -> Iterator[list[Setting]]:
    """Yield layouts of updates on the ranks that train, those that cut layers least first."""
    decoder, num_ranks = run.sources[POLICY].decoder, run.checked.layout.num_ranks
    powers = [1 << power for power in range(num_ranks.bit_length()) if num_ranks % (1 << power) == 0]
    experts = [1] if decoder.moe is None else [one for one in powers if decoder.moe.num_experts % one == 0]
    cuts = product(powers, (one for one in powers if one <= decoder.num_layers), experts)
    for tensor, pipeline, expert in sorted(cuts, key=lambda one: (one[0] * one[1], -one[2])):
        left = num_ranks // (tensor * pipeline)
        if tensor > run.launch.local_world_size or not left or left % expert:
            continue
        for shard in dict.fromkeys((left, min(left, run.launch.local_world_size // tensor))):
            layout = UpdateLayout(left // shard, shard, pipeline=pipeline, tensor=tensor, expert=expert)
            yield [
                (f"resources.update.{name}", getattr(layout, name))
                for name in ("data", "shard", "pipeline", "context", "tensor", "expert")
            ]  # fmt: skip


def _rank_sets(run: PlannedRun, best: list[Setting]) -> Iterator[list[Setting]]:
    """Yield sets of ranks that generate the next step's rows, beside updates under the best degrees on the others."""
    num_ranks, layout, rollout = run.launch.world_size, run.checked.layout, run.checked.config.rollout
    names = ("pipeline", "context", "tensor")
    degrees = {f"resources.update.{name}": getattr(layout, name) for name in names} | dict(best)
    cut, own = math.prod(degrees[f"resources.update.{name}"] for name in names), run.checked.config.resources.ranks
    for generating in dict.fromkeys((num_ranks // 2, num_ranks // 4, 0)):
        shard, rest = divmod(num_ranks - generating, cut)
        if shard and not rest and generating != own.generation:
            sets = {"resources.update.data": 1, "resources.update.shard": shard, "resources.update.expert": 1}
            lag = max(rollout.lag, 1) if generating else 0
            yield [*(degrees | sets).items(), ("resources.ranks.generation", generating), ("rollout.lag", lag)]


def on_more_nodes(run: PlannedRun, planned: Callable[[Config, LaunchEnvironment], PlannedRun]) -> Iterator[Plan]:
    """Yield the plans of ever more replicas of a run, each of whose nodes has as many prompts, to 10,000 devices."""
    config, layout, launch = run.checked.config, run.checked.layout, run.launch
    times = 1
    while times * launch.world_size <= MOST_DEVICES:
        own = ((f"{role.section}.layout", cut) for role, cut in run.checked.own_layouts.items())
        layouts = [("resources.update", layout), *own]
        settings: list[Setting] = [
            *((f"{key}.data", cut.data * times) for key, cut in layouts),
            *((f"{key}.shard", cut.shard) for key, cut in layouts),
            ("rollout.prompts_per_step", config.rollout.prompts_per_step * times),
            ("resources.ranks.generation", config.resources.ranks.generation * times),
        ]
        larger = replace(launch, world_size=launch.world_size * times)
        yield plan_run(planned(with_settings(config, settings), larger))
        most = MOST_DEVICES // launch.world_size
        times = most if times < most < times * _GROWTH else times * _GROWTH
