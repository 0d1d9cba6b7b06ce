"""Destinations of a run's metrics and samples: metrics.jsonl, samples.jsonl, the console and optional services."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from spmdrl.observability.jsonl import JsonlWriter, number, read_jsonl, to_json
from spmdrl.observability.outage import best_effort, count_refused, warn
from spmdrl.observability.terminal.console import Console
from spmdrl.observability.trackers import import_backend, make_tracker
from spmdrl.runtime.screen import safe_text

SAMPLE_COLUMNS = ("step", "row", "prompt", "response", "answer", "reward", "verdict", "advantage", "version")


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for services, beside its metrics."""

    name: str
    project: str = "spmdrl"
    config: Callable[[], Mapping[str, Any]] = dict
    """returns the resolved configuration, which takes as long to read as a small model's step"""


class TensorBoardBackend:
    """TensorBoard: metrics as scalars; configuration and samples as text."""

    def __init__(self, folder: Path, run: TrackedRun):
        self._folder = folder
        self._module = import_backend("tensorboard", "torch.utils.tensorboard")
        self._writer = self._module.SummaryWriter(str(folder))
        labels = {"name": run.name, "project": run.project}
        self._writer.add_text("run", _verbatim(to_json(labels, indent=2)), 0)
        self._writer.add_text("config", _verbatim(to_json(dict(run.config()), indent=2)), 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
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
            project=run.project, name=run.name, config=dict(run.config()),
            dir=str(run_dir), id=name_of_run.read_text().strip(), resume="allow",
        )  # fmt: skip

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        rows = [list(_cells(sample).values()) for sample in samples]
        self._run.log({"samples": self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)}, step=step)

    def truncate_after(self, step: int) -> None:
        """Do nothing: a W&B run can't be cut."""

    def close(self) -> None:
        self._run.finish()


class _TrackerBackend:
    def __init__(self, name: str, run_dir: Path, run: TrackedRun):
        self._tracker, config = make_tracker(name), run.config()
        sections = {"run": {"name": run.name, "dir": str(run_dir)}, "log": {"project": run.project}}
        self._tracker.start({**config, **{key: {**config.get(key, {}), **one} for key, one in sections.items()}})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tracker.log(metrics, step)

    def truncate_after(self, step: int) -> None:
        """Do nothing: a tracker can't forget."""

    def close(self) -> None:
        self._tracker.finish()


def _cells(sample: SampleRecord) -> dict[str, Any]:
    """Return a sample's cells in a table; its text is a policy's and may be anything."""
    values = {name: getattr(sample, name) for name in SAMPLE_COLUMNS}
    return {name: safe_text(value) if isinstance(value, str) else value for name, value in values.items()}


def _verbatim(text: str) -> str:
    """Return Markdown that shows the text verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines())


METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CHECKPOINTS_FILE = "checkpoints.jsonl"
B = TypeVar("B")


class MetricsBackend(Protocol):
    """One destination of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def truncate_after(self, step: int) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Log that passes each step's merged metrics to all back ends; lives on one rank.

    A failing back end loses only its own lines, with one warning per outage.
    """

    def __init__(
        self, run_dir: Path, backends: Sequence[str], *, console: Console | None = None, run: TrackedRun | None = None
    ):
        """`run` describes the run to services; by default, only its folder's name."""
        tracked = run if run is not None else TrackedRun(Path(run_dir).name)
        self._backends = {name: _open_backend(name, Path(run_dir), console, tracked) for name in backends}
        self._out: set[str] = set()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step."""
        self._hand_over(self._backends, lambda backend: backend.write(step, metrics))

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Pass samples of a step, whose metrics come next, to the back ends that show samples."""
        shows_samples = (TensorBoardBackend, WandbBackend)
        takers = {name: one for name, one in self._backends.items() if isinstance(one, shows_samples)}
        self._hand_over(takers, lambda backend: backend.write_samples(step, samples))

    def _hand_over(self, backends: Mapping[str, B], write: Callable[[B], None]) -> None:
        for name, backend in backends.items():
            try:
                write(backend)
            except BrokenPipeError:
                raise
            except Exception as failure:
                # A service's client may raise anything.
                count_refused()
                if name not in self._out:
                    warn(
                        f"log.backends: {name} fails ({type(failure).__name__}: {failure}); the run goes on without it"
                    )
                self._out.add(name)
            else:
                self._out.discard(name)

    def truncate_after(self, step: int) -> None:
        """Forget the steps that a run resumed after `step` repeats, in back ends that can."""
        for backend in self._backends.values():
            backend.truncate_after(step)

    def close(self) -> None:
        for name, backend in self._backends.items():
            with best_effort(f"the end of {name}'s log", (Exception,)):
                backend.close()


class _JsonlBackend:
    def __init__(self, path: Path):
        self._writer = JsonlWriter(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._writer.write({**metrics, "step": step})

    def truncate_after(self, step: int) -> None:
        self._writer.truncate_after(step)

    def close(self) -> None:
        self._writer.close()


class _ConsoleBackend:
    def __init__(self, console: Console):
        self._console = console

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # Step 0 is the evaluation before the first step, which has its own note.
        if step > 0:
            self._console.step(step, metrics)

    def truncate_after(self, step: int) -> None:
        """Do nothing: printed lines stay."""

    def close(self) -> None:
        self._console.close()


def read_metrics(run_dir: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, metrics) of metrics.jsonl; values that aren't numbers are left out."""
    for record in read_jsonl(Path(run_dir) / METRICS_FILE):
        step = record.pop("step", None)
        # The same few names in each of thousands of lines.
        values = {sys.intern(name): number(value) for name, value in record.items()}
        if isinstance(step, int):
            yield step, {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class SampleToken:
    """One token of a response."""

    text: str
    advantage: float | None
    mismatch: float | None
    """The generator's log-prob minus the trainer's before the update; None if the update left the row out."""


@dataclass(frozen=True)
class SampleRecord:
    """One response, for people to read."""

    step: int
    row: int
    prompt: str
    response: str
    answer: str
    reward: float | None
    parts: dict[str, float]
    """Reward by function."""
    verdict: str
    advantage: float | None
    """Mean over the response's tokens."""
    mismatch: float | None
    """Mean absolute difference of the trainer's and the generator's log-probs over the response's tokens."""
    version: int | None
    """Policy version that wrote the response's last token."""
    tokens: list[SampleToken]
    turns: list[tuple[str, str]] | None = None
    """Text of the model and answer of the environment in each turn; None without an environment."""


class SamplesLog:
    """Writer of samples.jsonl; lives on one rank."""

    def __init__(self, run_dir: Path):
        self._writer = JsonlWriter(Path(run_dir) / SAMPLES_FILE)

    def write(self, samples: Iterable[SampleRecord]) -> None:
        for sample in samples:
            tokens = [(token.text, token.advantage, token.mismatch) for token in sample.tokens]
            record = asdict(replace(sample, tokens=[])) | {"tokens": tokens}
            if sample.turns is None:
                del record["turns"]
            self._writer.write(record)

    def truncate_after(self, step: int) -> None:
        """Forget the samples of steps above `step`."""
        self._writer.truncate_after(step)

    def close(self) -> None:
        self._writer.close()


def _open_backend(name: str, run_dir: Path, console: Console | None, run: TrackedRun) -> MetricsBackend:
    if name == "console":
        return _ConsoleBackend(console if console is not None else Console())
    if name == "jsonl":
        return _JsonlBackend(run_dir / METRICS_FILE)
    if name == "tensorboard":
        return TensorBoardBackend(run_dir / "tensorboard", run)
    if name == "wandb":
        return WandbBackend(run_dir, run)
    return _TrackerBackend(name, run_dir, run)
