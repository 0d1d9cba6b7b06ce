"""The check of graphs passes where they replay the step, and finds one that doesn't."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spmdrl.engines.generation.native.graph_steps import CAPTURES
from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.ops import TABLE
from spmdrl.resources.world import open_world
from spmdrl.verbs.doctor.stage_run import StageRun
from tests.bench.accelerator.graph_parity import check_graphs
from tests.engines.generation.recorded_graphs import RecordedGraph, RecordingCapture, run_in_pytorch


class StaleCapture(RecordingCapture):
    """Graphs that do nothing every other time, so that what was drawn last is drawn again."""

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        graph = super().capture(run)
        replay, times = graph.replay, iter(range(10_000))
        graph.replay = lambda: replay() if next(times) % 2 else None
        return graph


@pytest.mark.parametrize("capture", [RecordingCapture, StaleCapture])
def test_graphs_that_replay_and_graphs_that_do_not(capture, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAPTURES, "cpu", capture)
    run_in_pytorch(monkeypatch)
    # Packed weights have no memory that a recording could read.
    monkeypatch.setitem(TABLE["blocked_linear"], "cpu", plain.blocked_linear)
    with open_world("cpu") as world:
        run = StageRun("cpu", "small", 1, tmp_path, world)
        check_graphs(run)
    if capture is RecordingCapture:
        assert run.faults == [] and run.figures["equal_rows"] == 1
        assert run.figures["graphs_logprob_distance"] < 1e-5
    else:
        assert len(run.faults) == 1 and run.faults[0].startswith("graphs: log-probs of tokens drawn are")
    assert torch.tensor([run.figures["times_as_fast"]]).isfinite().all()
