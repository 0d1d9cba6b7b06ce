"""The report of a step's samples: a few of them in full, and the sample flow's traffic."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from spmdrl.config.config import Config
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.row_lives import Accounting
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.volume import FlowShape, Link, replay_buffer_gib, request_gib, warehouse_gib
from spmdrl.dataflow.stages.reward import DecodeTokens
from spmdrl.dataflow.stages.rows import TURNS, turn_texts
from spmdrl.dataflow.stages.stages import StageHook
from spmdrl.dataflow.stages.update_report import ShownRows
from spmdrl.job.model.role_models import RoleModels
from spmdrl.job.rollouts.row_records import RowRecords
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.batch import Batch
from spmdrl.nouns.roles import POLICY, WorkerState
from spmdrl.observability.log import SampleRecord, SampleToken
from spmdrl.runtime.workers.verdict import Verdict

COLUMNS = ("response_ids", "reward", "reward_parts", "reward_verdict", "rollout_logprobs", "versions")


class SamplesReport(StageHook):
    """Report of samples from the main rank after each update, and of each rank's traffic."""

    def __init__(
        self, logs: RunLogs, dock: TransferDock, shown: ShownRows, records: RowRecords, decode: DecodeTokens, *,
        rewards: Sequence[str],
    ):  # fmt: skip
        """`rewards` are the names of the reward functions."""
        self._logs = logs
        self._dock = dock
        self.shown = shown
        self.records = records
        self._decode = decode
        self._rewards = rewards
        self._texts: dict[int, str] = {}
        self._volume = dock.volume.copy()

    def after(self, state: WorkerState, samples: Samples) -> None:
        """After the update, write this rank's record of its rows, and `log.samples_per_step` rows in full.

        Rows of one prompt come first, then others of the step's prompts.
        """
        if state is not WorkerState.UPDATE:
            return
        self.records.write(samples.step)
        if not self._logs.world.is_main or not self.shown.rows:
            return
        turns = samples.rows.reads(WorkerState.UPDATE) & {TURNS}
        batch = samples.read(self.shown.rows, [*COLUMNS, *turns])
        trained = [row for row in self.shown.rows if samples.rows.is_trained(row)]
        advantages = dict(zip(trained, samples.read(trained, ["advantages"]).to_lists("advantages"), strict=True))
        records = [
            self._record(samples, batch.select([place]), advantages.get(row))
            for place, row in enumerate(batch.rows.tolist())
        ]
        self._logs.write_samples(samples.step, records)

    def _record(self, samples: Samples, one: Batch, advantages: Sequence[float | None] | None) -> SampleRecord:
        """Return the record of one row; without advantages it was dropped."""
        row, reward = int(one.rows[0]), float(one.dense("reward")[0])
        ids, versions, parts = (one.values(name).tolist() for name in ("response_ids", "versions", "reward_parts"))
        turns = one.values(TURNS).tolist() if TURNS in one else None
        own = [True] * len(ids) if turns is None else [turn > 0 for turn in turns]
        seen = iter(self.shown.logprobs(row) or [])
        trained = [next(seen, None) if is_own else None for is_own in own]
        tokens = [
            SampleToken(self._text(token), advantage if is_own else None, None if known is None else logprob - known)
            for token, is_own, advantage, logprob, known in zip(
                ids, own, advantages or [None] * len(ids), one.values("rollout_logprobs").tolist(), trained, strict=True
            )
        ]
        prompt = samples.rows.prompt_of(row)
        return SampleRecord(
            step=samples.step,
            row=row,
            prompt=prompt.text,
            response=self._decode(ids),
            answer=prompt.answer or "",
            reward=None if math.isnan(reward) else reward,
            parts={name: part for name, part in zip(self._rewards, parts, strict=True) if not math.isnan(part)},
            verdict=Verdict(int(one.dense("reward_verdict")[0])).name.lower(),
            advantage=_mean([token.advantage for token in tokens]),
            mismatch=_mean([token.mismatch and abs(token.mismatch) for token in tokens]),
            version=versions[-1] if versions else None,
            tokens=tokens,
            turns=None if turns is None else turn_texts(ids, turns, self._decode),
        )

    def _text(self, token: int) -> str:
        """Return one token's text by itself; a replacement character for a partial character."""
        if token not in self._texts:
            self._texts[token] = self._decode([token])
        return self._texts[token]

    def count(self, accounting: Accounting | None) -> None:
        """Record how many rows were trained, dropped, deferred or left pending, and the bytes that this rank moved.

        Ranks that only generate don't know the first.
        """
        recorder = self._logs.recorder
        if accounting is not None:
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


def build_report(
    checked: CheckedRun, logs: RunLogs, models: RoleModels, dock: TransferDock, decode: DecodeTokens, stack: ExitStack
) -> SamplesReport:
    """Return the report of a run that continues after `logs.start_step`; its records are closed with the stack."""
    config, policy = checked.config, models.get(POLICY)
    mesh = None if policy is None else policy.trainer.mesh
    records = stack.enter_context(RowRecords(logs.folder, logs.world, mesh, last_step=logs.start_step))
    shown = ShownRows(config.log.samples_per_step, records)
    logs.add_to_summary(
        "the sample flow's estimates", sample_flow=estimates_of(config, checked.needs, logs.world.num_nodes)
    )
    return SamplesReport(logs, dock, shown, records, decode, rewards=config.reward.names)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def estimates_of(config: Config, states: Collection[WorkerState], num_warehouses: int) -> dict[str, float]:
    """Return the sample flow's sizes by the paper, and its Eq. 1, 2 and 4 in GiB per step (arXiv:2507.19017)."""
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
