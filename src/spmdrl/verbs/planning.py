"""The `plan` verb: prints what a run would need on so many devices of a kind; trains nothing and reads no data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from spmdrl.config.config import Config
from spmdrl.config.reader import ConfigError, LoadedConfig, start_up
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.job.model.model_source import ModelSource, sources_of
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.model_checks import check_generation_cuts, check_model_fits, check_role_fits
from spmdrl.job.start.prepared import source_without_making
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.roles import POLICY, Role
from spmdrl.plan.advice import advice
from spmdrl.plan.planned_rows import RowLengths
from spmdrl.plan.run_plan import DryRun, Plan, PlannedRun, dry_run_rank, plan_run, read_profile
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.runtime.screen import show, waiting


def main(
    loaded: LoadedConfig[Config], *, planned: LaunchEnvironment | None, device: str, prompt_length: int | None,
    response_length: int | None, sizes: Path | None, json_file: Path | None,
) -> int:  # fmt: skip
    """Print the plan of a run on one rank, or on those of `planned`. Returns 1 if it doesn't fit.

    `sizes` is a folder with the config.json of a model that stands for the config's. Rows have the longest prompts and
    responses that the config allows, unless other lengths are given.
    """

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


def planned_run(
    loaded: LoadedConfig[Config], planned: LaunchEnvironment | None, device: str, prompt_length: int | None,
    response_length: int | None, sizes: Path | None,
) -> PlannedRun:  # fmt: skip
    """Check a run for so many ranks without its data. Raises the errors that its ranks would raise."""
    launch, profile, config = planned or LaunchEnvironment(), read_profile(device), loaded.value
    with start_up():
        checked = check_run(loaded, "train", launch=launch, reads_data=False)
        with _source(config, sizes) as source:
            sources = checked_sources(checked, source)
    most = sources[POLICY].decoder.max_positions
    response = response_length or min(config.rollout.max_completion_length, most - 1)
    lengths = RowLengths(prompt_length or min(config.data.max_prompt_length, most - response), response)
    return PlannedRun(checked, sources, launch, profile, lengths)


@contextmanager
def _source(config: Config, sizes: Path | None) -> Iterator[ModelSource]:
    if sizes is not None:
        yield ModelSource(sizes, read_config(sizes))
        return
    with source_without_making(config) as source:
        yield source


def checked_sources(checked: CheckedRun, source: ModelSource) -> dict[Role, ModelSource]:
    """Return the run's models. Raises ValueError for one that the layouts can't cut."""
    config = checked.config
    source = source.with_adapters(config.lora, config.seed)
    check_generation_cuts(source.decoder, config.resources.generation)
    check_model_fits(config, source.decoder, checked.layout)
    sources = sources_of(checked.roles, source, config, is_there=False)
    for role, other in sources.items():
        if role is not POLICY and role.engine == "training":
            check_role_fits(checked, role, other.decoder)
    return sources
