"""Trackers: services, and classes of the user's own, that get a run's configuration and metrics by three methods."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from spmdrl.nouns.settings.log_config import BACKENDS, LogConfig
from spmdrl.runtime.workers.loading import load_attribute

_MOST_PARAMETERS = 100
"""MLflow's limit for one call"""


class Tracker(Protocol):
    """Destination of metrics that `log.backends` names as pkg.mod:Class; made without arguments, on the main rank.

    A method that raises loses its own lines, not the run.
    """

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin, or continue after a restart; `config` is the run's whole tree, with its folder as run.dir."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take a step's metrics; steps after the checkpoint that a run resumed from come again."""

    def finish(self) -> None:
        """End the job's part of the run."""


class TrackioTracker:
    """Trackio, which continues the project's run of the same name."""

    def start(self, config: Mapping[str, Any]) -> None:
        self._trackio = import_backend("trackio", "trackio")
        self._trackio.init(
            project=config["log"]["project"], name=config["run"]["name"], config=dict(config), resume="allow"
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._trackio.finish()


class MlflowTracker:
    """MLflow: settings as parameters; the id of its run is in the run's folder, so that a restart continues it."""

    def start(self, config: Mapping[str, Any]) -> None:
        self._mlflow = import_backend("mlflow", "mlflow")
        self._mlflow.set_experiment(config["log"]["project"])
        note = Path(config["run"]["dir"]) / "mlflow_id.txt"
        known = note.read_text().strip() if note.is_file() else None
        run = self._mlflow.start_run(run_id=known, run_name=config["run"]["name"])
        if known is None:
            note.write_text(run.info.run_id)
            settings = _flat(config)
            while some := dict(islice(settings, _MOST_PARAMETERS)):
                self._mlflow.log_params(some)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


def _flat(tree: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{start}{name}.")
        else:
            yield f"{start}{name}", str(value)[:500]


_SERVICES: Mapping[str, type[Tracker]] = {"trackio": TrackioTracker, "mlflow": MlflowTracker}


def make_tracker(name: str) -> Tracker:
    """Return a service's tracker, or one of a class of the user's own. Raises ValueError if it can't be loaded."""
    made: Tracker = (_SERVICES.get(name) or load_attribute(name, "log.backends", BACKENDS, kind="class"))()
    return made


def import_backend(package: str, module: str) -> Any:
    """Return the module of an optional back end, which only runs that use it import."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{_missing(package)} ({error})") from error


def check_backends(config: LogConfig) -> None:
    """Refuse a back end whose package isn't installed, a class that can't be loaded, and a command that isn't there.

    Packages aren't imported. Raises ValueError.
    """
    if config.alert_command and shutil.which(config.alert_command[0]) is None:
        raise ValueError(
            f"log.alert_command begins with {config.alert_command[0]!r}, which is no program here; write a list of a "
            "program and its arguments, such as [notify-send] or [bash, alert.sh]"
        )
    for name in config.backends:
        if ":" in name:
            load_attribute(name, "log.backends", BACKENDS, kind="class")
        elif name not in ("console", "jsonl") and importlib.util.find_spec(name) is None:
            raise ValueError(_missing(name))


def _missing(package: str) -> str:
    return (
        f"log.backends names {package}, which isn't installed; run `pip install {package}`, or take it out of "
        "log.backends"
    )
