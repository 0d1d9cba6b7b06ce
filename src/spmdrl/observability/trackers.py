"""TensorBoard and Weights & Biases: metrics, the configuration, and a few samples."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from spmdrl.observability.jsonl import to_json
from spmdrl.runtime.screen import safe_text

SAMPLE_COLUMNS = ("step", "row", "prompt", "response", "answer", "reward", "verdict", "advantage", "version")


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for services, beside its metrics."""

    name: str
    project: str = "spmdrl"
    config: Mapping[str, Any] = field(default_factory=dict)
    """resolved configuration"""


class Sample(Protocol):
    """A response with the fields of `SAMPLE_COLUMNS`."""

    @property
    def step(self) -> int: ...
    @property
    def row(self) -> int: ...


class TensorBoardBackend:
    """TensorBoard: metrics as scalars; configuration and samples as text."""

    def __init__(self, folder: Path, run: TrackedRun):
        self._folder = folder
        self._module = import_backend("tensorboard", "torch.utils.tensorboard")
        self._writer = self._module.SummaryWriter(str(folder))
        labels = {"name": run.name, "project": run.project}
        self._writer.add_text("run", _verbatim(to_json(labels, indent=2)), 0)
        self._writer.add_text("config", _verbatim(to_json(dict(run.config), indent=2)), 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for place, sample in enumerate(samples):
            text = "\n\n".join(f"{name}: {value}" for name, value in _cells(sample).items())
            self._writer.add_text(f"samples/{place}", _verbatim(text), step)

    def truncate_after(self, step: int) -> None:
        self._writer.close()
        self._writer = self._module.SummaryWriter(str(self._folder), purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()


class WandbBackend:
    """W&B, which continues the same run on resume and ignores steps that it already has."""

    def __init__(self, run_dir: Path, run: TrackedRun):
        self._wandb = import_backend("wandb", "wandb")
        run_dir.mkdir(parents=True, exist_ok=True)
        name_of_run = run_dir / "wandb_id.txt"
        if not name_of_run.is_file():
            name_of_run.write_text(secrets.token_hex(4))
        self._run = self._wandb.init(
            project=run.project, name=run.name, config=dict(run.config),
            dir=str(run_dir), id=name_of_run.read_text().strip(), resume="allow",
        )  # fmt: skip

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [list(_cells(sample).values()) for sample in samples]
        self._run.log({"samples": self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)}, step=step)

    def truncate_after(self, step: int) -> None:
        """Do nothing: a W&B run can't be cut."""

    def close(self) -> None:
        self._run.finish()


def import_backend(extra: str, module: str) -> Any:
    """Return the module of an optional back end, which only runs that use it import."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"log.backends names {extra}, which isn't installed ({error}); "
            f"run `pip install -e '.[{extra}]'` in the clone, or take it out of log.backends"
        ) from error


def _cells(sample: Sample) -> dict[str, Any]:
    """Return a sample's cells in a table; its text is a policy's and may be anything."""
    values = {name: getattr(sample, name) for name in SAMPLE_COLUMNS}
    return {name: safe_text(value) if isinstance(value, str) else value for name, value in values.items()}


def _verbatim(text: str) -> str:
    """Return Markdown that shows the text verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines())
