"""The `plan` verb: prints what a run would need on so many devices of a kind; trains nothing and reads no data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmdrl.config.config import Config
from spmdrl.config.reader import ConfigError, LoadedConfig
from spmdrl.observability.report.plan_section import plan_svg
from spmdrl.observability.terminal.units import time_text
from spmdrl.plan.advice import Planned, advice, settings_text
from spmdrl.plan.alternatives import better_layouts, on_more_nodes
from spmdrl.plan.device_profile import require_rates
from spmdrl.plan.run_plan import PlannedRun, dry_run_rank, plan_run
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.runtime.screen import show, waiting
from spmdrl.verbs.calibration import calibrate
from spmdrl.verbs.planned_run import family_of, planned_run


def main(
    loaded: LoadedConfig[Config], *, planned: LaunchEnvironment | None, device: str, prompt_length: int | None,
    response_length: int | None, sizes: Path | None, json_file: Path | None, device_file: Path | None,
    picture: Path | None, searches: bool, scales: bool,
) -> int:  # fmt: skip
    """Print the plan of a run on one rank, or on those of `planned`. Returns 1 if it doesn't fit.

    With `device_file` the ranks run here instead, to write the rates of this machine's devices there. `searches` adds
    the plans of other layouts, and `scales` those of more nodes.

    `sizes` is a folder with the config.json of a model that stands for the config's. Rows have the longest prompts and
    responses that the config allows, unless other lengths are given.
    """
    if device_file is not None:
        return calibrate(
            loaded.value, family_of(loaded.value, sizes), (planned or LaunchEnvironment()).world_size, device_file
        )  # fmt: skip

    def with_config(config: Config, launch: LaunchEnvironment | None = planned) -> PlannedRun:
        return planned_run(replace(loaded, value=config), launch, device, prompt_length, response_length, sizes)

    run = with_config(loaded.value)
    with waiting(f"planning {run.launch.world_size} ranks"):
        plan = plan_run(run)
    show("\n".join(plan.lines()))
    found = plan.to_json()
    # A run that waits for its plan doesn't wait for advice.
    _write(json_file, found)
    if picture is not None:
        picture.write_text(plan_svg(found))
    if not plan.fits:
        with waiting("looking for a change by which it fits"):
            change = advice(plan, run, with_config)
        show(
            f"fits with {settings_text(change)}"
            if change
            else "no change of swap, micro-batches, recomputation or degrees suffices"
        )
    if searches:
        found["layouts"] = _search(run, with_config)
    if scales:
        found["nodes"] = _scale(run, with_config)
    if searches or scales:
        _write(json_file, found)
    return int(not plan.fits)


def _search(run: PlannedRun, planned: Planned) -> list[dict[str, Any]]:
    """Print other layouts; returns them."""
    require_rates(run.device, "--search")
    with waiting("planning other layouts"):
        found = better_layouts(run, planned)
    show("tokens per second and device, peak, and settings of other layouts, the fastest first:")
    show("\n".join(one.line() for one in found))
    return [
        {"settings": dict(one.settings), "fits": one.plan.fits, "tokens_per_second_per_device": one.rate,
         "peak_bytes": one.plan.ranks[0].fullest.peak_bytes}
        for one in found
    ]  # fmt: skip


def _scale(run: PlannedRun, planned: Callable[[Config, LaunchEnvironment], PlannedRun]) -> list[dict[str, Any]]:
    """Print plans on more nodes as they are made; returns them."""
    require_rates(run.device, "--scale")
    rows: list[dict[str, Any]] = []
    show("   nodes  devices   tokens/s/device  linearity  step")
    with waiting("planning more nodes"):
        for plan in on_more_nodes(run, planned):
            nodes, devices = plan.num_ranks // run.launch.local_world_size, plan.num_ranks
            if plan.times is None:
                show(f"{nodes:8}{devices:9}  would be refused: {'; '.join(plan.refusals.values())}")
                continue
            rate, seconds = plan.times.tokens_per_second_per_device, plan.times.step_seconds
            linearity = rate / (rows[0]["tokens_per_second_per_device"] if rows else rate)
            rows.append({
                "nodes": nodes, "devices": devices, "fits": plan.fits, "tokens_per_second_per_device": rate,
                "linearity": linearity, "step_seconds": seconds,
            })  # fmt: skip
            unfit = "" if plan.fits else ", but doesn't fit"
            show(f"{nodes:8}{devices:9}{rate:18.4g}{linearity:11.3f}  {time_text(seconds)}{unfit}")
    return rows


def dry_run(
    loaded: LoadedConfig[Config], *, planned: LaunchEnvironment | None, device: str, prompt_length: int | None,
    response_length: int | None, sizes: Path | None, json_file: Path | None, rank: int,
) -> int:  # fmt: skip
    """Build the models of one rank without memory, run all states of a step, and print memory and messages.

    Returns 1 if it doesn't fit.
    """
    run = planned_run(loaded, planned, device, prompt_length, response_length, sizes)
    if not 0 <= rank < run.launch.world_size:
        raise ConfigError(f"--rank is {rank}, but the job has ranks 0 to {run.launch.world_size - 1}")
    with waiting(f"running a step of rank {rank} without memory"):
        found = dry_run_rank(run, rank)
    show("\n".join(found.lines()))
    _write(json_file, found.to_json())
    return int(not found.whole.fits)


def _write(file: Path | None, found: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")
