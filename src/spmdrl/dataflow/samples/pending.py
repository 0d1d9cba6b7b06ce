"""Pending groups, which one step begins and a later one continues, and the pure rules of their rounds.

A group is a prompt and its responses. Its serial is the prompt's place in the run's order of prompts, counted from 0;
its round counts the steps that worked on it, this one included. Between steps the responses stay on the ranks that
generate them, so that nothing travels; every rank has the place of each group and evaluates the rules alike.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.dataflow.samples.store.keeping import column_tensors, read_column
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, add_text
from spmdrl.nouns.batch import Batch
from spmdrl.resources.collectives import broadcast_bytes
from spmdrl.resources.mesh import GenerationMesh
from spmdrl.resources.rank_sets import RankSets

FOLDER = "carried"
FINISH = "finish"
"""Dense column of every group's responses: how each of them ended, or that it continues."""
_GROUPS = "groups.json"
_RESPONSES = "rank_*.safetensors"


@dataclass(frozen=True)
class RoundRules:
    """Numbers of groups that a step trains and works on."""

    num_wanted: int
    """groups that each step trains"""
    num_extra: int = 0
    """most groups that a step works on beyond those; never more than `num_wanted`"""
    max_rounds: int = 1
    """the round in which a group must be finished"""
    num_steps: int | None = None
    """steps of the run: no group is begun that couldn't be trained; None: unknown"""
    num_refills: int = 0
    """times that a step may begin more groups in place of those that the algorithm leaves out"""

    def __post_init__(self) -> None:
        # At most `num_extra` groups are pending, so those in their last round always have a place.
        assert 0 <= self.num_extra <= (self.num_wanted if self.max_rounds > 1 else 0), self
        assert self.num_refills == 0 or self.max_rounds == 1, self

    @property
    def most_groups(self) -> int:
        """Most groups that a step works on at once."""
        return self.num_wanted + self.num_extra


@dataclass(frozen=True)
class PendingGroup:
    """A group that one step began and a later one continues."""

    serial: int
    rounds: int
    """rounds that it has completed"""
    holder: int
    """rank that has its responses so far"""


@dataclass(frozen=True)
class StepGroups:
    """Groups of a step, oldest first: pending ones, then new ones."""

    pending: tuple[PendingGroup, ...]
    new_serials: range

    def to_json(self) -> str:
        new = self.new_serials
        return json.dumps([[asdict(group) for group in self.pending], [new.start, new.stop]])

    @classmethod
    def from_json(cls, text: str | bytes) -> StepGroups:
        pending, new = json.loads(text)
        return cls(tuple(PendingGroup(**group) for group in pending), range(*new))

    @property
    def serials(self) -> list[int]:
        return [*(group.serial for group in self.pending), *self.new_serials]

    @property
    def holders(self) -> list[int]:
        """Ranks that continue the pending groups."""
        return [group.holder for group in self.pending]

    @property
    def rounds(self) -> list[int]:
        """Round of each group."""
        return [*(group.rounds + 1 for group in self.pending), *(1 for _ in self.new_serials)]


def groups_of_step(pending: Sequence[PendingGroup], step: int, rules: RoundRules, num_passed: int = 0) -> StepGroups:
    """Return the groups of a step, counted from 1, before which `pending` was left over; with refills all it may begin.

    Earlier steps began (step - 1) * num_wanted groups, the pending ones, and `num_passed` others.
    """
    num_begun = (step - 1) * rules.num_wanted + len(pending) + num_passed
    most = rules.most_groups
    if rules.num_steps is not None:
        most = min(most, (rules.num_steps - step + 1) * rules.num_wanted)
    most *= 1 + rules.num_refills
    return StepGroups(tuple(pending), range(num_begun, num_begun + max(0, most - len(pending))))


def quotas(rounds_by_taker: Sequence[Sequence[int]], rules: RoundRules) -> list[int]:
    """Return the number of its groups that each taker finishes for training, `num_wanted` in all.

    A group in its last round always counts. The rest goes to the replicas that would leave most groups, so that all
    leave equally many. The result depends on the deal alone, never on timing.
    """
    numbers = [sum(round_ >= rules.max_rounds for round_ in rounds) for rounds in rounds_by_taker]
    num_groups, num_last = sum(map(len, rounds_by_taker)), sum(numbers)
    assert num_last <= rules.num_wanted <= num_groups, (num_last, rules.num_wanted, num_groups)
    left = [(numbers[taker] - len(rounds), taker) for taker, rounds in enumerate(rounds_by_taker)]
    heapq.heapify(left)
    for _ in range(rules.num_wanted - num_last):
        over, taker = left[0]
        heapq.heapreplace(left, (over + 1, taker))
        numbers[taker] += 1
    return numbers


def refill_size(num_wanted: int, num_begun: int, num_left: int) -> int:
    """Return the number of groups that a step begins next, after the algorithm kept `num_left` of those begun.

    It is 1.5 times the number that would complete `num_wanted` at the same share kept: an attempt takes as long as its
    longest response, so that another one costs more than a few extra prompts.
    """
    if num_left == 0:
        return num_wanted
    return min(num_wanted, -(-3 * (num_wanted - num_left) * num_begun // (2 * num_left)))


class Quota:
    """Decision which complete groups of a taker its step trains, in the order of completion."""

    def __init__(self, number: int, num_last: int):
        """Keep places for the `num_last` groups in their last round."""
        assert num_last <= number, (num_last, number)
        self.number = number
        self._num_open = number
        self._num_last = num_last

    @property
    def is_met(self) -> bool:
        return self._num_open == 0

    def admit(self, *, is_last_round: bool) -> bool:
        """Return True if a completed group is trained in this step; otherwise it stays pending."""
        if is_last_round:
            self._num_last -= 1
        elif self._num_open == self._num_last:
            return False
        self._num_open -= 1
        return True


class PendingGroups:
    """Pending groups, replicated on every rank, and responses of those that this rank continues.

    The ranks of a replica hold the same responses; the first of them writes them.
    """

    def __init__(self, rules: RoundRules, mesh: GenerationMesh):
        self.rules = rules
        self.known: tuple[PendingGroup, ...] = ()
        """pending groups, ascending by serial"""
        self.num_passed = 0
        """number of groups that steps began beyond those trained or pending"""
        self._mesh = mesh
        self._responses: dict[int, Batch] = {}
        self._step = 0
        self._at_start: tuple[tuple[PendingGroup, ...], int, dict[int, Batch]] = (), 0, {}
        """state at the present step's start"""

    @property
    def is_used(self) -> bool:
        """True if responses may take several steps, or an earlier part of the run left pending groups."""
        return self.rules.max_rounds > 1 or bool(self.known)

    def of_step(self, step: int) -> StepGroups:
        """Return the groups of the next step, the same on every rank."""
        if step != self._step:
            self._step, self._at_start = step, (self.known, self.num_passed, self._responses)
        return groups_of_step(self.known, step, self.rules, self.num_passed)

    def responses(self, serial: int) -> Batch:
        """Return a group's responses so far, one row each, in order."""
        return self._responses[serial]

    def replace(self, known: Sequence[PendingGroup], responses: Mapping[int, Batch]) -> None:
        """Replace the pending groups; `responses`, by serial, are those that this rank holds."""
        own = {group.serial for group in known if group.holder == self._leader}
        assert own == responses.keys(), f"this rank holds {sorted(responses)}, but is to go on with {sorted(own)}"
        self.known, self._responses = tuple(known), dict(responses)

    def publish(self, sets: RankSets) -> None:
        """Let ranks that only train know what the others left pending. Collective over all ranks."""
        groups = StepGroups(self.known, range(0)).to_json().encode() if sets.generation.is_member else None
        known = StepGroups.from_json(broadcast_bytes(groups, sets.generation.ranks[0])).pending
        if not sets.generation.is_member:
            self.replace(known, {})

    def undo_step(self) -> None:
        """Restore the state at the present step's start."""
        self.known, self.num_passed, self._responses = self._at_start

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write the groups, if any, below `folder`."""
        folder = folder / FOLDER
        if not self.known and not self.num_passed:
            return
        if self._mesh.rank == self._mesh.leaders[0]:
            groups = [asdict(group) for group in self.known]
            record = {"leaders": self._mesh.leaders, "groups": groups, "passed": self.num_passed}
            add_text(writes, folder / _GROUPS, json.dumps(record))
        if self._mesh.is_leader and self._responses:
            held = {name: writes.held(tensor) for name, tensor in _tensors(self._responses).items()}
            writes.add(partial(_write, folder, self._mesh.rank, held))

    def read_from(self, folder: Path) -> None:
        """Restore written groups on any number of ranks; the same replicas continue the same groups."""
        folder = folder / FOLDER
        if not (folder / _GROUPS).is_file():
            self.num_passed = 0
            self.replace([], {})
            return
        record = json.loads((folder / _GROUPS).read_text())
        self.num_passed = int(record.get("passed", 0))
        known = held_by([PendingGroup(**group) for group in record["groups"]], record["leaders"], self._mesh.leaders)
        own = [group.serial for group in known if group.holder == self._leader]
        self.replace(known, read_responses(folder, own))

    @property
    def _leader(self) -> int:
        return self._mesh.tensor.ranks[0]


def held_by(groups: Sequence[PendingGroup], before: Sequence[int], leaders: Sequence[int]) -> tuple[PendingGroup, ...]:
    """Return the groups of the replicas led by `before` as groups of the present ones: dealt anew if these differ."""
    if list(before) == list(leaders):
        return tuple(groups)
    return tuple(replace(group, holder=leaders[number % len(leaders)]) for number, group in enumerate(groups))


def write_responses(folder: Path, rank: int, responses: Mapping[int, Batch]) -> list[Path]:
    """Write the responses that a rank holds, by serial; returns the file."""
    return _write(folder, rank, _tensors(responses))


def _tensors(responses: Mapping[int, Batch]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for serial, batch in responses.items():
        tensors |= column_tensors(batch, f"{serial}/")
    return tensors


def _write(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> list[Path]:
    path = folder / _RESPONSES.replace("*", f"{rank:05d}")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path)
    return [path]


def read_responses(folder: Path, serials: Sequence[int]) -> dict[int, Batch]:
    """Return the responses of these groups, from any rank's file."""
    out: dict[int, Batch] = {}
    for path in sorted(folder.glob(_RESPONSES)) if serials else ():
        with safe_open(path, framework="pt") as file:
            here = {int(key.partition("/")[0]) for key in file.keys()}
            out |= {serial: _read_group(file, serial) for serial in serials if serial in here}
    missing = set(serials) - out.keys()
    if missing:
        raise ValueError(f"{folder} lacks the responses of prompts {sorted(missing)}; a rank's file is missing")
    return out


def _read_group(file: Any, serial: int) -> Batch:
    batch = Batch.of_rows(range(len(file.get_tensor(f"{serial}/{FINISH}/values"))))
    for key in file.keys():
        if key.startswith(f"{serial}/") and key.endswith("/values"):
            read_column(batch, file, key.removesuffix("/values"))
    return batch
