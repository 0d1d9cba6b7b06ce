"""The advantage state: rewards of the whole batch become one advantage per response token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import COPIES
from spmdrl.dataflow.stages.rows import TURNS, ModelTokens, credit_inputs
from spmdrl.dataflow.stages.update_report import RowsRecord
from spmdrl.nouns.batch import Batch, CreditInputs, CreditSettings, WorkerState, gather_ragged_rows, offsets_of
from spmdrl.observability.fault_points import faultpoint
from spmdrl.observability.metrics import Recorder
from spmdrl.resources.collectives import gather_ragged, gather_ragged_columns


class Credit(Protocol):
    """The part of an algorithm that this state calls."""

    def columns_for_credit(self) -> frozenset[str]: ...
    def select(self, inputs: CreditInputs) -> Mapping[str, Tensor]: ...
    def credit_metrics(self, inputs: CreditInputs) -> Mapping[str, Tensor]: ...
    def advantages(self, inputs: CreditInputs) -> Tensor: ...
    def copies(self, inputs: CreditInputs) -> Tensor | None: ...
    def adapted(self, inputs: CreditInputs) -> Mapping[str, float]: ...


class AdvantageStage:
    """State that selects from all rows and credits them alike on every rank; stores this rank's advantages.

    Collective: every rank calls it once per step. Columns that the algorithm reads are gathered on every rank.
    """

    state = WorkerState.ADVANTAGE

    def __init__(self, recorder: Recorder, settings: CreditSettings, record: RowsRecord | None = None):
        self.recorder = recorder
        self.settings = settings
        self._record = record

    def __call__(self, samples: Samples, credit: Credit) -> Mapping[str, float]:
        """Return the algorithm's keys that change with the next step."""
        batch = samples.take(self.state)
        own = credit_inputs(batch, sorted(credit.columns_for_credit()), samples.group_size, self.settings)
        rows, inputs = of_all_ranks(replace(own, step=samples.step))
        if self._record is not None:
            self._record.rewarded(rows, inputs.rewards_B)
        self._report(*_rewards_of_step(samples, rows, inputs))
        for name, values in credit.credit_metrics(inputs).items():
            self.recorder.mean(name, float(values.double().mean()))
        if (copies_B := credit.copies(inputs)) is not None:
            inputs.columns.put_dense(COPIES, copies_B)
        left_out = credit.select(inputs)
        self._count(samples.rows.num_dropped, drop_left_out(samples, left_out, rows, batch.rows))
        kept = is_left(left_out, len(rows)).nonzero().squeeze(1)
        if kept.numel():
            of_rows = [name for name in ("response_ids", TURNS) if name in batch]
            taken = batch.select(torch.isin(batch.rows, rows[kept]).nonzero().squeeze(1), of_rows)
            advantages = _advantages(taken, rows[kept], inputs.of_rows(kept), credit)
            faultpoint("advantage", advantages.values("advantages"))
            samples.put(self.state, advantages)
        samples.commit(self.state)
        return credit.adapted(inputs)

    def _count(self, before: Mapping[str, int], now: Mapping[str, int]) -> None:
        """Record the numbers of rows dropped now, and `before` by generation."""
        for reason in {**now, **before}:
            self.recorder.alike(f"select/{reason}", now.get(reason, 0) + before.get(reason, 0))
        self.recorder.alike("select/dropped_rows", sum(now.values()) + sum(before.values()))

    def _report(self, rewards_B: Tensor, groups_B: Tensor) -> None:
        """Report rewards, equal on every rank, so that means over ranks don't change them."""
        usable = rewards_B[~rewards_B.isnan()].double()
        if usable.numel():
            self.recorder.mean("reward", float(usable.mean()))
            self.recorder.mean("reward_std", float(usable.std()) if usable.numel() > 1 else 0.0)
            for percent in (10, 90):
                with np.errstate(invalid="ignore"):  # a reward beyond float32 is infinite; the run warns of it
                    self.recorder.mean(f"reward_p{percent}", float(np.percentile(usable.numpy(), percent)))
        self.recorder.mean("frac_reward_zero_std", share_without_signal(rewards_B, groups_B))


def is_left(left_out: Mapping[str, Tensor], num_rows: int) -> Tensor:
    """Return True for each row [num_rows] that no reason excludes."""
    return ~torch.stack([torch.zeros(num_rows, dtype=torch.bool), *left_out.values()]).any(0)


def drop_left_out(
    samples: Samples, left_out: Mapping[str, Tensor], rows: Tensor, own_rows: Tensor
) -> Mapping[str, int]:
    """Drop this rank's rows that are excluded from all `rows`; returns the numbers over all rows, by reason."""
    is_kept, counts = torch.ones(len(rows), dtype=torch.bool), dict[str, int]()
    # A row has one reason, the alphabetically first, as in the dock's accounts.
    for reason, is_left_out in sorted(left_out.items()):
        dropped = rows[is_left_out & is_kept]
        is_kept &= ~is_left_out
        samples.mark_dropped(own_rows[torch.isin(own_rows, dropped)].tolist(), reason)
        counts[reason] = len(dropped)
    return counts


def _rewards_of_step(samples: Samples, rows: Tensor, inputs: CreditInputs) -> tuple[Tensor, Tensor]:
    """Return rewards and groups of all rewarded rows, including those that generation dropped. Collective."""
    if not samples.rows.num_dropped:
        return inputs.rewards_B, inputs.groups_B
    dropped = samples.read_dropped(["reward"])
    all_rows = torch.cat([rows, _gathered(dropped.rows)])
    order = all_rows.argsort()
    rewards = torch.cat([inputs.rewards_B, _gathered(dropped.dense("reward"))])
    return rewards[order], all_rows[order] // samples.group_size


def share_without_signal(rewards_B: Tensor, groups_B: Tensor) -> float:
    """Return the fraction of groups with equal usable rewards, which have no signal for group-relative algorithms."""
    members, group_B = groups_B.unique(return_inverse=True)
    if members.numel() == 0:
        return 0.0
    above, below = rewards_B.nan_to_num(float("inf")), rewards_B.nan_to_num(float("-inf"))
    low = torch.full((len(members),), float("inf")).scatter_reduce_(0, group_B, above, "amin")
    high = torch.full((len(members),), float("-inf")).scatter_reduce_(0, group_B, below, "amax")
    return float((low >= high).float().mean())


def of_all_ranks(own: CreditInputs) -> tuple[Tensor, CreditInputs]:
    """Return all ranks' rows, ascending, and their inputs for credit. Collective."""
    sent = [own.columns.rows, own.rewards_B, own.groups_B, own.lengths_B]
    for name in own.columns.names:
        is_ragged = own.columns.is_ragged(name)
        sent += [own.columns.lengths(name), own.columns.values(name)] if is_ragged else [own.columns.dense(name)]
    rows, rewards_B, groups_B, lengths_B, *others = map(torch.cat, zip(*gather_ragged_columns(sent), strict=True))
    columns, left = Batch(rows), iter(others)
    for name in own.columns.names:
        if own.columns.is_ragged(name):
            offsets = offsets_of(next(left))
            columns.put_ragged(name, next(left), offsets)
        else:
            columns.put_dense(name, next(left))
    inputs = replace(own, rewards_B=rewards_B, groups_B=groups_B, lengths_B=lengths_B, columns=columns)
    order = rows.argsort()
    return rows[order], inputs.of_rows(order)


def _gathered(values: Tensor) -> Tensor:
    return torch.cat(gather_ragged(values))


def _advantages(own: Batch, rows: Tensor, inputs: CreditInputs, credit: Credit) -> Batch:
    """Return this rank's part of the advantages of all `rows`, one per response token."""
    credited, num_tokens = credit.advantages(inputs), int(inputs.lengths_B.sum())
    assert len(credited) in (len(rows), num_tokens), (len(credited), len(rows), num_tokens)
    positions, model_tokens = torch.searchsorted(rows, own.rows), ModelTokens.of(own)
    if len(credited) == len(rows):
        own_R = credited[positions].repeat_interleave(model_tokens.lengths_B)
    else:
        own_R, _ = gather_ragged_rows(credited, offsets_of(inputs.lengths_B), positions)
    out = Batch(own.rows)
    out.put_ragged("advantages", model_tokens.spread(own_R), own.offsets("response_ids"))
    if COPIES in inputs.columns:
        out.put_dense(COPIES, inputs.columns.dense(COPIES)[positions].int())
    return out
