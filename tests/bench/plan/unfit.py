"""Runs that don't fit their devices, and the changes that plans propose for them, judged by dry runs.

Each case is a config with a device too small for it. The proposed change must let all ranks fit when all of their
micro-batches run, and must be the smallest: no change that costs less does so, nor what is left of several without one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from spmdrl.config.config import load_config
from spmdrl.plan.advice import Change, advice, candidates, settings_text, with_settings
from spmdrl.plan.rank_plan import rank_classes
from spmdrl.plan.run_plan import Plan, PlannedRun, dry_run_rank, plan_run
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.verbs.planning import planned_run
from tests.bench.harness.bench_table import BenchTable
from tests.bench.plan.plan_cases import CASES as PLANS
from tests.bench.plan.plan_cases import LENGTHS

_FITS = Callable[[Change], bool]


@dataclass(frozen=True)
class UnfitCase:
    """One of the plans' cases with other settings, on a device without room for it."""

    name: str
    plan: str
    memory_mib: float
    settings: tuple[str, ...] = ()

    def with_device(self, folder: Path) -> tuple[PlannedRun, Callable[..., PlannedRun]]:
        """Return the run, and a function that returns it with another config."""
        (plan,) = (one for one in PLANS if one.name == self.plan)
        profile, (file, *settings) = folder / "small.yaml", plan.settings
        profile.write_text(f"{{memory_gib: {self.memory_mib / 1024}, kernels: cuda}}\n")
        loaded = load_config([Path(file)], [*settings, *_FEW, *self.settings])
        launch = LaunchEnvironment(world_size=plan.num_ranks, local_world_size=plan.num_ranks)

        def with_config(config: object) -> PlannedRun:
            changed = replace(loaded, value=config)
            return planned_run(changed, launch, str(profile), LENGTHS.prompt, LENGTHS.response, None)

        return with_config(loaded.value), with_config


# Half of the layers, and no more rows than it takes to fill several micro-batches.
_FEW = ("model.make.num_hidden_layers=2", "rollout.prompts_per_step=4")
_ROW, _NEVER, _ALWAYS = ("train.max_tokens_per_microbatch=48",), ("reshard.swap=never",), ("reshard.swap=always",)
_SHARE, _LITTLE = ("rollout.kv_cache_gib=null",), ("rollout.kv_cache_gib=0.01",)
_WIDE = (
    "model.make.hidden_size=1024", "model.make.intermediate_size=4096", "model.make.num_hidden_layers=4",
)  # fmt: skip
_DEEP = (
    "model.make.hidden_size=64", "model.make.intermediate_size=256", "model.make.num_hidden_layers=8",
    "rollout.kv_cache_gib=0.001",
)  # fmt: skip
_CUT = ("resources.update.shard=2", "resources.update.tensor=4")
CASES = [
    UnfitCase("update", "dense, no swap", 70),
    UnfitCase("update, by far", "dense, no swap", 56),
    UnfitCase("update, hybrid", "hybrid, no swap", 80),
    UnfitCase("update, bfloat16", "dense, bfloat16", 60),
    UnfitCase("generation, experts", "moe, expert", 75),
    UnfitCase("update, adapters of experts", "moe, adapters", 46),
    UnfitCase("update, critic", "dense, critic", 85),
    UnfitCase("update, pipeline", "dense, pipeline", 48),
    UnfitCase("update, rank sets", "dense, rank sets", 60),
    UnfitCase("generation, 4 ranks", "dense, shard 4", 37),
    UnfitCase("one row a micro-batch", "dense, adapters", 6, _ROW + _DEEP),
    UnfitCase("optimizer, replicas", "dense, replicas", 48, _ROW + _LITTLE),
    UnfitCase("optimizer, gathered layers", "dense, shard", 32, _ROW + _LITTLE),
    UnfitCase("optimizer, experts", "moe, shard", 90, _ROW + _ALWAYS),
    UnfitCase("generation", "latent, no swap", 135, ("rollout.kv_cache_gib=0.08",)),
    UnfitCase("generation, cache too large", "dense, swap", 60, (*_ROW, "rollout.kv_cache_gib=0.2")),
    UnfitCase(
        "generation, no room beside cache", "dense, swap", 36,
        (*_ROW, *_SHARE, "rollout.gpu_memory_utilization=1.0"),
    ),
    UnfitCase("cache refused", "dense, no swap", 36, _ROW + _SHARE),
    UnfitCase("cache refused, by its size", "dense, no swap", 60, (*_ROW, "rollout.kv_cache_gib=0.0001")),
    UnfitCase("cache refused, 8 ranks", "dense, shard 8", 330, _WIDE + _ROW + _SHARE + _CUT),
    UnfitCase("switch", "dense, shard 8", 375, _WIDE + _ROW + _NEVER),
    UnfitCase("switch, swapped", "dense, shard 8", 280, _WIDE + _ROW + _CUT),
    UnfitCase("generation and update", "dense, no swap", 75, ("rollout.kv_cache_gib=0.06",)),
    UnfitCase("generation and update, reference", "dense, reference", 60),
    UnfitCase("cache refused, and update", "dense, no swap", 36, _SHARE),
]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="CASE", help="; ".join(case.name for case in CASES))


def run(arguments: argparse.Namespace) -> BenchTable:
    """Plan all cases, and run the proposed changes without memory."""
    chosen = [case for case in CASES if not arguments.only or case.name in arguments.only]
    rows = [judge(case) for case in chosen]
    return BenchTable(
        title=f"bench unfit: changes proposed for {len(rows)} runs that don't fit",
        rows=rows,
        notes=("none of the changes that come before may fit, nor several without one; cheaper has those that do",),
        passed=all(row["right"] for row in rows),
    )


def judge(case: UnfitCase) -> dict[str, object]:
    """Return the row of a case: the proposal, and the changes that suffice although they cost less."""
    with tempfile.TemporaryDirectory() as folder:
        run, with_config = case.with_device(Path(folder))
        plan = plan_run(run)
        proposed = tuple(advice(plan, run, with_config))

        @cache
        def fits(settings: Change) -> bool:
            """Return True if the run with these settings fits on one rank of each kind, by all micro-batches."""
            try:
                changed = with_config(with_settings(run.checked.config, settings))
            except ValueError:
                return False
            kinds = rank_classes(changed.checked, changed.sources, plan.num_ranks)
            return all(dry_run_rank(changed, alike[0]).whole.fits for alike in kinds)

        before = list(candidates(plan, run))
        if proposed in before:
            before = before[: before.index(proposed)]
        without = (
            [proposed[:place] + proposed[place + 1 :] for place in range(len(proposed))] if len(proposed) > 1 else []
        )
        cheaper = [change for change in (*before, *without) if fits(change)]
        is_right = not plan.fits and bool(proposed) and fits(proposed) and not cheaper
    return {
        "config": case.name,
        "ranks": plan.num_ranks,
        "too large": ", ".join(sorted(_too_large(plan))),
        "peak_mib": plan.ranks[0].fullest.peak_bytes / (1 << 20),
        "room_mib": case.memory_mib,
        "fits with": settings_text(proposed),
        "before": len(before),
        "without": len(without),
        "right": is_right,
        "cheaper": "; ".join(map(settings_text, cheaper)) or None,
    }


def _too_large(plan: Plan) -> set[str]:
    slots = [slot for one in plan.ranks for slot in one.slots]
    refused = {f"{slot.name} (refused)" for slot in slots if slot.refusal}
    return refused | {slot.name for slot in slots if slot.peak_bytes > plan.device.memory_bytes}
