"""Runs of verbs as jobs of their own, and runs of `train` in which every step does the same work."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdrl.config.reader import ConfigError
from spmdrl.verbs.doctor.commands import run_to_end
from tests.support.jobs import run_job

# The first step of a process builds caches and optimizer state.
STEPS_OF_WARM_UP = 1
_LONGEST_SECONDS = 3600.0
SETTINGS_OF_STEPS = {
    "reward.functions": "[exact]",
    "train.skip_zero_advantage": "false",
    "checkpoint.interval": 0,
    "log.backends": "[jsonl]",
}


def check_steps(num_steps: int) -> None:
    """Raises ConfigError if warm-up leaves none of a run's steps."""
    if num_steps <= STEPS_OF_WARM_UP:
        raise ConfigError(f"--steps {num_steps} leaves no step after {STEPS_OF_WARM_UP} of warm-up; raise it")


def train_steps(
    folder: Path, settings: Mapping[str, object], *, num_ranks: int, environment: Mapping[str, str] | None = None
) -> list[dict[str, float]]:
    """Train with these settings in a new run folder; returns the metrics of each step after warm-up.

    Without an environment, its ranks start at once, as those of `run_verb`. Raises RuntimeError with the end of the
    run's stderr if it fails.
    """
    run_verb(words_of("train", {**SETTINGS_OF_STEPS, **settings}, folder), num_ranks=num_ranks, environment=environment)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[STEPS_OF_WARM_UP:]]


def words_of(verb: str, settings: Mapping[str, object], folder: Path) -> list[str]:
    """A verb's words on the command line, for a run in this folder."""
    return [verb, *(f"{key}={value}" for key, value in {**settings, "run.dir": folder}.items())]


def run_verb(words: Sequence[str], *, num_ranks: int, environment: Mapping[str, str] | None = None) -> None:
    """Run a verb to its end. Raises RuntimeError with the end of its stderr if it fails.

    Without an environment, its ranks have one thread each and start at once, from a process that has imported all.
    """
    if environment is not None:
        run_module("spmdrl", words, num_ranks=num_ranks, environment=environment)
        return
    job = run_job(*words, ranks=num_ranks, timeout=_LONGEST_SECONDS, kind="cpu")
    if job.returncode:
        raise RuntimeError(f"{words[0]} ended with {job.returncode}: {job.stderr[-2000:]}")


def run_module(module: str, words: Sequence[str], *, num_ranks: int, environment: Mapping[str, str]) -> None:
    """Run a module on so many ranks to its end. Raises RuntimeError with the end of its stderr if it fails."""
    launcher = [sys.executable]
    if num_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    run_to_end([*launcher, "-m", module, *words], environment, _LONGEST_SECONDS)
