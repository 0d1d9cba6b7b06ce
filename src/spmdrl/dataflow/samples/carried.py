"""Groups that one step begins and a later one goes on with, while no batch is open that could hold them.

Their responses stay on the ranks that generate them, so that nothing travels; every rank has the place of each group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.dataflow.samples.rounds import CarriedGroup, RoundRules, StepGroups, groups_of_step
from spmdrl.dataflow.samples.store.keeping import column_tensors, read_column
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, add_text
from spmdrl.nouns.batch import Batch
from spmdrl.resources.mesh import GenerationMesh

FOLDER = "carried"
FINISH = "finish"
"""The dense column that every group's responses have: how each of them ended, or that it goes on."""
_GROUPS = "groups.json"
_RESPONSES = "rank_*.safetensors"


class CarriedGroups:
    """The carried groups as replicated on every rank, and the responses of those that this rank goes on with.

    The ranks of a replica hold the same; the first of them writes it.
    """

    def __init__(self, rules: RoundRules, mesh: GenerationMesh):
        self.rules = rules
        self.known: tuple[CarriedGroup, ...] = ()
        """ascending by serial"""
        self.num_passed = 0
        """groups that steps began beyond those that each trains, and that nothing goes on with"""
        self._mesh = mesh
        self._responses: dict[int, Batch] = {}
        self._step = 0
        self._at_start: tuple[tuple[CarriedGroup, ...], int, dict[int, Batch]] = (), 0, {}
        """what the present step began with"""

    @property
    def is_used(self) -> bool:
        """Whether responses may take several steps, be it that an earlier part of the run left some over."""
        return self.rules.max_rounds > 1 or bool(self.known)

    def of_step(self, step: int) -> StepGroups:
        """Return the groups of the next step, the same on every rank."""
        if step != self._step:
            self._step, self._at_start = step, (self.known, self.num_passed, self._responses)
        return groups_of_step(self.known, step, self.rules, self.num_passed)

    def responses(self, serial: int) -> Batch:
        """What a group of this rank has so far, one row per response in order."""
        return self._responses[serial]

    def carry(self, known: Sequence[CarriedGroup], responses: Mapping[int, Batch]) -> None:
        """Carry these groups over in place of those before; `responses`, by serial, are those that this rank holds."""
        own = {group.serial for group in known if group.holder == self._leader}
        assert own == responses.keys(), f"this rank holds {sorted(responses)}, but is to go on with {sorted(own)}"
        self.known, self._responses = tuple(known), dict(responses)

    def undo_step(self) -> None:
        """Go back to what the present step began with."""
        self.known, self.num_passed, self._responses = self._at_start

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write all of it, where there is any, below `folder`."""
        folder = folder / FOLDER
        if not self.known and not self.num_passed:
            return
        if self._mesh.rank == 0:
            groups = [asdict(group) for group in self.known]
            record = {"leaders": self._mesh.leaders, "groups": groups, "passed": self.num_passed}
            add_text(writes, folder / _GROUPS, json.dumps(record))
        if self._mesh.is_leader and self._responses:
            tensors: dict[str, Tensor] = {}
            for serial, batch in self._responses.items():
                tensors |= column_tensors(batch, f"{serial}/")
            held = {name: writes.held(tensor) for name, tensor in tensors.items()}
            path = folder / _RESPONSES.replace("*", f"{self._mesh.rank:05d}")
            writes.add(partial(_write_responses, path, held))

    def read_from(self, folder: Path) -> None:
        """Take back what was written, on any number of ranks; the same replicas go on with the same groups."""
        folder = folder / FOLDER
        if not (folder / _GROUPS).is_file():
            self.num_passed = 0
            self.carry([], {})
            return
        record = json.loads((folder / _GROUPS).read_text())
        self.num_passed = int(record.get("passed", 0))
        known = [CarriedGroup(**group) for group in record["groups"]]
        leaders = self._mesh.leaders
        if record["leaders"] != list(leaders):
            known = [
                CarriedGroup(group.serial, group.rounds, leaders[number % len(leaders)])
                for number, group in enumerate(known)
            ]
        own = [group.serial for group in known if group.holder == self._leader]
        self.carry(known, _read_responses(folder, own))

    @property
    def _leader(self) -> int:
        return self._mesh.tensor.ranks[0]


def _write_responses(path: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path)
    return [path]


def _read_responses(folder: Path, serials: Sequence[int]) -> dict[int, Batch]:
    """Return the responses of these groups, by any rank."""
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
