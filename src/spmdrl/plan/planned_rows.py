"""Rows of a step that is only planned, as worker states take them from the sample flow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spmdrl.dataflow.samples.schema import rule_of
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.batch import Batch, Integers, offsets_of
from spmdrl.nouns.roles import WorkerState


@dataclass(frozen=True)
class RowLengths:
    """Tokens of each row."""

    prompt: int
    response: int


class PlannedSamples:
    """Rows of this rank as each state would take them, with all columns that it reads."""

    step = 1

    def __init__(self, checked: CheckedRun, vocab_size: int, lengths: RowLengths, num_rows: int, *, num_experts: int):
        self.group_size = checked.config.rollout.num_generations
        self.num_all = num_rows
        self.rows = self
        self.to_train: Integers = np.arange(num_rows)
        self._needs = checked.needs
        self._vocab_size, self._lengths = vocab_size, lengths
        self._widths = {"routed_experts": num_experts, "reward_parts": 0}
        top = checked.algorithm.num_likeliest
        self._widths |= {"teacher_top_ids": top, "teacher_top_logprobs": top + 1}

    @property
    def groups_to_train(self) -> Integers:
        return np.unique(self.to_train // self.group_size)

    def keep(self, rows: Iterable[int]) -> None:
        """Keep these rows only."""
        self.to_train = np.array(sorted(rows), dtype=np.int64)

    def reads(self, state: WorkerState) -> frozenset[str]:
        return self._needs[state]

    def ready_portions(self, state: WorkerState) -> list[Integers]:
        return [self.to_train]

    def take(self, state: WorkerState, names: Iterable[str] | None = None, *, among: Integers | None = None) -> Batch:
        rows = torch.from_numpy(self.to_train)
        batch = Batch(rows)
        prompts, responses = (
            (first[:, None] + torch.arange(length)) % self._vocab_size
            for first, length in (
                (rows // self.group_size * 31, self._lengths.prompt),
                (rows * 17 + 1, self._lengths.response),
            )
        )
        for name, tokens in (("prompt_ids", prompts), ("response_ids", responses)):
            batch.put_ragged(name, tokens.flatten().int(), _offsets(len(rows), tokens.shape[1]))
        for name in frozenset(self._needs[state] if names is None else names) - {"prompt_ids", "response_ids"}:
            self._put(batch, name)
        return batch

    def _put(self, batch: Batch, name: str) -> None:
        rule, size = rule_of(name), len(batch)
        if not rule.column.ragged:
            return batch.put_dense(name, torch.ones(size, dtype=rule.column.dtype))
        width = self._lengths.response if rule.length_of else self._lengths.response * self._widths.get(name, 1)
        if name == "routed_experts":
            width = self._widths[name] * (self._lengths.prompt + self._lengths.response - 1)
        batch.put_ragged(name, torch.ones(size * width, dtype=rule.column.dtype), _offsets(size, width))

    def put(self, *_: Any) -> None:
        """Drop the columns that a state made: later ones take planned columns."""

    commit = put


def _offsets(num_rows: int, width: int) -> torch.Tensor:
    return offsets_of([width] * num_rows)
