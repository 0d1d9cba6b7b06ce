from __future__ import annotations

import pytest

from spmdrl.dataflow.samples.volume import FlowShape, Link, Volume, replay_buffer_gib, request_gib, warehouse_gib


@pytest.mark.parametrize(
    ("prompts", "responses", "prompt_k", "items", "response_k", "scalars", "gib"),
    [
        (256, 8, 2, 5, 8, 3, 0.96),
        (256, 16, 2, 5, 16, 3, 3.81),
        (1024, 16, 2, 5, 16, 3, 15.2),
        (1024, 32, 4, 8, 32, 5, 97.0),
    ],
)
def test_the_estimates_are_those_of_the_papers_table(prompts, responses, prompt_k, items, response_k, scalars, gib):
    flow = FlowShape(prompts, responses, prompt_k * 1024, response_k * 1024, items, scalars)
    assert replay_buffer_gib(flow) == pytest.approx(gib, rel=0.01)
    assert request_gib(flow) < replay_buffer_gib(flow) / 2.9
    # Metadata for more controllers costs next to nothing, and warehouses share the rest.
    assert warehouse_gib(flow, num_controllers=5, num_warehouses=16) == pytest.approx(gib / 16, rel=0.02)


def test_volume_since_a_copy_is_what_was_added():
    volume = Volume()
    volume.put_bytes[Link.NODE] += 5
    before = volume.copy()
    volume.put_bytes[Link.NODE] += 7
    volume.metadata_bytes += 8
    added = volume.since(before)
    assert added.payload_bytes(Link.NODE) == 7 and added.payload_bytes(Link.PROCESS) == 0
    assert added.metadata_bytes == 8
