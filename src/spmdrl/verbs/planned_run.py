"""A run to plan: its config checked for so many ranks, without its data, and the sizes of its models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmdrl.config.config import Config
from spmdrl.config.reader import LoadedConfig, start_up
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.job.model.model_source import ModelSource, sources_of
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.model_checks import check_generation_cuts, check_model_fits, check_role_fits
from spmdrl.job.start.prepared import source_without_making
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.roles import POLICY, Role
from spmdrl.plan.device_profile import read_profile
from spmdrl.plan.planned_rows import RowLengths
from spmdrl.plan.run_plan import PlannedRun
from spmdrl.runtime.launch import LaunchEnvironment


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


def family_of(config: Config, sizes: Path | None) -> str:
    """Return the model_type of a run's model."""
    with _source(config, sizes) as source:
        return source.decoder.model_type


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
