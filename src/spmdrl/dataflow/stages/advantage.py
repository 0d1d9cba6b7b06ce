"""The advantage state: rewards of the whole batch become one advantage a response token."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spmdrl.dataflow.samples.dock import Samples
from spmdrl.observability.metrics import Recorder
from spmdrl.resources.collectives import gather_ragged
from spmdrl.types import Batch, CreditInputs, WorkerState, offsets_of


class Credit(Protocol):
    """The part of an algorithm that this state calls."""

    def columns_for_credit(self) -> frozenset[str]: ...
    def token_kl(self, logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor: ...
    def advantages(self, inputs: CreditInputs) -> Tensor: ...


class AdvantageStage:
    """Every rank computes the advantages of all rows, alike, and stores those of the rows it took.

    Collective: every rank calls it once a step.
    """

    state = WorkerState.ADVANTAGE

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def __call__(self, samples: Samples, credit: Credit) -> None:
        extra = credit.columns_for_credit()
        batch = samples.take(self.state, {"reward", "response_ids", *extra})
        kl_B = self._row_kl(batch, credit) if extra else torch.zeros(len(batch))
        rows, (rewards_B, all_kl_B) = _of_all_ranks(batch.rows, [batch.dense("reward"), kl_B])
        groups_B = rows // samples.group_size
        advantages_B = credit.advantages(CreditInputs(rewards_B, groups_B, all_kl_B if extra else None))
        self._report(rewards_B, groups_B)
        own_B = advantages_B[torch.searchsorted(rows, batch.rows)]
        samples.mark_dropped(batch.rows[own_B.isnan()].tolist(), "no reward")
        usable = (~own_B.isnan()).nonzero().squeeze(1)
        samples.put(self.state, _columns(batch.select(usable, ["response_ids"]), own_B[usable]))
        samples.commit(self.state)

    def _row_kl(self, batch: Batch, credit: Credit) -> Tensor:
        kl_R = credit.token_kl(batch.values("rollout_logprobs"), batch.values("ref_logprobs"))
        row_R = torch.arange(len(batch)).repeat_interleave(batch.lengths("response_ids"))
        return torch.zeros(len(batch)).index_add_(0, row_R, kl_R)

    def _report(self, rewards_B: Tensor, groups_B: Tensor) -> None:
        """The same numbers on every rank: recorded as means, they stay what they are."""
        usable = rewards_B[~rewards_B.isnan()].double()
        if usable.numel():
            self.recorder.mean("reward", float(usable.mean()))
            self.recorder.mean("reward_std", float(usable.std()) if usable.numel() > 1 else 0.0)
            for percent in (10, 90):
                with np.errstate(invalid="ignore"):  # a reward beyond float32 is infinite, and warned of by the run
                    self.recorder.mean(f"reward_p{percent}", float(np.percentile(usable.numpy(), percent)))
        self.recorder.mean("frac_reward_zero_std", share_without_signal(rewards_B, groups_B))


def share_without_signal(rewards_B: Tensor, groups_B: Tensor) -> float:
    """The fraction of groups whose usable rewards are all equal, which teach a group-relative algorithm nothing."""
    members, group_B = groups_B.unique(return_inverse=True)
    if members.numel() == 0:
        return 0.0
    above, below = rewards_B.nan_to_num(float("inf")), rewards_B.nan_to_num(float("-inf"))
    low = torch.full((len(members),), float("inf")).scatter_reduce_(0, group_B, above, "amin")
    high = torch.full((len(members),), float("-inf")).scatter_reduce_(0, group_B, below, "amax")
    return float((low >= high).float().mean())


def _of_all_ranks(rows: Tensor, values: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """All ranks' rows in row order, with their values. Collective."""
    all_rows = torch.cat(gather_ragged(rows))
    order = all_rows.argsort()
    return all_rows[order], [torch.cat(gather_ragged(column))[order] for column in values]


def _columns(batch: Batch, advantages_B: Tensor) -> Batch:
    lengths_B = batch.lengths("response_ids")
    out = Batch(batch.rows)
    out.put_ragged("advantages", advantages_B.repeat_interleave(lengths_B), offsets_of(lengths_B))
    return out
