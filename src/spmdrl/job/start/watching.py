"""The watch of a run: requests to stop, and hangs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path

from spmdrl.config.config import Config
from spmdrl.job.run.outcome import write_early_end
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.resources.world import World
from spmdrl.runtime.screen import show
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.supervision.launcher import write_error_file
from spmdrl.runtime.supervision.main_thread import work_sampler
from spmdrl.runtime.supervision.watch import Deadline, Watch, WatchConfig

_STAGE_SECONDS = 600.0
_OTHER_VERBS = ("eval", "generate")
_SLURM_END = "SLURM_JOB_END_TIME"
_SLURM_START = "SLURM_JOB_START_TIME"
_SQUEUE_SECONDS = 10.0
_MARGIN_SECONDS = 120.0
_MARGIN_SHARE = 0.1


@contextmanager
def watching(checked: CheckedRun, world: World) -> Iterator[None]:
    """Within the block, ranks learn of requests to stop, and a hanging job is ended with a report."""
    config = checked.config
    store = world.beside
    # One rank is enough, and thousands would query Slurm's controller at once.
    environ = with_end_of_job(os.environ) if world.is_main else os.environ
    is_training = checked.verb not in _OTHER_VERBS

    def show_hang(line: str, written: Path | None, code: int) -> None:
        line = f"spmdrl: {line}"
        show(line if written is None else f"{line}; the stacks are in {written.parent}", stream=sys.stderr)
        write_error_file(line, code)
        # Before its first stage the folder is another run's, or nobody's.
        if world.is_main and is_training and activity.num_boundaries:
            write_early_end(config.run.folder, "failed", line)

    is_spread = world.num_nodes > 1
    watch = WatchConfig(
        world.rank, world.size, stage_timeout_seconds(config), config.run.folder,
        ranks_per_node=world.launch.local_world_size if is_spread else 0,
        host=f"{socket.gethostname()} ({world.address})" if is_spread else "",
        # The other verbs have nothing to save.
        deadline=deadline_of(config.checkpoint.save_by_seconds, environ) if is_training else None,
        rank_set=int(world.rank >= checked.sets_of(world.size)[1][0]),
    )  # fmt: skip
    sampled = nullcontext() if store is None else work_sampler.running()
    with Watch(watch, store, show_hang, world.peers).running(), sampled:
        yield


def stage_timeout_seconds(config: Config) -> float:
    """Return the longest time without progress; 0: no limit."""
    if config.resources.stage_timeout_seconds is not None:
        return config.resources.stage_timeout_seconds
    environment = config.environment
    longest = max(config.reward.timeout_seconds, environment.timeout_seconds + environment.open_timeout_seconds)
    return max(_STAGE_SECONDS, 2 * longest)


def deadline_of(save_by_seconds: float | None, environ: Mapping[str, str]) -> Deadline | None:
    """Return the time to save and leave: `save_by_seconds` from now, else shortly before Slurm ends the job.

    That is two minutes, or a tenth of the job's time if that is less.
    """
    now = time.time()
    if save_by_seconds is not None:
        return Deadline(now + save_by_seconds, "checkpoint.save_by")
    if not environ.get(_SLURM_END, "").isdecimal():
        return None
    end = float(environ[_SLURM_END])
    start = float(environ[_SLURM_START]) if environ.get(_SLURM_START, "").isdecimal() else now
    margin = max(0.0, min(_MARGIN_SECONDS, _MARGIN_SHARE * (end - start)))
    return Deadline(end - margin, "Slurm's time limit")


def with_end_of_job(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment, with the end of this Slurm job from squeue if its Slurm is too old to export that."""
    squeue = shutil.which("squeue", path=environ.get("PATH"))
    if _SLURM_END in environ or "SLURM_JOB_ID" not in environ or squeue is None:
        return environ
    command = [squeue, "--noheader", f"--jobs={environ['SLURM_JOB_ID']}", "--format=%e"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(
            command, env={**environ, "SLURM_TIME_FORMAT": "standard"}, capture_output=True, text=True,
            timeout=_SQUEUE_SECONDS, check=True,
        )  # fmt: skip
        # In local time; a job without a limit has none.
        end = datetime.fromisoformat(done.stdout.strip()).timestamp()
        return {**environ, _SLURM_END: f"{end:.0f}"}
    return environ
