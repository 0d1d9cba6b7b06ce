"""A step's rollouts on disk: a job that dies after generation restores them instead of generating again.

All records of rollouts use one format of columns (`samples/store/keeping.py`):

    rollouts/ (checkpoint.keep_rollouts)   this file; the running step, until its checkpoint is written
    pending/ in a checkpoint               `PendingGroups`, which a later step continues (partial rollout)
    debug.rollouts_to, rollouts_from       `replay.py`; every step, for a comparison with the same responses
    generated.parts/                       `kept_answers.py`; responses of the verb generate, as text
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from spmdrl.dataflow.samples.pending import PendingGroups
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.engines.training.checkpoints.file_writes import written_at_once
from spmdrl.engines.training.checkpoints.manifest import damage, step_of_folder
from spmdrl.job.run.checkpoints import Checkpoints
from spmdrl.job.run.run_folder import on_every_rank, on_main
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig
from spmdrl.observability.metrics import Stat, table_of, totals_of
from spmdrl.resources.collectives import gather_bytes

ROLLOUTS = "rollouts"
IDENTITY = "identity.json"
METRICS = "metrics.json"
"""metrics of the rows up to then, by all ranks"""
# Metrics of the attempt that generated the rows, rather than of the rows.
_OF_ATTEMPT = ("perf/", "reshard/")


class KeptRollouts:
    """Rows of the running step, stored beside the checkpoint that they come from (`checkpoint.keep_rollouts`).

    For groups that the step deferred, these are the pending responses.
    """

    def __init__(self, checkpoints: Checkpoints, logs: RunLogs, identity: Mapping[str, object], pending: PendingGroups):
        """`identity` is what must not change between the parts of a run."""
        self._checkpoints, self._logs, self._identity, self._pending = checkpoints, logs, identity, pending
        self._is_on = checkpoints.store.config.keep_rollouts
        self._store = CheckpointStore(
            logs.folder / ROLLOUTS, CheckpointConfig(keep_last=1), is_main=logs.world.is_main,
            required=(IDENTITY, METRICS),
        )  # fmt: skip
        self._recorded: dict[str, Stat] = {}
        """metrics of the restored rows"""
        self._store.remove_leftovers()

    def restore(self, samples: Samples) -> bool:
        """Fill the batch with the rows that an interrupted run stored of this step, if it did. Collective.

        Damaged ones are generated again. Raises ConfigError if their digests are right but their content isn't: by then
        the batch holds a part of it.
        """
        if not self._is_on or samples.step != self._logs.start_step + 1:
            return False
        folder = self._store.folder_of(samples.step)
        problem = on_main(self._logs.world, lambda: self._problem_with(folder))
        if problem is not None:
            if problem:
                self._logs.console.note(f"the rollouts in {folder} are not taken up: {problem}")
            return False
        on_every_rank(lambda: self._read(samples, folder))
        self._logs.console.note(f"step {samples.step} goes on with the rollouts in {folder}")
        return True

    def _problem_with(self, folder: Path) -> str | None:
        """Return the reason against restoring the rollouts there, "" if there are none, None for sound ones."""
        if step_of_folder(folder.name) not in self._store.steps():
            return ""
        if (problem := damage(folder, self._store.required)) is not None:
            return problem
        kept_of = json.loads((folder / IDENTITY).read_bytes())
        return None if kept_of == self._identity else "they are of another run"

    def _read(self, samples: Samples, folder: Path) -> None:
        try:
            table = json.loads((folder / METRICS).read_bytes())
            self._recorded = {name: Stat(*stat) for name, stat in table.items()}
            samples.read_from(folder)
            self._pending.read_from(folder)
        except Exception as failure:
            # The files may hold anything.
            reason = f"{type(failure).__name__}: {failure}"
            raise ValueError(
                f"the rollouts in {folder} can't be read, though their digests are right ({reason}); delete that "
                "folder to generate them again"
            ) from failure

    def keep(self, samples: Samples) -> None:
        """Write the batch if a resumed run would begin with this step; restored metrics are recorded. Collective.

        A failure only costs the rollouts of a job that dies in this step.
        """
        if not self._is_on:
            return
        stats = totals_of([json.loads(table) for table in gather_bytes(self._logs.recorder.so_far)])
        missing = {name: stat for name, stat in self._recorded.items() if name not in stats}
        for name, stat in missing.items() if self._logs.world.is_main else ():
            self._logs.recorder.add(name, stat)
        self._recorded.clear()
        recorded = {name: stat for name, stat in (stats | missing).items() if not name.startswith(_OF_ATTEMPT)}
        # All ranks must find the same checkpoints there.
        self._checkpoints.finish()
        if samples.step - 1 not in (0, *self._checkpoints.store.steps()):
            return

        def write(folder: Path) -> list[Path]:
            paths = [*samples.write_to(folder), *written_at_once(self._pending, folder)]
            if self._logs.world.is_main:
                for name, content in ((IDENTITY, self._identity), (METRICS, table_of(recorded))):
                    (folder / name).write_text(json.dumps(content))
                    paths.append(folder / name)
            return paths

        with self._logs.timeline.stage("keep_rollouts", samples.step):
            result = self._store.save(samples.step, write)
        if result.folder is not None:
            self._store.forget_old(samples.step)
        else:
            self._logs.console.note(
                f"WARNING: rollouts of step {samples.step} were NOT kept, the run goes on: {result.error}"
            )
