"""The `plan` verb: prints what a run would need on so many devices of a kind; trains nothing and reads no data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from spmdrl.config.config import Config
from spmdrl.config.reader import ConfigError, LoadedConfig
from spmdrl.plan.advice import advice
from spmdrl.plan.run_plan import DryRun, Plan, PlannedRun, dry_run_rank, plan_run
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.runtime.screen import show, waiting
from spmdrl.verbs.calibration import calibrate
from spmdrl.verbs.planned_run import planned_run


def main(
    loaded: LoadedConfig[Config], *, planned: LaunchEnvironment | None, device: str, prompt_length: int | None,
    response_length: int | None, sizes: Path | None, json_file: Path | None, device_file: Path | None = None,
) -> int:  # fmt: skip
    """Print the plan of a run on one rank, or on those of `planned`. Returns 1 if it doesn't fit.

    With `device_file` the ranks run here instead, to write the rates of this machine's devices there.

    `sizes` is a folder with the config.json of a model that stands for the config's. Rows have the longest prompts and
    responses that the config allows, unless other lengths are given.
    """
    if device_file is not None:
        return calibrate(loaded.value, (planned or LaunchEnvironment()).world_size, device_file)

    def with_config(config: Config) -> PlannedRun:
        return planned_run(replace(loaded, value=config), planned, device, prompt_length, response_length, sizes)

    run = with_config(loaded.value)
    with waiting(f"planning {run.launch.world_size} ranks"):
        plan = plan_run(run)
    show("\n".join(plan.lines()))
    if not plan.fits:
        with waiting("looking for a change by which it fits"):
            found = advice(plan, run, with_config)
        settings = " ".join(f"{key}={value}" for key, value in found)
        show(
            f"fits with {settings}" if found else "no change of swap, micro-batches, recomputation or degrees suffices"
        )
    _write(json_file, plan)
    return int(not plan.fits)


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
    _write(json_file, found)
    return int(not found.whole.fits)


def _write(file: Path | None, found: Plan | DryRun) -> None:
    if file is not None:
        file.write_text(json.dumps(found.to_json(), indent=1) + "\n")
