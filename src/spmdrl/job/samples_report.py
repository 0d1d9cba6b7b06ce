"""What is told of a step's samples: a few of them to read, and what the sample flow moved."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmdrl.dataflow.samples.dock import Accounting, Samples, TransferDock
from spmdrl.dataflow.samples.prompts import Prompt
from spmdrl.dataflow.samples.volume import Link
from spmdrl.dataflow.stages.reward import DecodeTokens
from spmdrl.engines.reward.verdict import Verdict
from spmdrl.job.run import Run
from spmdrl.observability.log import SampleRecord
from spmdrl.types import Batch

COLUMNS = ("response_ids", "reward", "reward_parts", "reward_verdict", "versions")


class SamplesReport:
    """Writes samples from the main rank, and records each rank's traffic."""

    def __init__(self, run: Run, dock: TransferDock, decode: DecodeTokens):
        self._run = run
        self._dock = dock
        self._decode = decode
        self._volume = dock.volume.copy()

    def write(self, samples: Samples, prompts: Sequence[Prompt]) -> None:
        """Write `log.samples_per_step` rows, spread over the step's prompts."""
        wanted = min(self._run.config.log.samples_per_step, samples.num_rows)
        if self._run.samples_log is None or wanted == 0:
            return
        rows = [number * samples.num_rows // wanted for number in range(wanted)]
        batch = samples.read(rows, COLUMNS)
        self._run.samples_log.write(self._record(samples, batch, position, prompts) for position in range(len(batch)))

    def _record(self, samples: Samples, batch: Batch, position: int, prompts: Sequence[Prompt]) -> SampleRecord:
        one = batch.select([position])
        row = int(one.rows)
        prompt = prompts[row // samples.group_size]
        reward = float(one.dense("reward"))
        names = self._run.config.reward.names
        parts = dict(zip(names, one.to_lists("reward_parts")[0], strict=True))
        versions = one.to_lists("versions")[0]
        return SampleRecord(
            step=samples.step,
            row=row,
            prompt=prompt.text,
            response=self._decode([int(token) for token in one.to_lists("response_ids")[0]]),
            answer=prompt.answer or "",
            reward=None if math.isnan(reward) else reward,
            parts={name: value for name, value in parts.items() if not math.isnan(value)},
            verdict=Verdict(int(one.dense("reward_verdict"))).name.lower(),
            advantage=self._advantage(samples, row),
            mismatch=None,
            version=int(versions[0]) if versions else None,
        )

    def _advantage(self, samples: Samples, row: int) -> float | None:
        """The row's advantage, which all its tokens share; a dropped row has none."""
        if not samples.is_trained(row):
            return None
        return float(samples.read([row], ["advantages"]).values("advantages")[0])

    def count(self, accounting: Accounting) -> None:
        """Record where the step's rows ended, and the bytes that this rank moved."""
        recorder = self._run.recorder
        recorder.mean("dock/trained", accounting.num_trained)
        recorder.mean("dock/dropped", sum(accounting.num_dropped.values()))
        volume = self._dock.volume
        moved = volume.since(self._volume)
        self._volume = volume.copy()
        for link in Link:
            recorder.total(f"dock/bytes_{link.value}", moved.payload_bytes(link))
        recorder.total("dock/metadata_bytes", moved.metadata_bytes)
