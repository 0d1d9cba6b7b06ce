"""The bench of nodes: its rows, its figures, and ranks on emulated nodes."""

from __future__ import annotations

import argparse
import math
from collections import Counter

import pytest
import torch

from spmdrl.dataflow.data.prompts import prompt_columns
from spmdrl.nouns.batch import Batch
from tests.bench.harness.bench_ranks import BenchRanks
from tests.bench.harness.emulated_nodes import INTERFACE, LinkBytes, emulated_nodes, refusal
from tests.bench.nodes import nodes
from tests.bench.nodes.flow_rank import VARIANTS, FlowFigures, FlowTask, measure_variants
from tests.bench.nodes.sample_flow import FlowSize, check_taken, make_step

_reason = refusal()
needs_namespaces = pytest.mark.skipif(_reason is not None, reason=str(_reason))

AT_ONCE = FlowSize(
    rows_per_node=32, group_size=4, max_prompt_length=16, max_response_length=64,
    scored_tokens_per_second=math.inf, decode_steps_per_second=math.inf,
)  # fmt: skip


def test_more_nodes_have_as_many_times_the_same_rows_in_another_order():
    one, four = make_step(AT_ONCE, 1, 3), make_step(AT_ONCE, 4, 3)
    assert four.num_rows == 4 * one.num_rows == 4 * AT_ONCE.rows_per_node
    groups = [
        Counter(tuple(group) for group in step.response_lengths_B.reshape(-1, AT_ONCE.group_size).tolist())
        for step in (one, four)
    ]
    assert {group: 4 * count for group, count in groups[0].items()} == groups[1]
    assert not torch.equal(four.response_lengths_B, one.response_lengths_B.repeat(4))
    assert four.response_lengths_B.min() >= 1 and four.response_lengths_B.max() <= AT_ONCE.max_response_length


def test_steps_differ_but_not_between_calls():
    first, again, second = (make_step(AT_ONCE, 2, step) for step in (1, 1, 2))
    assert torch.equal(first.response_lengths_B, again.response_lengths_B)
    assert not torch.equal(first.response_lengths_B, second.response_lengths_B)


def test_rows_that_dont_make_whole_groups_are_refused():
    with pytest.raises(ValueError, match="multiple of 8.*try 24"):
        FlowSize(rows_per_node=30)


def test_rows_that_come_back_with_other_values_are_noticed():
    step = make_step(AT_ONCE, 1, 1)
    taken = Batch(torch.arange(step.num_rows))
    prompts = prompt_columns(step.prompts()).select(taken.rows // AT_ONCE.group_size)
    taken.put_ragged("prompt_ids", prompts.values("prompt_ids"), prompts.offsets("prompt_ids"))
    for name in ("response_ids", "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages"):
        taken.update(step.column(name, taken.rows))
    check_taken(taken, step)
    taken.values("old_logprobs")[7] += 1
    with pytest.raises(RuntimeError, match="old_logprobs"):
        check_taken(taken, step)


def _measured(step_seconds: list[float], sleeps: list[list[float]], cross_node: int) -> FlowFigures:
    payload = {"process": 100 - cross_node, "node": 0, "cross_node": cross_node}
    return FlowFigures(step_seconds, sleeps, 0.5, payload, LinkBytes(3_000_000, 1_000_000))


def test_dispatch_is_what_a_step_takes_beyond_the_slowest_rank_of_each_state():
    ranks = [_measured([10.0, 12.0], [[4.0, 1.0]] * 2, 0), _measured([10.5, 11.0], [[1.0, 3.0]] * 2, 0)]
    times = nodes.StepTimes.of(ranks)
    assert (times.step_seconds, times.dispatch_seconds, times.cpu_seconds) == (11.25, 4.25, 0.25)


def test_ratios_are_those_of_the_most_nodes_against_the_fewest():
    one = [_measured([9.0], [[8.0]], 0)]
    two = [_measured([10.0], [[8.0]], 10), _measured([9.5], [[8.0]], 20)]
    table = nodes.summarize(
        {1: [dict.fromkeys(VARIANTS, each) for each in one], 2: [dict.fromkeys(VARIANTS, each) for each in two]}
    )
    assert len(table) == 4
    found = nodes.ratios(table)
    for suffix in ("", "_locality_off"):
        assert found[f"linearity_1{suffix}"] == 1.0
        assert found[f"linearity_2{suffix}"] == pytest.approx(0.9)
        assert found[f"cross_node_share{suffix}"] == pytest.approx(30 / 200)
    assert table[1]["veth_mb"] == 6.0 and table[1]["busiest_veth_mb"] == 3.0


def test_where_nodes_cant_be_emulated_the_bench_says_why_and_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    parser = argparse.ArgumentParser()
    nodes.add_arguments(parser)
    table = nodes.run(parser.parse_args([]))
    assert not table.passed
    assert "emulated nodes" in str(table.rows[0]["reason"])


@needs_namespaces
@pytest.mark.ranks
def test_ranks_on_two_nodes_keep_their_rows_but_with_locality_off():
    with emulated_nodes(2, 3e8) as two:
        ranks = BenchRanks(2, nodes=two, start_method="forkserver")
        measured = ranks.call(measure_variants, FlowTask(AT_ONCE, 1, INTERFACE))
    rows = nodes.summarize({2: measured})
    shares = {str(row["variant"]): float(str(row["cross_node_share"])) for row in rows}
    assert shares["dock"] < 0.3 < shares["dock, locality off"]
    for row in rows:
        # What counts as payload for another node was on a link.
        assert float(str(row["veth_mb"])) >= float(str(row["cross_node_mb"]))


@needs_namespaces
@pytest.mark.ranks
def test_a_rank_that_fails_ends_the_others_and_is_quoted():
    with emulated_nodes(2, 3e8) as two, pytest.raises(RuntimeError, match="no interface no_such_link"):
        BenchRanks(2, nodes=two, start_method="forkserver").call(measure_variants, FlowTask(AT_ONCE, 1, "no_such_link"))
