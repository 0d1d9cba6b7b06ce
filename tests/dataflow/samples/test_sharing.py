"""Ranks that work on the same rows: one takes for its group, and all of the group get what it took."""

import pytest

from spmdrl.dataflow.samples.balancing.dealing import groups_of_training
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.schema import needs_by_state
from spmdrl.nouns.batch import WorkerState, offsets_of
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.dataflow.samples import flow
from tests.support.ranks import run_ranks

SHARED = UpdateLayout(shard=2, tensor=2)


def _scored_and_trained_rows(world: World, update: UpdateLayout):
    """A step that 2 groups of 2 ranks score, in which every rank puts the column that its group scored."""
    scoring, training = (build_update_mesh(layout, world.device, world.rank) for layout in (SHARED, update))
    needs = needs_by_state({"advantages", "rollout_logprobs", "old_logprobs"})
    meshes = {WorkerState.OLD_LOGPROBS: scoring, WorkerState.UPDATE: training}
    groups = groups_of_training(meshes, world.device.torch_device)
    with TransferDock(world, needs, DockConfig(20.0), row_groups=groups) as dock:
        samples = dock.open_batch(0, flow.make_prompts(), flow.GROUP_SIZE)
        flow.generate(samples, samples.rows.deal_generation())
        flow.reward(samples)
        state = WorkerState.OLD_LOGPROBS
        taken = samples.take(state, {"prompt_ids", "response_ids"})
        scored = taken.select(range(len(taken)), [])
        lengths_B = taken.lengths("response_ids")
        values_R = (scored.rows * -0.5).repeat_interleave(lengths_B).float()
        scored.put_ragged("old_logprobs", values_R, offsets_of(lengths_B))
        samples.put(state, scored)
        samples.commit(state)
        flow.credit(samples)
        batch = samples.take(WorkerState.UPDATE, {"response_ids", "old_logprobs"})
        samples.commit(WorkerState.UPDATE)
        accounting = dock.close_batch(samples)
    seen = [set(values) for values in batch.to_lists("old_logprobs")]
    return taken.rows.tolist(), batch.rows.tolist(), seen, accounting.num_trained


@pytest.mark.ranks
@pytest.mark.parametrize("ranks_per_node", [4, 1])
def test_ranks_of_one_group_get_the_same_rows_and_each_row_has_one_group(ranks_per_node):
    """A group's ranks run on one node, which reads in place, or on two, where the first rank shares."""
    answers = run_ranks(4, _scored_and_trained_rows, SHARED, ranks_per_node=ranks_per_node)
    assert answers[0] == answers[1] and answers[2] == answers[3]
    for which in (0, 1):
        assert sorted(answers[0][which] + answers[2][which]) == list(range(flow.NUM_ROWS))
        assert min(len(answers[0][which]), len(answers[2][which])) > 0
    for _, rows, seen, num_trained in answers:
        assert seen == [{row * -0.5} for row in rows]
        assert num_trained == flow.NUM_ROWS


@pytest.mark.ranks
@pytest.mark.parametrize("ranks_per_node", [4, 1])
def test_states_whose_models_are_cut_otherwise_share_rows_otherwise(ranks_per_node):
    answers = run_ranks(4, _scored_and_trained_rows, UpdateLayout(shard=4), ranks_per_node=ranks_per_node)
    assert answers[0][0] == answers[1][0] and answers[2][0] == answers[3][0]
    assert sorted(answers[0][0] + answers[2][0]) == list(range(flow.NUM_ROWS))
    assert sorted(row for _, rows, _, _ in answers for row in rows) == list(range(flow.NUM_ROWS))
    assert all(seen == [{row * -0.5} for row in rows] for _, rows, seen, _ in answers)
