"""A batch that is written in mid-step goes on elsewhere: on other nodes, and on more or fewer of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.store.keeping import column_tensors, read_column
from spmdrl.nouns.batch import Batch, WorkerState
from spmdrl.resources.world import World
from tests.dataflow.samples import flow
from tests.support.ranks import run_ranks

DROPPED = 5


def open_samples(dock, step: int = 3) -> Samples:
    samples = dock.open_batch(step, flow.make_prompts(), flow.GROUP_SIZE)
    return samples


def write(world: World, folder: Path) -> list[str]:
    """Generate and reward, drop a row, write, and die."""
    with flow.open_dock(world) as dock:
        samples = open_samples(dock)
        flow.generate(samples, samples.rows.deal_generation())
        samples.mark_dropped([DROPPED], "refused") if world.is_main else None
        flow.reward(samples)
        names = [path.name for path in samples.write_to(folder)]
        dock.abandon()
    return names


def go_on(world: World, folder: Path) -> dict:
    """Take up what was written; nothing of it is made again."""
    with flow.open_dock(world) as dock:
        samples = open_samples(dock)
        samples.read_from(folder)
        assert samples.rows.deal_generation() == []
        assert samples.rows.take_generated(WorkerState.REWARD) == []
        samples.commit(WorkerState.GENERATION)
        samples.commit(WorkerState.REWARD)
        flow.credit(samples)
        batch = samples.take(WorkerState.UPDATE, {"prompt_ids", "response_ids", "rollout_logprobs", "advantages"})
        flow.check_training_rows(batch)
        samples.commit(WorkerState.UPDATE)
        accounting = dock.close_batch(samples)
    return {"rows": batch.rows.tolist(), "trained": accounting.num_trained, "dropped": dict(accounting.num_dropped)}


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), [((4, 2), (3, 1)), ((2, 1), (2, 2)), ((2, 2), (4, 2)), ((1, 1), (2, 1))])
def test_rows_go_on_with_another_number_of_ranks_and_nodes(tmp_path, before, after):
    """Each pair is ranks, and ranks a node."""
    written = run_ranks(before[0], write, tmp_path, ranks_per_node=before[1])
    nodes = [f"node_{number:04d}.safetensors" for number in range(before[0] // before[1])]
    assert sorted(name for names in written for name in names) == [*nodes, "rows.safetensors"]
    ranks = run_ranks(after[0], go_on, tmp_path, ranks_per_node=after[1])
    expected = [row for row in range(flow.NUM_ROWS) if row != DROPPED]
    assert sorted(row for rank in ranks for row in rank["rows"]) == expected
    assert all(rank["trained"] == flow.NUM_ROWS - 1 and rank["dropped"] == {"refused": 1} for rank in ranks)


def test_what_was_written_of_another_step_is_refused(tmp_path):
    write(flow.ONE_RANK, tmp_path)
    with flow.open_dock(flow.ONE_RANK) as dock:
        samples = open_samples(dock, step=4)
        with pytest.raises(ValueError, match=r"responses per prompt \[3, 24, 4\], but they are \[4"):
            samples.read_from(tmp_path)
        dock.abandon()


def test_columns_that_have_their_offsets_in_common_are_written_and_read(tmp_path):
    batch, offsets = Batch.of_rows([4, 7]), torch.tensor([0, 2, 3])
    columns = {"response_ids": torch.tensor([5, 6, 7]), "versions": torch.tensor([1, 1, 2])}
    for name, values in columns.items():
        batch.put_ragged(name, values, offsets)
    save_file(column_tensors(batch), tmp_path / "columns.safetensors")
    found = Batch.of_rows([4, 7])
    with safe_open(tmp_path / "columns.safetensors", framework="pt") as file:
        for name in columns:
            read_column(found, file, name)
    for name, values in columns.items():
        assert torch.equal(found.values(name), values) and torch.equal(found.offsets(name), offsets)
