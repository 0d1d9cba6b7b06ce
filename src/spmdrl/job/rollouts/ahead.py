"""The batches of a run's steps: each is generated in its own step, or, with a lag, in an earlier one.

    step:        1              2                    3
    generates    1 .. 1 + lag   2 + lag              3 + lag
    trains       1              2                    3
    weights      0 for all      those after step 1   those after step 2

So batch k comes from the weights after step max(0, k - 1 - lag), whatever takes long where: the two sets of ranks meet
at the end of each step, and what one of them does between two meetings depends on nothing of the other's.

With weights that change in flight, the first engine steps of batch k run with those weights, and the others, a step of
training later, with the next ones:

    step:        1                   2                            3
    generates    1 .. lag, begins    rest of 1 + lag, begins      rest of 2 + lag, begins
                 1 + lag             2 + lag                      3 + lag
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from spmdrl.dataflow.samples.pending import StepGroups, held_by
from spmdrl.dataflow.samples.row_lives import Accounting
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.rollout.in_flight import InFlightGenerationStage
from spmdrl.dataflow.stages.schedule import Phase
from spmdrl.dataflow.stages.stages import Stage, Stages
from spmdrl.engines.training.checkpoints.file_writes import FileWrites
from spmdrl.job.model.switching import Switching
from spmdrl.job.rollouts.kept_rollouts import KeptRollouts
from spmdrl.job.rollouts.rank_split import split_line
from spmdrl.job.run.checkpoints import Checkpoints
from spmdrl.job.run.run_folder import on_every_rank
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.job.sample_flow import SampleFlow
from spmdrl.observability.metrics import Stat, table_of, totals_of
from spmdrl.resources.collectives import barrier
from spmdrl.resources.rank_sets import RankSets

FOLDER = "ahead"
_GROUPS = "groups.json"
_METRICS = "metrics_*.json"


class AheadRollouts:
    """Batches that were generated ahead of the step that trains them; a part of each checkpoint.

    made -> read from a checkpoint, if there is one -> connected -> next(step) -> close(step) -> next(step + 1)
    """

    _stages: Stages
    _logs: RunLogs
    _kept: KeptRollouts
    _switching: Switching

    def __init__(self, flow: SampleFlow, sets: RankSets, *, lag: int, num_steps: int, swaps_in_flight: bool):
        self._flow = flow
        self._sets = sets
        self._lag = lag
        self._num_steps = num_steps
        self._swaps_in_flight = swaps_in_flight
        self._in_flight: InFlightGenerationStage | None = None
        """stage that begins batches, on ranks that generate"""
        self._queue: dict[int, Samples] = {}
        """open batches by step"""
        self._whole: set[int] = set()
        """those whose responses have all ended"""
        self._unpublished: list[Samples] = []
        """batches whose rows only the ranks that generated them have news of"""
        self._recorded: dict[int, Mapping[str, Stat]] = {}
        """this rank's metrics of batches whose step hasn't come"""
        self._saved: Path | None = None
        """folder of the batches that an earlier part of the run had generated ahead"""

    def connect(
        self, stages: Stages, switching: Switching, logs: RunLogs, checkpoints: Checkpoints,
        identity: Mapping[str, object], generation: Stage | None,
    ) -> None:  # fmt: skip
        """Take what a run has once its checkpoint was read; `identity` mustn't change between its parts."""
        self._stages, self._switching, self._logs = stages, switching, logs
        if isinstance(generation, InFlightGenerationStage):
            self._in_flight = generation
        self._carries = self._flow.pending.is_used
        num_saved = len([*self._saved.glob("*")]) if self._saved else 0
        if self._carries and num_saved > self._lag:
            raise ValueError(
                f"rollout.lag is {self._lag}, but an earlier part of the run has generated for {num_saved} later "
                f"steps, some of whose responses are unfinished; set rollout.lag to {num_saved} or more"
            )
        self._kept = KeptRollouts(checkpoints, logs, identity, self._flow.pending)
        # Stages of a batch are timed in its own step, whose metrics come `lag` steps later.
        logs.timeline.num_kept_steps += self._lag

    def next(self, step: int) -> Samples:
        """Return the batch of a step, with its responses; generate those that are due. Collective.

        Ranks that only train return at once if the batch was generated in an earlier step.
        """
        self._restore(step)
        due = [one for one in range(step, min(step + self._lag, self._num_steps) + 1) if one not in self._whole]
        # The groups of a batch may depend on those that the one before left over.
        self._open(due[:1] if self._carries else due)
        if due and not (due == [step] and self._kept.restore(self._queue[step])):
            self._switching.to_generation(step)
            for one in due:
                self._open([one])
                is_last = self._swaps_in_flight and one == step + self._lag
                with self._recording(one, is_ahead=one > step):
                    self._begin(self._queue[one]) if is_last else self._finish(self._queue[one])
                # Nothing can be trained before the step's own batch is there.
                if one == step or (self._carries and one < due[-1]):
                    self._meet(step)
            self._switching.start_return(step)
        self._whole.add(step)
        return self._queue[step]

    def _open(self, steps: Sequence[int]) -> None:
        """Open the batches that aren't yet. Collective."""
        missing = [step for step in steps if step not in self._queue]
        for step in missing:
            self._queue[step] = self._flow.open(step)
        if missing and self._carries and self._sets.are_apart:
            # No rank may store rows on a node that hasn't opened their batch.
            barrier()

    def keep(self, samples: Samples) -> None:
        """Store the batch of a step for a job that is to repeat it (`checkpoint.keep_rollouts`). Collective."""
        self._kept.keep(samples)

    def close(self, samples: Samples) -> Accounting | None:
        """Close the batch of a step. Collective."""
        self._meet(samples.step)
        self._record(self._recorded.pop(samples.step, {}))
        self._whole.discard(samples.step)
        return self._flow.close(self._queue.pop(samples.step))

    @contextmanager
    def _recording(self, step: int, *, is_ahead: bool) -> Iterator[None]:
        """Keep metrics of a batch whose step hasn't come."""
        if not is_ahead:
            yield
            return
        recorder = self._logs.recorder
        before = recorder.drain()
        self._record(self._recorded.pop(step, {}))
        yield
        self._recorded[step] = recorder.drain()
        self._record(before)

    def _record(self, stats: Mapping[str, Stat]) -> None:
        for name, stat in stats.items():
            self._logs.recorder.add(name, stat)

    def _begin(self, samples: Samples) -> None:
        if self._in_flight is not None:
            with self._sets.generation.alone(), self._logs.timeline.stage("generation", samples.step):
                self._in_flight.begin(samples)

    def _finish(self, samples: Samples) -> None:
        self._stages.run(Phase.GENERATION, samples)
        self._unpublished.append(samples)
        self._whole.add(samples.step)

    def _meet(self, step: int) -> None:
        """Wait for the ranks of the other set, and publish to them what was generated. Collective."""
        if self._sets.are_apart:
            other = "generation" if self._sets.update.is_member else "update"
            with self._logs.timeline.stage(f"wait_for_{other}", step):
                barrier()
        for samples in self._unpublished:
            samples.publish_to_other_set()
        self._unpublished.clear()
        if self._carries and self._sets.are_apart:
            self._flow.pending.publish(self._sets)

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write the batches generated ahead below `folder`. Every rank calls it."""
        # Without a lag, the batch is that of a step that was given up.
        batches = dict(self._queue) if self._lag else {}
        try:
            # At once: a later step frees the rows, and threads may write after that.
            parts = [self._write(samples, folder / FOLDER / str(step)) for step, samples in batches.items()]
        except OSError as error:
            writes.add(partial(_raise, error))
        else:
            writes.add(lambda: [path for paths in parts for path in paths])

    def _write(self, samples: Samples, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        paths = samples.write_to(folder)
        # A file per rank: other ranks may have failed to write, and take part in no collective.
        if own := self._recorded.get(samples.step):
            paths.append(_written(folder / _METRICS.replace("*", f"{self._logs.world.rank:05d}"), table_of(own)))
        if self._sets.generation.is_first:
            paths.append(_written(folder / _GROUPS, self._groups_of(samples)))
        if self._in_flight is not None:
            paths += self._in_flight.write_to(folder, samples.step)
        return paths

    def _groups_of(self, samples: Samples) -> object:
        """Return all that opens a batch again, and whether its responses have ended."""
        groups, is_begun = self._flow.groups[samples.step], samples.step not in self._whole
        if is_begun and self._in_flight is not None:
            groups = self._in_flight.groups_of(samples, groups)
        return [groups.to_json(), self._flow.leaders, is_begun]

    def read_from(self, folder: Path) -> None:
        """Find the batches of a checkpoint; they are read once the dock is open."""
        self._saved = folder / FOLDER

    def balance(self) -> str | None:
        """Return `split_line` on the main rank of a run with a lag: without one, the sets take turns."""
        if not self._lag or not self._logs.world.is_main:
            return None
        sets = self._sets
        return split_line(self._logs.folder, len(sets.update.ranks), len(sets.generation.ranks), are_apart=True)

    def _restore(self, step: int) -> None:
        """Open the batches that a checkpoint had for the steps from this one on. Collective."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        for one in range(step, min(step + self._lag, self._num_steps + 1)):
            folder = saved / str(one)
            if folder.is_dir():
                text, leaders, is_begun = json.loads((folder / _GROUPS).read_text())
                groups = StepGroups.from_json(text)
                held = replace(groups, pending=held_by(groups.pending, leaders, self._flow.leaders))
                self._queue[one] = self._flow.open(one, held)
                on_every_rank(partial(self._read, self._queue[one], folder, is_begun=is_begun))
                if not is_begun:
                    self._whole.add(one)

    def _read(self, samples: Samples, folder: Path, *, is_begun: bool) -> None:
        samples.read_from(folder)
        if self._in_flight is not None and is_begun:
            self._in_flight.read_from(folder, samples)
        if self._logs.world.is_main:
            self._recorded[samples.step] = totals_of([json.loads(path.read_bytes()) for path in folder.glob(_METRICS)])


def _raise(error: OSError) -> NoReturn:
    raise error


def _written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path
