"""Replicas of several ranks: rows to generate are dealt to replicas, and their first ranks put for them."""

import pytest

from spmdrl.dataflow.samples.balancing.dealing import groups_of_generation, groups_of_training
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.schema import needs_by_state
from spmdrl.dataflow.samples.volume import Link
from spmdrl.nouns.batch import WorkerState
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.resources.layout import GenerationLayout, UpdateLayout
from spmdrl.resources.mesh import build_generation_mesh, build_update_mesh
from spmdrl.resources.world import World
from tests.dataflow.samples import flow
from tests.support.ranks import run_ranks


def _step(world: World, update: UpdateLayout, generation: GenerationLayout):
    """A step in which every rank of a replica puts all that its replica made."""
    device = world.device.torch_device
    update_mesh = build_update_mesh(update, world.device, world.rank)
    training = groups_of_training({state: update_mesh for state in WorkerState if state.uses_training_engine}, device)
    mesh = build_generation_mesh(generation, world.device, world.size, world.rank)
    groups = training | groups_of_generation(mesh, device)
    needs = needs_by_state({"advantages", "rollout_logprobs"})
    with TransferDock(world, needs, DockConfig(20.0), row_groups=groups) as dock:
        done = flow.run_step(dock, 0)
        put_over_nodes = dock.volume.put_bytes[Link.CROSS_NODE]["response_ids"]
    return mesh.leaders, done, put_over_nodes


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "update", "generation", "ranks_per_node"),
    [
        (2, UpdateLayout(shard=2), GenerationLayout(2), 2),
        (4, UpdateLayout(shard=4), GenerationLayout(2), 4),
        (4, UpdateLayout(shard=2, tensor=2), GenerationLayout(2, tensor_stride=2), 2),
        (4, UpdateLayout(shard=4), GenerationLayout(2), 1),
        (4, UpdateLayout(shard=2, tensor=2), GenerationLayout(4), 2),
    ],
    ids=["one replica", "two replicas", "strided over nodes", "nodes without a first rank", "one replica of two nodes"],
)
def test_each_row_is_generated_by_one_replica_and_put_by_its_first_rank(ranks, update, generation, ranks_per_node):
    answers = run_ranks(ranks, _step, update, generation, ranks_per_node=ranks_per_node)
    leaders = answers[0][0]
    assert len(leaders) == ranks // generation.tensor
    shares = [answers[leader][1]["generated"] for leader in leaders]
    assert sorted(sum(shares, [])) == list(range(flow.NUM_ROWS))
    assert max(map(len, shares)) - min(map(len, shares)) <= flow.GROUP_SIZE
    for rank, (_, done, put_over_nodes) in enumerate(answers):
        replica = generation.place(rank)[0]
        assert done["generated"] == shares[replica]
        assert done["rewarded"] == (done["generated"] if rank in leaders else [])
        assert done["num_trained"] == flow.NUM_ROWS
        # Rows live where the first ranks of replicas are.
        assert put_over_nodes == 0


def _one_group(world: World) -> list[int]:
    mesh = build_generation_mesh(GenerationLayout(2), world.device, world.size, world.rank)
    groups = groups_of_generation(mesh, world.device.torch_device)
    with TransferDock(world, needs_by_state({"rollout_logprobs"}), DockConfig(20.0), row_groups=groups) as dock:
        return dock.open_batch(0, [flow.make_prompt([1])], flow.GROUP_SIZE).rows.deal_generation()


@pytest.mark.ranks
def test_a_replica_may_get_nothing():
    group = list(range(flow.GROUP_SIZE))
    assert sorted(run_ranks(4, _one_group)) == [[], [], group, group]


def _admitted(world: World) -> list[list[int]]:
    """What this rank generates in two attempts, and where the groups of the second live."""
    with flow.open_dock(world) as dock:
        samples = dock.open_batch(0, flow.make_prompts(), flow.GROUP_SIZE)
        shares = []
        for groups in (range(4), range(4, 6)):
            samples.rows.admit(groups)
            shares.append(samples.rows.deal_generation())
            flow.generate(samples, shares[-1])
            flow.reward(samples)
        samples.mark_dropped(shares[0], "left out")
        samples.commit(WorkerState.GENERATION)
        assert samples.rows.num_dropped == {"left out": 4 * flow.GROUP_SIZE}
        assert samples.rows.groups_to_train.tolist() == [4, 5]
        dropped = samples.read_dropped(["reward"])
        assert dropped.dense("reward").tolist() == dropped.rows.tolist() == shares[0]
        flow.credit(samples)
        samples.take(WorkerState.UPDATE)
        samples.commit(WorkerState.UPDATE)
        assert dock.volume.put_bytes[Link.CROSS_NODE]["response_ids"] == 0
        dock.close_batch(samples)
    return shares


@pytest.mark.ranks
def test_groups_that_are_admitted_together_are_shared_out_over_all_nodes():
    first, second = run_ranks(2, _admitted, ranks_per_node=1)
    for groups, one, other in zip((range(4), range(4, 6)), first, second, strict=True):
        assert len(one) == len(other)
        assert {row // flow.GROUP_SIZE for row in (*one, *other)} == set(groups)
