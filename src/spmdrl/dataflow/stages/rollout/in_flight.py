"""Generation whose weights change in flight: a batch's first engine steps run ahead, the rest with newer weights.

begin (a number of engine steps) --weights change--> call (to the end of all rows)

Engine steps are counted, not seconds, and rows that wait for an environment return after a fixed number of them, so
that the version of each token depends on tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from spmdrl.dataflow.samples.pending import PendingGroup, StepGroups, read_responses, write_responses
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.rollout.generation import WholeGroup
from spmdrl.dataflow.stages.rollout.partial import ContinuingStage, OwnGroup, nothing_yet, packed, unpacked
from spmdrl.dataflow.stages.rollout.requests import StopPoint


@dataclass(kw_only=True)
class InFlightGenerationStage(ContinuingStage):
    """Generation in two parts. Collective: every rank that generates makes the same calls."""

    num_steps: int
    """engine steps of the first part"""
    _begun: dict[int, list[OwnGroup]] = field(default_factory=dict)
    """this replica's groups of begun batches, by step"""

    def begin(self, samples: Samples) -> None:
        """Generate the first part of a batch's responses. Collective."""
        own, num_left = self._own_groups(samples), self.num_steps

        def is_cut() -> bool:
            nonlocal num_left
            num_left -= 1
            return num_left < 0

        so_far: dict[int, OwnGroup] = {}
        for answered in self._answers(own, is_cut):
            for group, responses in answered:
                self._count_new(group, responses)
                so_far[group.serial] = replace(group, begun=tuple(responses))
        # In order, as expected lengths, which order new groups, may be others after a resume.
        self._begun[samples.step] = [so_far[serial] for serial in sorted(so_far)]

    def __call__(self, samples: Samples) -> None:
        """Generate the rest; all of it, if the batch wasn't begun."""
        own = self._begun.pop(samples.step) if samples.step in self._begun else self._own_groups(samples)
        self._open_portions(samples, sum(len(group.rows) for group in own))
        stop = StopPoint(self.mesh)
        for answered in self._answers(own, stop):
            if stop.is_reached:
                break
            for group, responses in answered:
                self._count_new(group, responses)
                self._add_to_portion(responses)
            self._put(samples, [WholeGroup(group.prompt, responses) for group, responses in answered])
        self._commit(samples)
        self.recorder.maximum("generation/imbalance", samples.rows.generation_imbalance())

    def _own_groups(self, samples: Samples) -> list[OwnGroup]:
        first, size = (samples.step - 1) * len(samples.rows.prompts), samples.group_size
        return [
            OwnGroup(
                first + group[0] // size, 1, samples.rows.prompt_of(group[0]), self._seeds(samples.step, group),
                nothing_yet(group),
            )
            for group in self._dealt(samples)
        ]  # fmt: skip

    def groups_of(self, samples: Samples, groups: StepGroups) -> StepGroups:
        """Return the groups of a batch with the ranks that go on with them, if it was begun."""
        if samples.step not in self._begun:
            return groups
        size, shares = samples.group_size, samples.rows.shares[self.state].items()
        holders = {int(row) // size: rank for rank, rows in shares for row in rows[::size]}
        pending = [PendingGroup(serial, 0, holders[number]) for number, serial in enumerate(groups.serials)]
        return StepGroups(tuple(pending), range(0))

    def write_to(self, folder: Path, step: int) -> list[Path]:
        """Write this replica's responses of a begun batch, if it was; returns its files."""
        own = self._begun.get(step)
        if not own or not self.mesh.is_leader:
            return []
        return write_responses(folder, self.mesh.rank, {group.serial: packed(group.begun) for group in own})

    def read_from(self, folder: Path, samples: Samples) -> None:
        """Go on with a begun batch of a checkpoint."""
        own = self._own_groups(samples)
        found = read_responses(folder, [group.serial for group in own])
        so_far = {group.serial: replace(group, begun=unpacked(found[group.serial], group.rows)) for group in own}
        self._begun[samples.step] = [so_far[serial] for serial in sorted(so_far)]
