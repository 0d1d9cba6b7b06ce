"""Steps that generate more prompts in place of those that the algorithm excludes (arXiv:2503.14476, section 3.2).

opened --admitted--> generated, rewarded --left--> trained       (the first ones, in the order of prompts)
                                         --left out or surplus--> dropped
opened --never admitted--> deferred: the next step begins with them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmdrl.dataflow.samples.pending import PendingGroups, refill_size
from spmdrl.dataflow.samples.row_lives import DEFERRED
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import rule_of
from spmdrl.dataflow.stages.advantage import Credit, drop_left_out, is_left, of_all_ranks
from spmdrl.dataflow.stages.rows import credit_inputs
from spmdrl.nouns.batch import CreditSettings, WorkerState
from spmdrl.observability.metrics import Recorder
from spmdrl.resources.mesh import GenerationMesh

SURPLUS = "surplus"
"""Drop reason of prompts beyond those that the step trains on."""


@dataclass(frozen=True)
class Refill:
    """Admission of prompts to generation until enough are left for the step, or as often as allowed.

    Its decisions depend on rewards in the order of prompts, so they are the same on every rank and for any number of
    ranks.
    """

    pending: PendingGroups
    algorithm: Credit
    settings: CreditSettings
    mesh: GenerationMesh
    recorder: Recorder

    def attempts(self, samples: Samples) -> Iterator[None]:
        """Yield for each generation and reward of admitted prompts, then decide about all rows. Collective.

        By then, rows that the step doesn't train on are dropped or deferred.
        """
        rules, size, own = self.pending.rules, samples.group_size, list[int]()
        num_attempts, num_begun, groups = 0, 0, torch.empty(0)
        while len(groups) < rules.num_wanted and num_attempts <= rules.num_refills:
            num_attempts += 1
            first, num_begun = num_begun, num_begun + refill_size(rules.num_wanted, num_begun, len(groups))
            samples.rows.admit(range(first, num_begun))
            yield
            own.extend(samples.rows.share(WorkerState.GENERATION).tolist())
            rows, left_out = self._selected(samples, own)
            groups = (rows[is_left(left_out, len(rows))] // size).unique()
        left_out |= {SURPLUS: torch.isin(rows // size, groups[rules.num_wanted :])}
        drop_left_out(samples, left_out, rows, torch.tensor(own, dtype=torch.int64))
        if self.mesh.rank == 0:
            samples.mark_dropped(range(num_begun * size, samples.rows.num_rows), DEFERRED)
        samples.commit(WorkerState.GENERATION)
        self.pending.num_passed += num_begun - rules.num_wanted
        self.recorder.alike("refill/attempts", num_attempts)
        self.recorder.alike("refill/prompts", num_begun)
        self.recorder.alike("refill/unfilled", max(0, rules.num_wanted - len(groups)))

    def _selected(self, samples: Samples, own: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return all rows so far, and the algorithm's exclusions among them, by reason; `own` are this rank's."""
        made_by_now = (WorkerState.GENERATION, WorkerState.REWARD)
        names = [name for name in samples.rows.reads(WorkerState.ADVANTAGE) if rule_of(name).made_by in made_by_now]
        columns = sorted(self.algorithm.columns_for_credit().intersection(names))
        inputs = credit_inputs(samples.read(own, names), columns, samples.group_size, self.settings)
        rows, of_all = of_all_ranks(replace(inputs, step=samples.step))
        return rows, dict(self.algorithm.select(of_all))
