"""What watches a run beside its work: requests to stop, and ranks that stand still."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from spmdrl.config.config import Config
from spmdrl.job.run.outcome import write_early_end
from spmdrl.job.start.start_checks import CheckedRun
from spmdrl.resources.world import World
from spmdrl.runtime.screen import show
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.supervision.hang_watch import HangWatch, WatchConfig
from spmdrl.runtime.supervision.launcher import write_error_file
from spmdrl.runtime.supervision.main_thread import work_sampler
from spmdrl.runtime.supervision.stop_watch import StopWatch, deadline_of, with_end_of_job

_STAGE_SECONDS = 600.0
_OTHER_VERBS = ("eval", "generate")


@contextmanager
def watching(checked: CheckedRun, world: World) -> Iterator[None]:
    """Within the block, ranks learn of requests to stop, and a job that stands still is ended with a report."""
    config = checked.config
    store = world.beside
    # One rank is enough, and thousands would ask Slurm's controller at once.
    environ = with_end_of_job(os.environ) if world.is_main else os.environ
    deadline = deadline_of(config.checkpoint.save_by_seconds, environ)
    is_training = checked.verb not in _OTHER_VERBS

    def show_hang(line: str, written: Path | None) -> None:
        line = f"spmdrl: {line}"
        show(line if written is None else f"{line}; the stacks are in {written.parent}", stream=sys.stderr)
        write_error_file(line)
        # Before its first stage the folder is another run's, or nobody's.
        if world.is_main and is_training and activity.num_boundaries:
            write_early_end(config.run.folder, "failed", line)

    watch = WatchConfig(stage_timeout_seconds(config), config.run.folder, world.rank, world.size)
    if world.num_nodes > 1:
        host = f"{socket.gethostname()} ({world.address})"
        watch = replace(watch, ranks_per_node=world.launch.local_world_size, host=host)
    # The other verbs have nothing to save.
    stops = StopWatch(store, world.rank, world.size, deadline).running() if is_training else nullcontext()
    sampled = nullcontext() if store is None else work_sampler.running()
    with stops, HangWatch(watch, store, show_hang, world.peers).running(), sampled:
        yield


def stage_timeout_seconds(config: Config) -> float:
    """How long a rank may make no progress; 0 is for ever."""
    if config.resources.stage_timeout_seconds is not None:
        return config.resources.stage_timeout_seconds
    return max(_STAGE_SECONDS, 2 * config.reward.timeout_seconds, 2 * config.environment.timeout_seconds)
