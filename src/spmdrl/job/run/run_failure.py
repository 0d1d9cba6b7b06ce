"""Record of a run's failure in its folder, before the exception is passed on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spmdrl.job.run.memory_advice import explained_memory
from spmdrl.job.run.outcome import write_early_end
from spmdrl.job.run.run import Run
from spmdrl.observability.summary import read_summary
from spmdrl.runtime.supervision.ending import FirstFailure
from spmdrl.runtime.supervision.fence import loss_of_folder
from spmdrl.runtime.supervision.stop_request import Stopped


@contextmanager
def recording_failure(run: Run) -> Iterator[None]:
    """Record an exception in summary and report, then re-raise it, explained."""
    config = run.checked.config
    try:
        with explained_memory(config.rollout, config.train, run, config.reward.judge):
            yield
    except BaseException as failure:
        if isinstance(failure, Stopped) and failure.is_agreed:
            raise
        # Published at once, before the slower report.
        first = run.world.first_failure(failure)
        if run.has_begun:
            run.checkpoints.finish_alone()
        end = run.end(first)
        run.console.close()
        # If a newer job has the folder, nothing is written into it.
        if run.has_begun and _writes_end_after(run, first) and not loss_of_folder(first.cause):
            write_early_end(run.folder, end.verdict, end.line)
        if isinstance(failure, Stopped) and first.is_stop:
            raise Stopped(failure.reason, end.line, is_agreed=False) from failure
        raise


def _writes_end_after(run: Run, first: FirstFailure) -> bool:
    """Return True if this rank writes the end of the run: rank 0, or rank 1 if that one's process is gone."""
    if first.rank == 0 and first.is_death:
        return run.world.rank == 1 and read_summary(run.folder).get("verdict") == "running"
    return run.world.is_main
