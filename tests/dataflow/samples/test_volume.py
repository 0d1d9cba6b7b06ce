from __future__ import annotations

import pytest
import torch

from spmdrl.dataflow.samples.volume import (
    FlowShape,
    Link,
    Volume,
    column_bytes,
    replay_buffer_gib,
    request_gib,
    warehouse_gib,
)
from spmdrl.nouns.batch import Batch, WorkerState


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


def test_a_flows_items_and_scalars_follow_from_its_worker_states():
    states = {WorkerState.GENERATION, WorkerState.REWARD, WorkerState.ADVANTAGE, WorkerState.UPDATE}
    sizes = {"num_prompts": 4, "responses_each": 2, "max_prompt_length": 8, "max_response_length": 16}
    flow = FlowShape.of_states(states, **sizes)
    # Response ids, rollout log-probs, versions, advantages; index, length, finished, reward, verdict.
    assert (flow.num_response_items, flow.num_scalars) == (4, 5)
    longer = FlowShape.of_states(states | {WorkerState.REFERENCE, WorkerState.OLD_LOGPROBS}, **sizes)
    assert (longer.num_response_items, longer.num_scalars) == (6, 5)


def test_bytes_of_a_column_are_its_values_and_its_offsets():
    batch = Batch.of_rows([0, 1])
    batch.put_lists("response_ids", [[1, 2, 3], [4]], torch.int32)
    batch.put_dense("reward", torch.zeros(2))
    assert column_bytes(batch) == {"response_ids": 4 * 4 + 3 * 8, "reward": 2 * 4}
    assert sum(column_bytes(batch).values()) == batch.num_bytes()


def test_volume_since_a_copy_is_what_was_added():
    volume = Volume()
    volume.count_put(Link.NODE, {"reward": 5})
    volume.count_get(Link.CROSS_NODE, {"prompt_ids": 3})
    before = volume.copy()
    volume.count_put(Link.NODE, {"reward": 7, "versions": 2})
    volume.metadata_bytes += 8
    added = volume.since(before)
    assert added.put_bytes[Link.NODE] == {"reward": 7, "versions": 2}
    assert added.payload_bytes(Link.NODE) == 9
    assert not added.get_bytes[Link.CROSS_NODE] and added.payload_bytes(Link.CROSS_NODE) == 0
    assert added.metadata_bytes == 8
    assert volume.payload_bytes(Link.NODE) == 14
