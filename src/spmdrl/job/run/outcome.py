"""Records of a run's start and end in its folder: summary.json, the report, and its models' cards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from spmdrl import __version__
from spmdrl.config.config import RunConfig
from spmdrl.engines.models.hf.model_folder import is_hub_name
from spmdrl.job.model.model_source import MODEL, newest_model
from spmdrl.job.run.checkpoints import Checkpoints
from spmdrl.job.run.resuming import Resuming, RunRecord, keep_config
from spmdrl.job.run.run_folder import on_main
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.settings.log_config import LogConfig
from spmdrl.nouns.statistics import interval_of
from spmdrl.observability.health import at_ends, trouble_of
from spmdrl.observability.log import METRICS_FILE, TrackedRun, read_metrics
from spmdrl.observability.outage import best_effort
from spmdrl.observability.report.config_diff import RESOLVED_CONFIG
from spmdrl.observability.report.report import write_report
from spmdrl.observability.summary import keep_room, provenance, read_summary, software_versions, write_summary
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.world import World
from spmdrl.runtime.supervision.stop_request import INTERRUPTED, UNSAVED, code_of_stop, stop_words

WARM_START = "warm_start"
MESSAGES = "prompts_are_messages"
"""field of the summary, true if data.chat_template: auto sent every prompt through the template"""
CARD = "README.md"
_OFFLINE = {"sft": "supervised", "preferences": "preferences (DPO)", "reward-model": "reward model (pairs)"}


def note_abandoned(folder: Path, console: Console) -> None:
    """Print a note if the folder's previous run, which no process holds, never recorded its end."""
    if read_summary(folder).get("verdict") != "running":
        return
    metrics = folder / METRICS_FILE
    last = max((step for step, _ in read_metrics(folder)), default=None)
    when = time.strftime(" at %Y-%m-%d %H:%M:%S", time.localtime(metrics.stat().st_mtime)) if metrics.is_file() else ""
    place = "before its first step" if last is None else f"after step {last}{when}"
    console.note(f"the previous job ended without a message {place}")


def write_start(checked: CheckedRun, world: World, console: Console, admitted: Resuming) -> None:
    """Write the run's configuration, command and machine, and that it is running."""
    folder, point = checked.config.run.folder, admitted.point
    note_abandoned(folder, console)
    is_finished = point is not None and (point.record.is_finished or point.record.step >= checked.num_steps)
    if is_finished:
        console.note(
            f"{folder} holds a finished run, and nothing is trained; go on with a higher {checked.section}.max_steps, "
            f"or begin anew with resume=never or another {checked.config.run.folder_key}"
        )
    keep_config(checked.resolved_config, folder, point, console, is_finished=is_finished)
    devices = f"{world.size} x {world.device.kind}"
    facts = {"versions": software_versions(), "devices": devices, MESSAGES: checked.prompts_are_messages} | provenance()
    write_summary(folder, verdict="running", verb=checked.verb, parameters=admitted.num_parameters, **facts)
    keep_room(folder)


def write_early_end(folder: Path, verdict: str, error: str) -> None:
    """Write the reason for a run's early end."""
    with best_effort("the summary and report"):
        write_summary(folder, verdict=verdict, error=error)
        write_report(folder)


def outcome_of(end: End, record: RunRecord, folder: Path, checkpoints: Checkpoints) -> dict[str, object]:
    """Return the summary's fields of a run that did its last step; unknown ones are None."""
    newest, history = checkpoints.newest, [metrics for _, metrics in read_metrics(folder)]
    first, last, tenth = at_ends(history, "reward")
    has_rewards = any("reward" in metrics for metrics in history)
    return {
        "verdict": end.verdict,
        "error": end.line or None,
        "trouble": trouble_of(record.metrics, history) or None,
        "steps": record.step,
        "reward_first": first.value if has_rewards else None,
        "reward_first_interval": interval_of(first),
        "reward_last": last.value if has_rewards else None,
        "reward_last_interval": interval_of(last),
        "reward_steps": tenth if has_rewards else None,
        "accuracy_before": record.accuracy_before,
        "accuracy_before_interval": record.accuracy_before_interval,
        "checkpoint": str(newest / MODEL) if newest else None,
        "best": [
            asdict(one) | {"checkpoint": str(checkpoints.store.folder_of(one.step) / MODEL)} for one in checkpoints.best
        ],
        "report": str(folder / "report.html"),
    }


def write_outcome(folder: Path, fields: Mapping[str, object], console: Console, *, phase: str) -> None:
    """Write and print a run's end; fields of an earlier part of a resumed run stay."""
    known = {name: value for name, value in fields.items() if value is not None}
    with best_effort("the summary and report"):
        # An error is from an earlier part, which this one has overcome.
        write_summary(folder, **{"error": None} | known)
        write_report(folder)
    # Text that could not be written is shown all the same.
    console.summary(read_summary(folder) | known, phase=phase)


def finished_model(folder: Path, world: World) -> Path | None:
    """Return the model that a run left in its folder, or None if it isn't finished. Collective."""
    is_done = on_main(world, lambda: read_summary(folder).get("verdict") == "done")
    return newest_model(folder, world) if is_done else None


def tracked_run(run: RunConfig, log: LogConfig, resolved_config: str) -> TrackedRun:
    """Return a run's description for tracking services; a warm start is named after its run."""
    folder = run.folder.resolve()
    name = run.name if run.dir is None else folder.name
    if folder.name == WARM_START:
        name = f"{folder.parent.name} {WARM_START}"
    return TrackedRun(name, log.project, lambda: yaml.safe_load(resolved_config) or {})


def texts_of_checkpoint(checked: CheckedRun, step: int) -> dict[str, str]:
    """Return the text files of the checkpoint after a step."""
    return {RESOLVED_CONFIG: checked.resolved_config, f"{MODEL}/{CARD}": model_card(checked, step)}


def model_card(checked: CheckedRun, step: int) -> str:
    """Return the card of the model after a step of a run; its licence is for the publisher to state."""
    config, base_model, phase = checked.config, checked.base_model, checked.phase
    models = [] if config.reward.model is None else [str(config.reward.model.path)]
    task = "text-classification" if phase == "reward-model" else "text-generation"
    front = ["library_name: transformers", f"pipeline_tag: {task}", f"tags: [spmdrl, {phase}]"]
    # The hub refuses a base model that it can't look up.
    if is_hub_name(base_model) and not Path(base_model).exists():
        front.append(f"base_model: {base_model}")
    facts = {
        "base model": base_model,
        "training": _OFFLINE.get(phase, f"reinforcement learning, {phase}"),
        "steps": step,
        "training data": config.data.train,
        "rewards": "none" if checked.offline else ", ".join((*config.reward.functions, *models)),
        "seed": config.seed,
        "made with": f"spmdrl {__version__}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    lines = [f"| {name} | `{_plain(value)}` |" for name, value in facts.items()]
    head = ["---", *front, "---", "", f"# {_plain(config.run.folder.name)}", "", "| | |", "|---|---|"]
    return "\n".join([*head, *lines, "", "Licence: to be stated by whoever publishes this model."]) + "\n"


def _plain(value: object) -> str:
    """Escape text for one line, inside of one table cell."""
    return " ".join(str(value).replace("|", "/").replace("`", "'").split())


@dataclass(frozen=True)
class End:
    """Exit code, verdict and message of a run's end."""

    code: int
    """exit code"""
    verdict: str
    """verdict in summary.json"""
    line: str
    """message for the screen and the summary's `error`; empty for a completed run"""


def end_of(
    place: str, *, asked: str | None = None, failure: str | None = None, unsaved: str | None = None,
    newest: Path | None = None,
) -> End:  # fmt: skip
    """Decide a run's end: a failure precedes a request, and 75 means that everything has been saved.

    The arguments are equal on all ranks: the `place`, such as `step 12 of 200`; the reason of a request to stop; the
    first failure; the reason why the last finished step is in no checkpoint; and the newest checkpoint.
    """
    if failure is not None:
        return End(1, "failed", failure)
    if asked is None and unsaved is None:
        return End(0, "done", "")
    code = 0 if asked is None else code_of_stop(asked)
    what = "finished" if asked is None else stop_words(asked)
    goes_on = f"goes on from {newest}" if newest else "starts anew"
    if unsaved is not None:
        return End(UNSAVED, "unsaved", f"{what} in {place}, but {unsaved}; the same command {goes_on}")
    before = ";" if newest else ", before a checkpoint;"
    verdict = "interrupted" if code == INTERRUPTED else "stopped"
    return End(code, verdict, f"{what} in {place}{before} the same command {goes_on}")
