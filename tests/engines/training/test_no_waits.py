"""The host never waits for a device between a batch's micro-batches: it queues them all, then reads what came out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.training.tiny import make_engine, make_rows, weighted_nll
from tests.support.host_waits import HostWaits


@pytest.fixture
def device_world(world: Any) -> Any:
    if world.device.is_cpu:
        pytest.skip("a CPU has nothing to wait for; --device sim shows it anywhere")
    return world


@pytest.mark.on_device
def test_scores_stay_on_the_device_and_nothing_waits_for_them(device_world):
    engine = make_engine(device_world, max_tokens=13)
    engine.score(make_rows())
    with HostWaits() as host:
        scores = engine.score(make_rows())
    assert not host.all
    assert scores.logprobs_R.device == device_world.device.torch_device


@pytest.mark.on_device
def test_an_update_reads_nothing_before_its_last_product(device_world):
    engine = make_engine(device_world, max_tokens=13)
    engine.update(make_rows(), weighted_nll)
    with HostWaits() as host:
        engine.accumulate(make_rows(), weighted_nll)
    assert not host.between


def test_a_step_reads_as_often_after_many_microbatches_as_after_one(device_world):
    reads = []
    for max_tokens in (1, 10_000):
        engine = make_engine(device_world, max_tokens=max_tokens)
        accumulated = engine.accumulate(make_rows(), weighted_nll)
        with HostWaits() as host:
            engine.step(accumulated)
        reads.append(host.all)
    assert reads[0] == reads[1] and reads[0].total()
