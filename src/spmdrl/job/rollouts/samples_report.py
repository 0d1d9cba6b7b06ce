"""The report of a step's samples: a few of them to read, and what the sample flow moved."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from spmdrl.config.config import Config
from spmdrl.dataflow.samples.control.row_lives import Accounting
from spmdrl.dataflow.samples.dock import Samples, TransferDock
from spmdrl.dataflow.samples.volume import FlowShape, Link, replay_buffer_gib, request_gib, warehouse_gib
from spmdrl.dataflow.stages.reward import DecodeTokens
from spmdrl.dataflow.stages.rows import TURNS, turn_texts
from spmdrl.dataflow.stages.stages import StageHook
from spmdrl.dataflow.stages.update_report import ShownRows
from spmdrl.job.rollouts.row_records import RowRecords
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.nouns.batch import Batch
from spmdrl.nouns.roles import WorkerState
from spmdrl.observability.logs.log import SampleRecord, SampleToken
from spmdrl.runtime.workers.verdict import Verdict

COLUMNS = ("response_ids", "reward", "reward_parts", "reward_verdict", "rollout_logprobs", "versions")


class SamplesReport(StageHook):
    """Writes samples from the main rank after each update, and records each rank's traffic."""

    def __init__(
        self, logs: RunLogs, dock: TransferDock, shown: ShownRows, records: RowRecords, decode: DecodeTokens, *,
        rewards: Sequence[str],
    ):  # fmt: skip
        """`rewards` are the names of the reward functions."""
        self._logs = logs
        self._dock = dock
        self._shown = shown
        self._records = records
        self._decode = decode
        self._rewards = rewards
        self._texts: dict[int, str] = {}
        self._volume = dock.volume.copy()

    def after(self, state: WorkerState, samples: Samples) -> None:
        """After the update, write this rank's record of its rows, and `log.samples_per_step` rows in full.

        Those are of one prompt first, then others of the step's prompts.
        """
        if state is not WorkerState.UPDATE:
            return
        self._records.write(samples.step)
        if not self._logs.world.is_main or not self._shown.rows:
            return
        turns = samples.reads(WorkerState.UPDATE) & {TURNS}
        batch = samples.read(self._shown.rows, [*COLUMNS, *turns])
        trained = [row for row in self._shown.rows if samples.is_trained(row)]
        advantages = samples.read(trained, ["advantages"]).to_lists("advantages")
        rows = _rows_of(batch, dict(zip(trained, advantages, strict=True)))
        self._logs.write_samples(samples.step, [self._record(samples, row) for row in rows])

    def _record(self, samples: Samples, one: _Row) -> SampleRecord:
        prompt, reward = samples.prompt_of(one.row), one.reward
        parts = dict(zip(self._rewards, one.parts, strict=True))
        tokens = self._tokens(one)
        turns = None if one.turns is None else turn_texts(one.ids, one.turns, self._decode)
        return SampleRecord(
            step=samples.step,
            row=one.row,
            prompt=prompt.text,
            response=self._decode(one.ids),
            answer=prompt.answer or "",
            reward=None if math.isnan(reward) else reward,
            parts={name: value for name, value in parts.items() if not math.isnan(value)},
            verdict=Verdict(one.verdict).name.lower(),
            advantage=_mean([token.advantage for token in tokens]),
            mismatch=_mean([token.mismatch and abs(token.mismatch) for token in tokens]),
            version=one.versions[-1] if one.versions else None,
            tokens=tokens,
            turns=turns,
        )

    def _tokens(self, one: _Row) -> list[SampleToken]:
        """The row's tokens with what the update read of them."""
        own = [True] * len(one.ids) if one.turns is None else [turn > 0 for turn in one.turns]
        seen = iter(self._shown.logprobs(one.row) or [])
        trained = [next(seen, None) if is_own else None for is_own in own]
        return [
            SampleToken(self._text(token), advantage if is_own else None, None if known is None else logprob - known)
            for token, is_own, advantage, logprob, known in zip(
                one.ids, own, one.advantages, one.logprobs, trained, strict=True
            )
        ]

    def _text(self, token: int) -> str:
        """One token's text by itself; a replacement character where the token is only part of a character."""
        if token not in self._texts:
            self._texts[token] = self._decode([token])
        return self._texts[token]

    def count(self, accounting: Accounting) -> None:
        """Record where the step's rows ended, and the bytes that this rank moved."""
        recorder = self._logs.recorder
        recorder.mean("dock/trained", accounting.num_trained)
        recorder.mean("dock/dropped", sum(accounting.num_dropped.values()))
        recorder.mean("dock/deferred", accounting.num_deferred)
        recorder.mean("dock/pending", accounting.num_pending)
        volume = self._dock.volume
        moved = volume.since(self._volume)
        self._volume = volume.copy()
        for link in Link:
            recorder.total(f"dock/bytes_{link.value}", moved.payload_bytes(link))
            for column, num_bytes in moved.put_bytes[link].items():
                recorder.total(f"dock/put_bytes/{column}/{link.value}", num_bytes)
            for column, num_bytes in moved.get_bytes[link].items():
                recorder.total(f"dock/get_bytes/{column}/{link.value}", num_bytes)
        recorder.total("dock/metadata_bytes", moved.metadata_bytes)
        recorder.total("dock/held_bytes", self._dock.held_bytes)


@dataclass(frozen=True)
class _Row:
    """What the dock has of a row to show; of ragged columns a value per token."""

    row: int
    ids: list[int]
    reward: float
    parts: list[float]
    verdict: int
    logprobs: list[float]
    versions: list[int]
    advantages: Sequence[float | None]
    """none where the row was dropped"""
    turns: list[int] | None


def _rows_of(batch: Batch, advantages: Mapping[int, Sequence[float]]) -> Iterator[_Row]:
    """The rows of a batch with the columns `COLUMNS`; `advantages` are by row number."""
    ids, versions, turns = (
        [list(map(int, values)) for values in batch.to_lists(name)] if name in batch else None
        for name in ("response_ids", "versions", TURNS)
    )
    assert ids is not None and versions is not None, batch.names
    rewards, verdicts = batch.dense("reward").tolist(), batch.dense("reward_verdict").tolist()
    parts, logprobs = batch.to_lists("reward_parts"), batch.to_lists("rollout_logprobs")
    for at, row in enumerate(batch.rows.tolist()):
        yield _Row(
            row, ids[at], rewards[at], parts[at], verdicts[at], logprobs[at], versions[at],
            advantages.get(row) or [None] * len(ids[at]), None if turns is None else turns[at],
        )  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def estimates_of(config: Config, states: Collection[WorkerState], num_warehouses: int) -> dict[str, float]:
    """Sizes of a run's sample flow in the paper's terms, and its Eq. 1, 2 and 4 in GiB per step (arXiv:2507.19017)."""
    flow = FlowShape.of_states(
        states,
        num_prompts=config.rollout.prompts_per_step,
        responses_each=config.rollout.num_generations,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.rollout.max_completion_length,
    )
    return asdict(flow) | {
        "num_controllers": len(states),
        "num_warehouses": num_warehouses,
        "eq1_gib": request_gib(flow),
        "eq2_gib": replay_buffer_gib(flow),
        "eq4_gib": warehouse_gib(flow, num_controllers=len(states), num_warehouses=num_warehouses),
    }
