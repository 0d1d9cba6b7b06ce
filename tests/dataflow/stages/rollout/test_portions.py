"""Portions of rows that are scored while a rank waits: the same rows whenever they are, and never a deadlock."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tests.dataflow.samples.flow import GROUP_SIZE, NUM_ROWS, ONE_RANK, make_prompts, response_of
from tests.support.chosen_device import chosen_device
from tests.support.ranks import run_ranks

from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import needs_by_state
from spmdrl.dataflow.stages.inference import ScoreStage
from spmdrl.dataflow.stages.rollout.portions import Portions
from spmdrl.engines.generation.protocol import Response
from spmdrl.nouns.batch import Batch, WorkerState
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.observability.timeline import Timeline
from spmdrl.resources.collectives import Arrivals
from spmdrl.resources.mesh import lone_generation_mesh
from spmdrl.resources.world import World

NUM_PORTIONS, NUM_STEPS = 2, 3


class Reference(ScoreStage):
    """Rates each token by itself, and notes which rows were scored together."""

    def __init__(self) -> None:
        self.state, self.column, self.seen = WorkerState.REFERENCE, "ref_logprobs", None
        self.presence = lambda: tempfile.TemporaryDirectory()  # any context
        self.together: list[list[int]] = []

    def _scored(self, batch: Batch) -> Batch:
        self.together.append(batch.rows.tolist())
        scored = Batch(batch.rows)
        values = (batch.values("response_ids") / 7).to(chosen_device(), torch.float32)
        scored.put_ragged(self.column, values, batch.offsets("response_ids"))
        return scored


class Generating:
    """Makes the rows of a rank in a fixed order, with waits of random lengths in between."""

    def __init__(self, world: World, portions: Portions, clock: int):
        self.rank, self.portions, self.clock = world.rank, portions, clock

    def __call__(self, samples: Samples) -> None:
        rows, chance = samples.rows.deal_generation(), random.Random(f"{self.clock} {samples.step} {self.rank}")
        random.Random(samples.step).shuffle(rows)
        self.portions.open(samples, len(rows))
        for row in rows:
            time.sleep(chance.random() * 0.005)
            self.portions.add([response_to(row)])
            for _ in range(chance.randrange(3)):
                self.portions.between_steps()
            if chance.random() < 0.6:
                self.portions.until(Answer(chance.random() * 0.01))
        self.portions.close()
        samples.commit(WorkerState.GENERATION)


class Answer:
    """Comes after some seconds."""

    def __init__(self, seconds: float):
        self.at = time.perf_counter() + seconds

    def __call__(self, seconds: float | None) -> float | None:
        left = max(0.0, self.at - time.perf_counter())
        time.sleep(left if seconds is None else min(seconds, left))
        return self.at if time.perf_counter() >= self.at else None


def response_to(row: int) -> Response:
    ids = response_of(row)
    return Response(row, tuple(ids), (-0.5,) * len(ids), "stop", (1,) * len(ids))


def train(world: World, is_fused: bool, clock: int) -> tuple[list, list]:
    """What each call scored, and the rows of each update with their scores."""
    stage, trained = Reference(), []
    with tempfile.TemporaryDirectory() as folder:
        needs = needs_by_state({"ref_logprobs", "rollout_logprobs"})
        timeline = Timeline(Path(folder) / "timeline" / "rank", world.rank)
        axis = lone_generation_mesh(world.rank).tensor
        arrivals = Arrivals(30.0) if is_fused else None
        generation = Generating(world, Portions(NUM_PORTIONS, [stage], axis, timeline, arrivals), clock)
        with TransferDock(world, needs, DockConfig(20.0)) as dock:
            for step in range(1, NUM_STEPS + 1):
                samples = dock.open_batch(step, make_prompts(), GROUP_SIZE)
                generation(samples)
                num_beside = len(stage.together)
                stage(samples)
                assert num_beside == (step - 1) * NUM_PORTIONS + (NUM_PORTIONS - 1 if is_fused else 0)
                batch = samples.take(WorkerState.UPDATE)
                trained.append((batch.rows.tolist(), batch.to_lists("ref_logprobs")))
                samples.commit(WorkerState.UPDATE)
                dock.close_batch(samples)
            for waits in timeline.waits(NUM_STEPS).values():
                assert 0.0 <= waits.hidden_seconds <= waits.seconds
        timeline.close()
    return stage.together, trained


def test_portions_hold_rows_in_the_order_in_which_they_ended_the_later_ones_less():
    together, _ = train(ONE_RANK, True, 0)
    assert [len(rows) for rows in together] == [NUM_ROWS * 3 // 4, NUM_ROWS // 4] * NUM_STEPS
    assert (together, _) == train(ONE_RANK, False, 1)


def test_only_a_wait_that_is_left_is_worked_in_and_hideable_is_what_waits_could_have_held(tmp_path):
    stage, timeline = Reference(), Timeline(tmp_path / "rank", 0)
    axis = lone_generation_mesh(0).tensor
    portions = Portions(NUM_PORTIONS, [stage], axis, timeline, Arrivals(30.0))
    needs = needs_by_state({"ref_logprobs", "rollout_logprobs"})
    with TransferDock(ONE_RANK, needs, DockConfig(20.0)) as dock:
        samples = dock.open_batch(1, make_prompts(), GROUP_SIZE)
        rows = samples.rows.deal_generation()
        portions.open(samples, len(rows))
        portions.add([response_to(row) for row in rows])
        portions.until(Answer(0.0))
        portions.between_steps()
        assert stage.together == []
        portions.until(Answer(0.2))
        assert len(stage.together) == NUM_PORTIONS - 1
        waits, hideable = timeline.waits(1)["generation"], portions.hideable_seconds()
        # All rows had ended, and three quarters of them were scored.
        assert waits.hidden_seconds < hideable <= waits.seconds
        portions.close()
        samples.commit(WorkerState.GENERATION)
        portions.open(samples, len(rows))
        assert portions.hideable_seconds() == 0.0
    timeline.close()


@pytest.mark.ranks
def test_whatever_the_delays_ranks_score_the_same_portions_in_the_same_order():
    after = run_ranks(3, train, False, 0)
    first = [row for together, _ in after for rows in together[:NUM_PORTIONS] for row in rows]
    assert sorted(first) == [*range(NUM_ROWS)]
    for clock in (1, 2, 3):
        assert run_ranks(3, train, True, clock) == after
