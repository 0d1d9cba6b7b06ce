"""Pending groups are written and read back, by the same replicas or by others."""

from __future__ import annotations

import pytest
import torch

from spmdrl.dataflow.samples.pending import FINISH, PendingGroup, PendingGroups, RoundRules
from spmdrl.engines.training.checkpoints.file_writes import written_at_once
from spmdrl.nouns.batch import Batch
from spmdrl.resources.layout import GenerationLayout
from spmdrl.resources.mesh import Axis, GenerationMesh

RULES = RoundRules(num_wanted=4, num_extra=4, max_rounds=3)
KNOWN = [PendingGroup(serial, 1 + serial % 2, (0, 2)[serial % 2]) for serial in (3, 4, 5, 9)]


def mesh_of(rank: int, num_ranks: int, tensor: int) -> GenerationMesh:
    """Replicas of consecutive ranks, without process groups."""
    replicas = tuple(tuple(range(first, first + tensor)) for first in range(0, num_ranks, tensor))
    own, place = replicas[rank // tensor], rank % tensor
    layout = GenerationLayout(tensor=tensor, tensor_stride=1)
    return GenerationMesh(
        layout, rank, replicas, Axis("tensor", tensor, place, None, own), Axis("expert", 1, 0, None, (rank,))
    )


def responses_of(serial: int) -> Batch:
    """Three responses, of which some have no token yet."""
    batch = Batch.of_rows(range(3))
    batch.put_lists("response_ids", [[serial] * (serial + member) for member in (-3, 0, 1)], torch.int32)
    batch.put_lists("rollout_logprobs", [[-0.1 * serial] * (serial + member) for member in (-3, 0, 1)], torch.float32)
    batch.put_dense(FINISH, torch.tensor([2, 0, serial % 2], dtype=torch.int32))
    return batch


def same(one: Batch, other: Batch) -> bool:
    assert one.names == other.names and one.rows.equal(other.rows)
    return all(
        one.values(name).equal(other.values(name)) and one.offsets(name).equal(other.offsets(name))
        if one.is_ragged(name)
        else one.dense(name).equal(other.dense(name))
        for name in one.names
    )


def pending_on(rank: int, num_ranks: int, tensor: int) -> PendingGroups:
    return PendingGroups(RULES, mesh_of(rank, num_ranks, tensor))


def write_all(folder) -> list[str]:
    """What 4 ranks in replicas of 2 write."""
    paths = []
    for rank in range(4):
        pending = pending_on(rank, 4, 2)
        own = [group.serial for group in KNOWN if group.holder == rank // 2 * 2]
        pending.replace(KNOWN, {serial: responses_of(serial) for serial in own})
        paths += written_at_once(pending, folder)
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def test_the_same_replicas_go_on_with_the_same_groups(tmp_path):
    names = ["carried/groups.json", "carried/rank_00000.safetensors", "carried/rank_00002.safetensors"]
    assert write_all(tmp_path) == names
    for rank in range(4):
        pending = pending_on(rank, 4, 2)
        pending.read_from(tmp_path)
        assert pending.known == tuple(KNOWN)
        for group in KNOWN:
            if group.holder == rank // 2 * 2:
                assert same(pending.responses(group.serial), responses_of(group.serial))


@pytest.mark.parametrize(("num_ranks", "tensor"), [(1, 1), (2, 1), (3, 1), (4, 4)])
def test_other_replicas_share_the_groups_out(tmp_path, num_ranks, tensor):
    write_all(tmp_path)
    all_pending = [pending_on(rank, num_ranks, tensor) for rank in range(num_ranks)]
    for pending in all_pending:
        pending.read_from(tmp_path)
        assert pending.known == all_pending[0].known
        assert [(group.serial, group.rounds) for group in pending.known] == [(g.serial, g.rounds) for g in KNOWN]
    for group in all_pending[0].known:
        assert same(all_pending[group.holder].responses(group.serial), responses_of(group.serial))


def test_without_pending_groups_nothing_is_written_and_nothing_taken_back(tmp_path):
    pending = pending_on(0, 1, 1)
    assert written_at_once(pending, tmp_path) == [] and not any(tmp_path.iterdir())
    pending.replace([PendingGroup(0, 1, 0)], {0: responses_of(3)})
    pending.read_from(tmp_path)
    assert pending.known == ()


def test_prompts_that_refilled_steps_used_up_are_counted_by_the_first_rank_alone(tmp_path):
    for rank in (1, 0):
        pending = pending_on(rank, 2, 1)
        pending.num_passed = 5
        assert [path.name for path in written_at_once(pending, tmp_path)] == ["groups.json"] * (rank == 0)
    pending = pending_on(1, 4, 2)
    pending.read_from(tmp_path)
    assert (pending.num_passed, pending.known) == (5, ())
    # An earlier checkpoint, before any step was refilled.
    pending.read_from(tmp_path / "elsewhere")
    assert pending.num_passed == 0


def test_a_file_that_is_missing_is_named(tmp_path):
    write_all(tmp_path)
    (tmp_path / "carried" / "rank_00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks the responses of prompts \[3, 5, 9\]"):
        pending_on(0, 1, 1).read_from(tmp_path)
