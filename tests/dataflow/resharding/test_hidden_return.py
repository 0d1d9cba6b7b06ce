"""The training state comes back beside the reward and reference stages, over an emulated slow link to the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from spmdrl.dataflow.resharding.flow import ReshardingFlow
from spmdrl.dataflow.resharding.swap_space import CopyTimes, FileStore, ReturnTicket, Span
from spmdrl.job.model.switching import Switching
from spmdrl.nouns.roles import POLICY
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.observability.report.gantt import gantt
from spmdrl.observability.timeline import Span as StageSpan
from spmdrl.observability.timeline import Timeline, TimelineRecords, read_timeline
from spmdrl.resources.device import Device
from spmdrl.resources.memory import MemoryLedger
from spmdrl.resources.world import World
from spmdrl.runtime.launch import read_launch_environment
from tests.dataflow.resharding.engines import SmallGenerator, SmallTrainer, make_model

COPY_SECONDS = 0.3
# Longer than the copy, so that it is hidden although a busy machine wakes its thread late.
STAGES, STAGE_SECONDS = ("reward", "reference"), 0.35


class SlowStore(FileStore):
    """Brings storages back at so many bytes a second, each group beside the other."""

    def __init__(self, directory: Path, bytes_per_second: float):
        super().__init__(directory)
        self.bytes_per_second = bytes_per_second

    def read(self, spans: Sequence[Span]) -> ReturnTicket:
        return SlowReading(super().read, spans, self.bytes_per_second)


class SlowReading:
    def __init__(self, read, spans: Sequence[Span], bytes_per_second: float):
        self.start = self.end = time.perf_counter()
        self.thread = threading.Thread(target=self.run, args=(read, spans, bytes_per_second))
        self.thread.start()

    def run(self, read, spans: Sequence[Span], bytes_per_second: float) -> None:
        read(spans).wait()
        time.sleep(sum(span.num_bytes for span in spans) / bytes_per_second)
        self.end = time.perf_counter()

    def is_done(self) -> bool:
        return not self.thread.is_alive()

    def wait(self) -> None:
        self.thread.join()

    def times(self) -> CopyTimes:
        return CopyTimes(self.start, self.end)


@dataclass
class SmallLogs:
    """What switching needs of a run's logs."""

    folder: Path
    recorder: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.folder / "rank.jsonl", rank=0)


def compute(seconds: float) -> None:
    """Keeps this thread at work, as a stage does."""
    end, matrix = time.perf_counter() + seconds, torch.ones(128, 128)
    while time.perf_counter() < end:
        matrix = matrix @ matrix / 128


def step_with_stages(folder: Path, stages: Sequence[str]) -> tuple[dict[str, float], list[StageSpan]]:
    """The metrics and the timeline of one step with these stages between a return's start and its end."""
    logs, trainer = SmallLogs(folder), SmallTrainer(make_model(width=40))
    world = World(read_launch_environment({}), Device("cpu"))
    trainer.train(torch.ones(2, 40))
    before = trainer.state_bytes()
    optimizer_bytes = sum(tensor.nbytes for tensor in trainer.optimizer_tensors())
    generator = SmallGenerator({name: shard.global_shape for name, shard in trainer.named_shards().items()})
    ledger = MemoryLedger()
    flow = ReshardingFlow(
        world, {POLICY: trainer}, generator, ReshardConfig(), ledger, folder / "host",
        make_store=lambda device, directory: SlowStore(directory, optimizer_bytes / COPY_SECONDS),
    )  # fmt: skip
    switching = Switching(flow, ledger, logs, world.device)
    switching.to_generation(1)
    switching.start_return(1)
    for name in stages:
        with logs.timeline.stage(name, 1):
            compute(STAGE_SECONDS)
    switching.to_update(1)
    assert all(map(torch.equal, before, trainer.state_bytes()))
    flow.close()
    logs.timeline.close()
    return merge([encode(logs.recorder.drain())]), read_timeline(folder).spans


def overlap(one: StageSpan, other: StageSpan) -> float:
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))


@pytest.mark.alone
@pytest.mark.cpu_only(reason="the link is emulated by a file, which only a CPU swaps to")
def test_the_return_is_hidden_behind_the_stages_that_run_meanwhile(tmp_path):
    metrics, spans = step_with_stages(tmp_path, STAGES)
    (copy,) = [span for span in spans if span.background]
    stages = [span for span in spans if span.stage in STAGES]
    assert copy.stage == "return" and copy.seconds > 0.9 * COPY_SECONDS
    assert sum(overlap(copy, stage) for stage in stages) > 0.8 * copy.seconds
    assert metrics["reshard/return_hidden_share"] > 0.8
    [choices] = gantt(TimelineRecords(spans, []))
    assert "return, step 1, rank 0" in choices.views[0][1]


@pytest.mark.alone
@pytest.mark.cpu_only(reason="the link is emulated by a file, which only a CPU swaps to")
def test_without_stages_in_between_the_return_is_waited_for(tmp_path):
    metrics, spans = step_with_stages(tmp_path, ())
    (copy,) = [span for span in spans if span.background]
    waiting = [span for span in spans if span.stage == "resharding"][-1]
    assert overlap(copy, waiting) > 0.8 * copy.seconds
    assert metrics["reshard/return_hidden_share"] < 0.2


@pytest.mark.parametrize(("moment", "share"), [(0.0, 0.0), (3.0, 0.5), (9.0, 1.0)])
def test_the_share_of_a_copy_before_a_moment(moment, share):
    assert CopyTimes(2.0, 4.0).share_before(moment) == share
    assert CopyTimes(2.0, 2.0).share_before(moment) == 1.0
