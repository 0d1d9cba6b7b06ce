"""A run's reports: on the screen, as metrics, as samples to read, in its summary and as a timeline."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from spmdrl.nouns.settings.log_config import LogConfig
from spmdrl.observability.alert_log import AlertLog
from spmdrl.observability.health import counts_so_far
from spmdrl.observability.log import MetricsLog, SampleRecord, SamplesLog, TrackedRun
from spmdrl.observability.metrics import Recorder, Stat, Table, encode, merge, table_of, totals_of
from spmdrl.observability.outage import best_effort, take_num_refused
from spmdrl.observability.slow_ranks import SlowRanks, ratios
from spmdrl.observability.summary import write_summary
from spmdrl.observability.terminal.console import Console
from spmdrl.observability.timeline import Timeline, timeline_file, truncate_other_ranks
from spmdrl.resources.collectives import gather_and_agree, gather_bytes
from spmdrl.resources.world import World
from spmdrl.runtime.supervision.main_thread import work_sampler

# Interval of steps whose samples trackers get, beginning with the first.
_SAMPLES_INTERVAL = 10


class RunLogs:
    """Each rank's recorder and timeline; on the main rank also the console, the logs and summary.json."""

    def __init__(
        self, folder: Path, world: World, console: Console, *, config: LogConfig, tracked: TrackedRun, last_step: int,
        is_logged: bool = True, sets: Collection[range] = (),
    ):  # fmt: skip
        """Open the files, and drop logs after `last_step`: it will be repeated.

        The metrics of `last_step` itself are still to come unless it `is_logged`. Ranks of different `sets` aren't
        compared with each other.
        """
        self.folder = folder
        self.world = world
        self.console = console
        self.start_step = max(0, last_step)
        """the last step that was done before this job"""
        self.recorder = Recorder()
        self.stop_reason: str | None = None
        """reason of a request to stop a rank before the newest step was written; the same on every rank"""
        self.notice = b""
        """the main rank's notice with the newest step; the same on every rank"""
        self.timeline = Timeline(timeline_file(folder, world.rank), world.rank, shown=console.stage)
        self.timeline.truncate_after(last_step)
        self._slow_ranks, self._sets = SlowRanks(), sets
        self._metrics: MetricsLog | None = None
        self._samples: SamplesLog | None = None
        self._alerts: AlertLog | None = None
        if world.is_main:
            truncate_other_ranks(folder, world.size, last_step)
            self._metrics = MetricsLog(folder, config.backends, console=console, run=tracked)
            last_logged = last_step if is_logged else last_step - 1
            self._metrics.truncate_after(last_logged)
            self._alerts = AlertLog(folder, config, last_step=last_logged)
            self._samples = SamplesLog(folder)
            self._samples.truncate_after(last_step)

    def write_step(
        self, step: int, seconds: float, before: Mapping[str, float], *, notice: bytes = b""
    ) -> dict[str, float]:
        """Reduce the step's metrics over ranks and write them; counts continue from `before`. Collective.

        `seconds` and the `notice`, a line, are this rank's. Returns the metrics, the same on every rank.
        """
        for stage, stage_seconds in self.timeline.stage_seconds(step).items():
            self.recorder.maximum(f"time/{stage}", stage_seconds)
        self.recorder.maximum("time/step", seconds)
        for stage, waits in self.timeline.waits(step).items():
            self.recorder.total(f"fusion/waited_seconds/{stage}", waits.seconds)
            self.recorder.total(f"fusion/hidden_seconds/{stage}", waits.hidden_seconds)
            self.recorder.mean("fusion/hidden_share", waits.hidden_seconds / waits.seconds, waits.seconds)
        if refused := take_num_refused():
            self.recorder.total("log/refused_writes", refused)
        working = json.dumps(work_sampler.working_seconds(self.timeline.stage_seconds(step))).encode()
        payloads, self.stop_reason = gather_and_agree(b"\n".join([encode(self.recorder.drain()), working, notice]))
        tables, times, notices = zip(*(payload.split(b"\n") for payload in payloads), strict=True)
        metrics, self.notice = merge(tables), notices[0]
        seconds_by_rank = [json.loads(one) for one in times]
        if self.world.size > 1:
            metrics["perf/slowest_rank_ratio"] = max(ratios(seconds_by_rank, self._sets))
        metrics |= self._rates(metrics)
        metrics |= counts_so_far(metrics, before)
        if self._metrics is not None and self._alerts is not None:
            slow = self._slow_ranks.warnings(seconds_by_rank, self._sets)
            alerts = self._alerts.after_step(step, metrics, slow)
            self._metrics.write(step, metrics | ({"log/warnings": len(alerts)} if alerts else {}))
            for alert in alerts:
                self.console.note(alert)
        return metrics

    def take_unwritten(self) -> Table:
        """Return all ranks' records since the last step, which `give_back` records again. Collective."""
        tables = gather_bytes(encode(self.recorder.drain()))
        return table_of(totals_of([json.loads(table) for table in tables]))

    def give_back(self, table: Table) -> None:
        """Record metrics that an earlier part of the run had not written."""
        if self.world.is_main:
            for name, (kind, value, count) in table.items():
                self.recorder.add(name, Stat(kind, value, count))

    def _rates(self, metrics: Mapping[str, float]) -> dict[str, float]:
        if "perf/tokens" not in metrics:
            return {}
        rate = metrics["perf/tokens"] / metrics["time/step"]
        # Eq. 5 of the MindSpeed RL paper, with real lengths in place of the longest ones.
        return {"perf/tokens_per_second": rate, "perf/eq5_tokens_per_second_per_device": rate / self.world.size}

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Write some samples of a step on the main rank; services get every tenth step's."""
        if self._samples is None or self._metrics is None:
            return
        self._samples.write(samples)
        if samples and (step - 1) % _SAMPLES_INTERVAL == 0:
            self._metrics.write_samples(step, samples)

    def add_to_summary(self, what: str, **fields: object) -> None:
        """Put fields into summary.json from the main rank; if the disk refuses, warn that `what` is missing."""
        if self.world.is_main:
            with best_effort(what):
                write_summary(self.folder, **fields)

    def close(self) -> None:
        """Close this rank's files."""
        self.timeline.close()
        for log in (self._metrics, self._samples, self._alerts):
            if log is not None:
                log.close()
