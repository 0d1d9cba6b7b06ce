"""The `eval` verb: scores of a model's responses to held-out prompts, with all responses in a file."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from spmdrl.config.config import Config
from spmdrl.config.reader import LoadedConfig, start_up
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.job.evaluator import Evaluation, build_evaluator, write_records
from spmdrl.job.model.replica import load_replica
from spmdrl.job.rollouts.rollout import turns_of
from spmdrl.job.run.run_failure import explained_memory
from spmdrl.job.run.run_folder import hold_run_folder
from spmdrl.job.settings_of_run import with_settings_of_run
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.prepared import prepare_together
from spmdrl.job.start.rank_facts import open_job
from spmdrl.job.start.start_checks import check_run
from spmdrl.observability.summary import software_versions, write_verb_summary
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.world import World


def main(loaded: LoadedConfig[Config]) -> int:
    """Evaluate `model.path` on `data.eval`."""
    evaluated(loaded)
    return 0


def evaluated(loaded: LoadedConfig[Config]) -> dict[str, Any]:
    """Evaluate, and return the results that go into the summary, on the main rank; none on the others."""
    started = time.perf_counter()
    loaded = with_settings_of_run(loaded, "eval")
    config, checked = loaded.value, check_run(loaded, verb="eval")
    # May run beside a training run in the same folder, but not beside another evaluation, which writes the same files.
    with open_job(checked) as world, hold_run_folder(config.run, world, "eval.lock"), start_up():
        with explained_memory(config):
            evaluation, folder = _evaluate(checked, world)
        if world.is_main:
            return _write_results(config, evaluation, folder, time.perf_counter() - started)
    return {}


def _evaluate(checked: CheckedRun, world: World) -> tuple[Evaluation, Path]:
    """Return the evaluation, and the folder for its results. Collective."""
    config = checked.config
    console = Console(enabled=world.is_main)
    prepared = prepare_together(checked, world, console)
    with console.doing("loading the weights"):
        replica = load_replica(config, prepared.source, world)
    with RewardPool(config.reward) as pool, ExitStack() as stack:
        turns = turns_of(config, prepared, replica, world.device.torch_device, stack)
        evaluator = build_evaluator(config, prepared, replica, pool, turns)
        assert evaluator is not None, "eval is refused without data.eval"
        with console.doing(f"answering {len(evaluator.prompts)} prompts"):
            return evaluator(), prepared.source.results_in(config.run.folder, "eval", config)


def _write_results(config: Config, evaluation: Evaluation, folder: Path, seconds: float) -> dict[str, Any]:
    samples = folder / "eval.jsonl"
    write_records(samples, evaluation.records)
    settings = {"model": config.model.path, "data": str(config.data.eval), "rewards": list(config.reward.functions)}
    fields = settings | evaluation.fields() | {"seconds": seconds, "versions": software_versions()}
    summary = write_verb_summary(folder, "eval", fields)
    console = Console()
    console.note(evaluation.described())
    console.note(f"samples  {samples}")
    console.note(f"summary  {summary}")
    return fields
