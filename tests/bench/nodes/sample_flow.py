"""The whole sample flow of GRPO steps with made-up rows, and sleep in place of computing.

Lengths are log-normal within the limits of the paper's Table 1, scaled down. A step on n nodes has n times the rows of
a step on one, of the same lengths in another order: the work a node is the same, and so is the longest response.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmdrl.dataflow.data.prompts import Prompt, prompt_columns
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import needs_by_state, rule_of
from spmdrl.nouns.batch import Batch, WorkerState, offsets_of

COLUMNS_FOR_LOSS = frozenset({"advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs"})
"""what GRPO reads with a reference in its loss and several updates a batch"""
NEEDS = needs_by_state(COLUMNS_FOR_LOSS)
# Forward passes that a token costs: a backward pass is worth two.
PASSES = {WorkerState.REFERENCE: 1, WorkerState.OLD_LOGPROBS: 1, WorkerState.UPDATE: 3}


@dataclass(frozen=True)
class FlowSize:
    """How large a step is, and how fast its emulated computing."""

    rows_per_node: int = 256
    """with 8 nodes the batch of the first row of Table 1: 256 prompts x 8 responses"""
    group_size: int = 8
    """responses per prompt"""
    max_prompt_length: int = 1024
    """tokens; half of the table's"""
    max_response_length: int = 4096
    """tokens; half of the table's"""
    scored_tokens_per_second: float = 500_000.0
    """of a forward pass on one rank; more than nodes of eight devices reach, so that dispatch weighs more than there"""
    decode_steps_per_second: float = 2000.0
    """tokens a second of each row, all rows of a rank at once"""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows_per_node < self.group_size or self.rows_per_node % self.group_size:
            raise ValueError(
                f"{self.rows_per_node} rows per node, but it must be a multiple of {self.group_size}, the responses "
                f"per prompt; try {max(1, self.rows_per_node // self.group_size) * self.group_size}"
            )


@dataclass(frozen=True)
class FlowStep:
    """One step's row lengths [B], in row order; prompts' lengths are one per group."""

    step: int
    group_size: int
    prompt_lengths_G: Tensor
    response_lengths_B: Tensor

    @property
    def num_rows(self) -> int:
        return self.response_lengths_B.numel()

    def tokens_of(self, rows: Tensor) -> int:
        """Prompt and response tokens of some rows."""
        return int(self.prompt_lengths_G[rows // self.group_size].sum() + self.response_lengths_B[rows].sum())

    def prompts(self) -> list[Prompt]:
        """Prompts made of their numbers."""
        lengths = self.prompt_lengths_G.tolist()
        return [Prompt("", array("i", [number]) * length, "", None, {}, "") for number, length in enumerate(lengths)]

    def column(self, name: str, rows: Tensor) -> Batch:
        """A column of one value per response token, made of its rows' numbers and of its name."""
        lengths_B = self.response_lengths_B[rows]
        batch = Batch(rows)
        values_B = (rows * _FACTORS[name]).to(dtype_of(name))
        batch.put_ragged(name, values_B.repeat_interleave(lengths_B), offsets_of(lengths_B))
        return batch


def dtype_of(name: str) -> torch.dtype:
    return rule_of(name).column.dtype


# Different for each column, and exact in float32 for all rows of a step.
_FACTORS = {
    "response_ids": 1.0,
    "rollout_logprobs": -0.25,
    "old_logprobs": -0.5,
    "ref_logprobs": -0.75,
    "advantages": 0.5,
}


def make_step(size: FlowSize, num_nodes: int, step: int) -> FlowStep:
    """The lengths of a step on so many nodes; a function of its arguments alone."""
    random = np.random.default_rng((size.seed, step))
    num_prompts = size.rows_per_node // size.group_size
    prompts_G = _lengths(random.standard_normal(num_prompts), size.max_prompt_length)
    # Responses to one prompt are alike: half of the variance is the prompt's.
    of_prompt, of_row = random.standard_normal((num_prompts, 1)), random.standard_normal((num_prompts, size.group_size))
    responses_GN = _lengths((of_prompt + of_row) / 2**0.5, size.max_response_length)
    order = random.permutation(np.tile(np.arange(num_prompts), num_nodes))
    responses_B = torch.from_numpy(responses_GN[order].reshape(-1))
    return FlowStep(step, size.group_size, torch.from_numpy(prompts_G[order]), responses_B)


def _lengths(normal: np.ndarray[Any, np.dtype[np.float64]], longest: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Log-normal lengths with a median of a quarter of the longest, above which they are cut."""
    return np.clip(np.exp(0.7 * normal) * longest / 4, 1, longest).astype(np.int64)


class StepRun:
    """One rank's part of a step. `seconds` is how long it slept for each worker state."""

    def __init__(self, samples: Samples, step: FlowStep, size: FlowSize):
        self.seconds: dict[WorkerState, float] = {}
        self._samples = samples
        self._step = step
        self._size = size

    def run(self) -> Batch:
        """Go through all worker states, and return the rows that the update took. Collective over all ranks."""
        self._generate()
        self._reward()
        self._score(WorkerState.REFERENCE, "ref_logprobs")
        self._score(WorkerState.OLD_LOGPROBS, "old_logprobs")
        self._give_credit()
        taken = self._samples.take(WorkerState.UPDATE, NEEDS[WorkerState.UPDATE])
        self._compute(WorkerState.UPDATE, taken.rows, time.perf_counter())
        self._samples.commit(WorkerState.UPDATE)
        return taken

    def _generate(self) -> None:
        """All rows decode at once; a group is put when its longest response is there."""
        rows = torch.tensor(self._samples.rows.deal_generation(), dtype=torch.int64)
        started, groups = time.perf_counter(), rows.reshape(-1, self._step.group_size)
        seconds_G = self._step.response_lengths_B[groups].amax(1) / self._size.decode_steps_per_second
        for number in seconds_G.argsort().tolist():
            made = self._generated(groups[number])
            _sleep_until(started + float(seconds_G[number]))
            self._samples.put(WorkerState.GENERATION, made)
        self.seconds[WorkerState.GENERATION] = float(seconds_G.max()) if len(groups) else 0.0
        self._samples.commit(WorkerState.GENERATION)

    def _generated(self, rows: Tensor) -> Batch:
        batch = self._step.column("response_ids", rows)
        batch.update(self._step.column("rollout_logprobs", rows))
        offsets = batch.offsets("response_ids")
        versions_T = torch.full((int(offsets[-1]),), self._step.step, dtype=dtype_of("versions"))
        batch.put_ragged("versions", versions_T, offsets)
        batch.put_dense("finished", torch.ones(len(rows), dtype=dtype_of("finished")))
        return batch

    def _reward(self) -> None:
        """Rewards are computed as responses end, so none is waited for."""
        batch = Batch.of_rows(self._samples.rows.take_generated(WorkerState.REWARD))
        batch.put_dense("reward", batch.rows.float())
        batch.put_dense("reward_verdict", torch.zeros(len(batch), dtype=dtype_of("reward_verdict")))
        batch.put_ragged("reward_parts", batch.rows.float(), torch.arange(len(batch) + 1))
        self._samples.put(WorkerState.REWARD, batch)
        self._samples.commit(WorkerState.REWARD)

    def _score(self, state: WorkerState, column: str) -> None:
        taken = self._samples.take(state, NEEDS[state])
        started = time.perf_counter()
        made = self._step.column(column, taken.rows)
        self._compute(state, taken.rows, started)
        self._samples.put(state, made)
        self._samples.commit(state)

    def _give_credit(self) -> None:
        taken = self._samples.take(WorkerState.ADVANTAGE, NEEDS[WorkerState.ADVANTAGE])
        self._samples.put(WorkerState.ADVANTAGE, self._step.column("advantages", taken.rows))
        self._samples.commit(WorkerState.ADVANTAGE)

    def _compute(self, state: WorkerState, rows: Tensor, started: float) -> None:
        """Last until a computation of these rows that began at `started` would end."""
        self.seconds[state] = PASSES[state] * self._step.tokens_of(rows) / self._size.scored_tokens_per_second
        _sleep_until(started + self.seconds[state])


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def check_taken(taken: Batch, step: FlowStep) -> None:
    """Raise RuntimeError unless each row brought its own values in all columns that the update reads."""
    group_B = taken.rows // step.group_size
    prompts = prompt_columns(step.prompts()).select(group_B)
    for name in NEEDS[WorkerState.UPDATE]:
        expected = prompts if name == "prompt_ids" else step.column(name, taken.rows)
        same_lengths = torch.equal(taken.offsets(name), expected.offsets(name))
        if not same_lengths or not torch.equal(taken.values(name), expected.values(name)):
            raise RuntimeError(f"step {step.step}: column {name!r} came back with other values than were put")
