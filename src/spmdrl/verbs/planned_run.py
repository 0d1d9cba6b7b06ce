"""A run to plan: its config checked for so many ranks, without its data, and the sizes of its models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from spmdrl.config.config import Config
from spmdrl.config.reader import ConfigError, LoadedConfig, start_up
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.job.model.model_source import ModelSource, sources_of
from spmdrl.job.model.replica import check_vllm_generates, generation_engine_name
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.model_checks import check_generation_cuts, check_model_fits, check_models_beside
from spmdrl.job.start.prepared import source_without_making
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.roles import POLICY, Role
from spmdrl.plan.device_profile import read_profile
from spmdrl.plan.planned_device import NAME
from spmdrl.plan.planned_rows import RowLengths
from spmdrl.plan.run_plan import PlannedRun
from spmdrl.runtime.launch import LaunchEnvironment


def planned_run(
    loaded: LoadedConfig[Config], planned: LaunchEnvironment | None, device: str, prompt_length: int | None,
    response_length: int | None, sizes: Path | None,
) -> PlannedRun:  # fmt: skip
    """Check a run for so many ranks without its data. Raises the errors that its ranks would raise."""
    launch, profile = planned or LaunchEnvironment(), read_profile(device)
    config = _as_on_cpu(loaded.value) if "cpu" in (profile.kernels, loaded.value.resources.device) else loaded.value
    with start_up():
        checked = check_run(replace(loaded, value=config), "train", launch=launch, reads_data=False)
        with _source(config, sizes) as source:
            sources = checked_sources(checked, source)
            if generation_engine_name(config.rollout, NAME) == "vllm":
                check_vllm_generates(config, source, checked.sets_of(launch.world_size)[1], launch.world_size)
    most = sources[POLICY].decoder.max_positions
    response = response_length or min(config.rollout.max_completion_length, most - 1)
    prompt = prompt_length or min(config.data.max_prompt_length, most - response)
    if prompt < 1 or prompt + response > most:
        raise ConfigError(
            f"rows of {max(prompt, 1)} + {response} tokens need {max(prompt, 1) + response} positions, but the model "
            f"has {most}; lower --prompt-length or --response-length"
        )
    return PlannedRun(checked, sources, launch, profile, RowLengths(prompt, response))


def _as_on_cpu(config: Config) -> Config:
    """Return the config with a CPU's defaults, as the planned device is none."""
    model = replace(config.model, dtype="float32") if config.model.dtype == "auto" else config.model
    train = replace(config.train, max_tokens_per_microbatch=config.train.tokens_per_microbatch("cpu"))
    rollout = replace(config.rollout, engine="native") if config.rollout.engine == "auto" else config.rollout
    return replace(config, model=model, train=train, rollout=rollout)


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
    check_models_beside(checked, {role: other.decoder for role, other in sources.items()})
    return sources
