"""The batches of a run's steps: each is generated in its own step, or, with a lag, in an earlier one.

    step:        1              2                    3
    generates    1 .. 1 + lag   2 + lag              3 + lag
    trains       1              2                    3
    weights      0 for all      those after step 1   those after step 2

So batch k comes from the weights after step max(0, k - 1 - lag), whatever takes long where: the two sets of ranks meet
at the end of each step, and what one of them does between two meetings depends on nothing of the other's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from spmdrl.dataflow.samples.row_lives import Accounting
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.schedule import Phase
from spmdrl.dataflow.stages.stages import Stages
from spmdrl.engines.training.checkpoints.file_writes import FileWrites
from spmdrl.job.model.switching import Switching
from spmdrl.job.rollouts.kept_rollouts import METRICS, KeptRollouts
from spmdrl.job.run.checkpoints import Checkpoints
from spmdrl.job.run.run_folder import on_every_rank
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.job.sample_flow import SampleFlow
from spmdrl.observability.log import read_metrics
from spmdrl.observability.metrics import Stat, encode, table_of, totals_of
from spmdrl.resources.collectives import barrier, gather_bytes
from spmdrl.resources.rank_sets import RankSets

FOLDER = "ahead"


class AheadRollouts:
    """Batches that were generated ahead of the step that trains them; a part of each checkpoint.

    made -> read from a checkpoint, if there is one -> connected -> next(step) -> close(step) -> next(step + 1)
    """

    _stages: Stages
    _logs: RunLogs
    _kept: KeptRollouts
    _switching: Switching

    def __init__(self, flow: SampleFlow, sets: RankSets, *, lag: int, num_steps: int):
        self._flow = flow
        self._sets = sets
        self._lag = lag
        self._num_steps = num_steps
        self._queue: dict[int, Samples] = {}
        """open batches by step"""
        self._unpublished: list[Samples] = []
        """batches whose rows only the ranks that generated them have news of"""
        self._recorded: dict[int, Mapping[str, Stat]] = {}
        """this rank's metrics of batches whose step hasn't come"""
        self._saved: Path | None = None
        """folder of the batches that an earlier part of the run had generated ahead"""

    def connect(
        self, stages: Stages, switching: Switching, logs: RunLogs, checkpoints: Checkpoints,
        identity: Mapping[str, object],
    ) -> None:  # fmt: skip
        """Take what a run has once its checkpoint was read; `identity` mustn't change between its parts."""
        self._stages, self._switching, self._logs = stages, switching, logs
        self._kept = KeptRollouts(checkpoints, logs, identity, self._flow.pending)
        # Stages of a batch are timed in its own step, whose metrics come `lag` steps later.
        logs.timeline.num_kept_steps += self._lag

    def next(self, step: int) -> Samples:
        """Return the batch of a step, with its responses; generate those that are due. Collective.

        Ranks that only train return at once if the batch was generated in an earlier step.
        """
        self._restore(step)
        due = [one for one in range(step, min(step + self._lag, self._num_steps) + 1) if one not in self._queue]
        for one in due:
            self._queue[one] = self._flow.open(one)
        if due and not (due == [step] and self._kept.restore(self._queue[step])):
            self._switching.to_generation(step)
            for one in due:
                self._generate(self._queue[one], is_ahead=one > step)
                # The first step has nothing to train before its own batch is there.
                if one == step:
                    self._meet(step)
            self._switching.start_return(step)
        return self._queue[step]

    def keep(self, samples: Samples) -> None:
        """Store the batch of a step for a job that is to repeat it (`checkpoint.keep_rollouts`). Collective."""
        self._kept.keep(samples)

    def close(self, samples: Samples) -> Accounting | None:
        """Close the batch of a step. Collective."""
        self._meet(samples.step)
        for name, stat in self._recorded.pop(samples.step, {}).items():
            self._logs.recorder.add(name, stat)
        return self._flow.close(self._queue.pop(samples.step))

    def _generate(self, samples: Samples, *, is_ahead: bool) -> None:
        recorder = self._logs.recorder
        before = recorder.drain() if is_ahead else {}
        self._stages.run(Phase.GENERATION, samples)
        self._unpublished.append(samples)
        if is_ahead:
            self._recorded[samples.step] = recorder.drain()
            for name, stat in before.items():
                recorder.add(name, stat)

    def _meet(self, step: int) -> None:
        """Wait for the ranks of the other set, and publish to them what was generated. Collective."""
        if self._sets.are_apart:
            other = "generation" if self._sets.update.is_member else "update"
            with self._logs.timeline.stage(f"wait_for_{other}", step):
                barrier()
        for samples in self._unpublished:
            samples.publish_to_other_set()
        self._unpublished.clear()

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write the batches generated ahead below `folder`. Collective."""
        paths: list[Path] = []
        # Without a lag, the batch is that of a step that was given up.
        for step, samples in self._queue.items() if self._lag else ():
            own = self._recorded.get(step, {})
            stats = totals_of([json.loads(table) for table in gather_bytes(encode(own))])
            # At once: a later step frees the rows, and threads may write after that.
            paths += samples.write_to(folder / FOLDER / str(step))
            if self._logs.world.is_main:
                path = folder / FOLDER / str(step) / METRICS
                path.write_text(json.dumps(table_of(stats)))
                paths.append(path)
        writes.add(lambda: paths)

    def read_from(self, folder: Path) -> None:
        """Find the batches of a checkpoint; they are read once the dock is open."""
        self._saved = folder / FOLDER

    def balance(self) -> str:
        """Describe the waits of both sets in the run so far, and the split of ranks that would even them out.

        Empty without a lag, as the sets take turns then, and on other ranks than the main one.
        """
        history = [metrics for _, metrics in read_metrics(self._logs.folder) if "time/wait_for_update" in metrics]
        if not history or not self._lag or not self._logs.world.is_main:
            return ""
        updating, generating = len(self._sets.update.ranks), len(self._sets.generation.ranks)
        seconds, *waits = (
            sum(metrics.get(f"time/{name}", 0.0) for metrics in history)
            for name in ("step", "wait_for_generation", "wait_for_update")
        )
        busy = [(seconds - wait) * ranks for wait, ranks in zip(waits, (updating, generating), strict=True)]
        even = min(max(round((updating + generating) * busy[1] / sum(busy)), 1), updating + generating - 1)
        idle = [f"{wait / seconds:.0%}" for wait in waits]
        advice = "which is as even as can be" if even == generating else f"resources.ranks.generation={even} is nearer"
        return f"ranks that train waited {idle[0]} of the time, those that generate {idle[1]}: {advice}"

    def _restore(self, step: int) -> None:
        """Open the batches that a checkpoint had for the steps from this one on. Collective."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        for one in range(step, min(step + self._lag, self._num_steps + 1)):
            folder = saved / str(one)
            if folder.is_dir():
                self._queue[one] = self._flow.open(one)
                on_every_rank(partial(self._read, self._queue[one], folder))

    def _read(self, samples: Samples, folder: Path) -> None:
        samples.read_from(folder)
        if self._logs.world.is_main:
            table = json.loads((folder / METRICS).read_text())
            self._recorded[samples.step] = {name: Stat(*stat) for name, stat in table.items()}
