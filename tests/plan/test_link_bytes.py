"""Bytes by link are those that the run then moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.plan.link_truth import TruthCase, cases, measure

from spmdrl.config.config import load_config
from spmdrl.dataflow.resharding.planning.plan import plan_resharding
from spmdrl.dataflow.resharding.planning.slice_layouts import generation_slices, parameter_table, update_slices
from spmdrl.dataflow.samples.volume import Link, Volume
from spmdrl.engines.models.make_model import decoder_config
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.roles import POLICY
from spmdrl.plan.link_bytes import PlannedFlow, PlannedLengths, PlannedStep, sample_flow_bytes
from spmdrl.plan.resharding_bytes import ReshardingBytes, resharding_bytes
from spmdrl.runtime.launch import LaunchEnvironment

CASES = {case.name: case for case in cases()}
BASE = [
    "model.make={hidden_size: 32, num_hidden_layers: 4, num_attention_heads: 2, num_key_value_heads: 1, "
    "intermediate_size: 64}",
    "data.train=synthetic://addition?low=0&high=9&count=40", "reward.functions=[exact]", "train.max_steps=10",
    "rollout={prompts_per_step: 32, num_generations: 8, max_completion_length: 16}",
]  # fmt: skip
NODES = LaunchEnvironment(world_size=8, local_world_size=4)
LENGTHS = PlannedLengths(5.0, 12.0)


def checked_for(launch: LaunchEnvironment, *settings: str) -> CheckedRun:
    return check_run(load_config([], [*BASE, *settings]), "train", launch=launch)


def flow_of(*settings: str, launch: LaunchEnvironment = NODES) -> Volume:
    checked = checked_for(launch, *settings)
    assert checked.config.model.make is not None
    return sample_flow_bytes(checked, decoder_config(checked.config.model.make), launch, LENGTHS).volume


def switch_of(*settings: str, launch: LaunchEnvironment = NODES) -> ReshardingBytes:
    checked = checked_for(launch, *settings)
    assert checked.config.model.make is not None
    decoder = replace(decoder_config(checked.config.model.make), lora=checked.config.lora)
    return resharding_bytes(checked, {POLICY: decoder}, launch, "cpu")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        "reference and critic",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("adapters", "experts, routes replayed", "muon")),
    ],
)
def test_planned_bytes_are_those_of_the_run(name: str):
    rows = [row for row in measure(CASES[name]) if row.flow != "samples by means"]
    assert {"samples by rows", "resharding", "swap"} == {row.flow for row in rows}
    for row in rows:
        # FSDP2 pads shards of a few values.
        assert row.planned == row.measured if row.flow != "swap" else row.error < 0.005, row


@pytest.mark.ranks
@pytest.mark.slow
def test_means_of_lengths_give_the_sum_of_all_links():
    (total,) = (
        row
        for row in measure(TruthCase("means", ("algo.kl_coef=0.1",)))
        if row.flow == "samples by means" and row.link == "all"
    )
    assert total.error < 0.01, total


@given(
    mean=st.floats(1.0, 50.0), num_groups=st.integers(1, 20), group_size=st.integers(1, 8), longest=st.integers(20, 60)
)
def test_planned_rows_have_the_planned_means(mean: float, num_groups: int, group_size: int, longest: int):
    prompts, responses = PlannedLengths(mean, mean).of_rows(num_groups, group_size, longest, seed=0)
    assert (prompts.size, responses.size) == (num_groups, num_groups * group_size)
    for lengths in (prompts, responses):
        assert lengths.min() >= 1 and abs(lengths.sum() - mean * lengths.size) <= 1 + (lengths == 1).sum()


def test_one_rank_moves_nothing_to_others():
    flow, switch = (one(launch=LaunchEnvironment()) for one in (flow_of, switch_of))
    assert {link for link in Link if flow.payload_bytes(link)} == {Link.PROCESS}
    assert switch.first.total == switch.later.total == 0


def test_a_row_crosses_once_for_each_column_and_reader():
    launch = LaunchEnvironment(world_size=2, local_world_size=1)
    checked = checked_for(launch, "dock.balance=rows", "log.samples_per_step=0")
    decoder = decoder_config(checked.config.model.make)
    prompts, responses = np.full(32, 5), np.full(32 * 8, 12)
    home = PlannedStep(PlannedFlow(checked, decoder, launch), prompts, responses, step=1).volume
    assert home.payload_bytes(Link.CROSS_NODE) == 0 and home.payload_bytes(Link.NODE) == 0
    assert home.put_bytes[Link.PROCESS]["response_ids"] == 256 * (4 * 12 + 8) + 2 * 8
    # Advantages take the tokens and the update does; the prompts' tokens are read once, and are everywhere.
    assert home.get_bytes[Link.PROCESS]["response_ids"] == 2 * 256 * (4 * 12 + 8)
    assert home.get_bytes[Link.PROCESS]["prompt_ids"] == 256 * (4 * 5 + 8)


def test_an_environments_rows_are_put_in_portions_if_a_model_scores_them():
    turns, scored = ("environment.function=calculator",), "algo.kl_coef=0.1"
    together, portions = flow_of(*turns), flow_of(*turns, scored)
    found = [one.put_bytes[Link.PROCESS] for one in (together, portions)]
    # A rank's 32 rows come in 16 portions, each with an offset more than it has rows.
    assert found[0]["turns"] < found[1]["turns"] <= 256 * (2 * 12 + 8) + 8 * 16 * 8
    assert portions.get_bytes[Link.PROCESS]["turns"] > together.get_bytes[Link.PROCESS]["turns"]


def test_the_papers_placement_sends_more_across_nodes():
    near, anywhere = flow_of(), flow_of("dock.locality=false")
    assert 4 * near.payload_bytes(Link.CROSS_NODE) < anywhere.payload_bytes(Link.CROSS_NODE)
    assert anywhere.get_bytes[Link.CROSS_NODE]["prompt_ids"] > 0 == near.get_bytes[Link.CROSS_NODE]["prompt_ids"]


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("resources.update={shard: 0, tensor: 2}", "resources.generation.tensor=2"),
        ("resources.update={data: 0, shard: 4}", "resources.generation.tensor=2"),
        ("resources.update={shard: 0, pipeline: 4}",),
    ],
)
def test_weights_alike_count_as_often_as_they_are_there(settings: tuple[str, ...]):
    checked = checked_for(NODES, *settings)
    table = parameter_table(decoder_config(checked.config.model.make))
    layout, stride = checked.layout, checked.config.resources.generation
    held = {rank: update_slices(table, layout, rank) for rank in range(8)}
    found = switch_of(*settings, "resources.generation.tensor_stride=1").first
    wanted = {rank: generation_slices(table, stride, rank) for rank in range(8)}
    plan = plan_resharding(held, wanted, table.shapes, 64 << 20, 4, ranks_per_node=4)
    moves = [one for block in plan.blocks for bucket in block.buckets for one in plan.transfers(bucket)]
    crossing = [one for one in moves if one.sender // 4 != one.receiver // 4]
    assert found.total == sum(plan.num_bytes(one.box) for one in moves) > 0
    assert found.cross_node == sum(plan.num_bytes(one.box) for one in crossing)


def test_a_large_all_gather_is_estimated_near_the_plan_of_its_buckets():
    wide = ("model.make.hidden_size=256", "model.make.intermediate_size=512", "reshard.executor=allgather")
    planned, estimated = (switch_of(*wide, f"reshard.bucket_bytes={size}").first for size in (100_000, 1000))
    exact = switch_of(*wide[:2]).first
    assert exact.total < estimated.total == pytest.approx(planned.total, rel=0.25)
    assert exact.total < planned.total == pytest.approx(exact.total, rel=0.25)


def test_adapters_alone_move_after_the_first_switch_and_little_of_them_swaps():
    whole, adapters = switch_of("reshard.swap=always"), switch_of("lora={rank: 2}", "reshard.swap=always")
    assert whole.first == whole.later and whole.to_host == whole.from_host
    assert 4 * adapters.later.total < adapters.first.total
    assert adapters.to_host < adapters.from_host < whole.from_host
    merged = switch_of("lora={rank: 2, merge: true}")
    assert merged.first == merged.later == whole.first


def test_nothing_is_swapped_where_nothing_may_leave_or_need():
    for setting in ("reshard.swap=never", "resources.ranks.generation=4"):
        assert switch_of(setting).to_host == switch_of(setting).from_host == 0
