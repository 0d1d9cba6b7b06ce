from __future__ import annotations

import json
import os
from collections import Counter
from functools import partial

import pytest
from tests.support.jobs import ROOT, run_job

from spmdrl.config.reader import ConfigError
from spmdrl.plan import alternatives
from spmdrl.plan.account import Message, Work
from spmdrl.plan.device_profile import (
    CROSS_NODE,
    GENERATION,
    NODE,
    SCORING,
    TRAINING,
    LinkRate,
    Rates,
    read_profile,
    require_rates,
)
from spmdrl.plan.rate_fit import TimedPart, fit_rates
from spmdrl.plan.run_plan import each_in_a_child
from spmdrl.plan.slot_times import GIB, link_of, seconds_of_messages, seconds_of_work, share_across_nodes

QUICKSTART = str(ROOT / "configs/debug/quickstart.yaml")
RATES = Rates(tflops=2.0, gib_per_second=4.0, launch_us=10.0)


def test_work_takes_what_limits_it():
    few_flops = Work(flops=10**12, num_bytes=12 * GIB, launches=1000, product_bytes=8 * GIB)
    assert seconds_of_work(few_flops, RATES, overlaps=False) == pytest.approx(2 + 1 + 0.01)
    many_flops = Work(flops=6 * 10**12, num_bytes=12 * GIB, launches=1000, product_bytes=8 * GIB)
    assert seconds_of_work(many_flops, RATES, overlaps=False) == pytest.approx(3 + 1 + 0.01)
    assert seconds_of_work(many_flops, RATES, overlaps=True) == pytest.approx(4)
    launched = Work(flops=6 * 10**12, num_bytes=12 * GIB, launches=10**6, product_bytes=8 * GIB)
    assert seconds_of_work(launched, RATES, overlaps=True) == pytest.approx(10)


def test_messages_take_the_slowest_link_of_their_ranks():
    links = {NODE: LinkRate(8.0, 10.0), CROSS_NODE: LinkRate(1.0, 100.0)}
    near, far = Message("allreduce_", (0, 1, 2, 3), GIB), Message("allreduce_", (3, 4), GIB)
    assert (link_of(near.ranks, 4), link_of(far.ranks, 4)) == (NODE, CROSS_NODE)
    assert seconds_of_messages(Counter({near: 2}), links, 4) == pytest.approx(2 * (1 / 8 + 2 * 10e-6))
    assert seconds_of_messages(Counter({far: 3}), links, 4) == pytest.approx(3 * (1 + 100e-6))


def test_rates_that_made_times_are_found_again():
    true = {TRAINING: RATES, SCORING: Rates(1.0, 8.0, 30.0), GENERATION: Rates(0.5, 2.0, 50.0)}
    link = LinkRate(0.5, 200.0)
    parts = []
    for kind, rates in true.items():
        for size in (1, 2, 3, 5, 8, 13):
            work = Work(size**2 * 10**10, (15 - size) * 10**7, 40 * size + 7, 10**6)
            sent = Counter({Message("allreduce_", (0, 1), size * 10**7): 1 + 20 % (size + 2)})
            seconds = seconds_of_work(work, rates, overlaps=False) + seconds_of_messages(sent, {NODE: link}, 2)
            parts.append(TimedPart(kind, work, sent, seconds))
    found, found_link = fit_rates(parts, {NODE: LinkRate(1.0)})
    assert found_link.gib_per_second == pytest.approx(link.gib_per_second, rel=0.01)
    assert found_link.message_us == pytest.approx(link.message_us, rel=0.02)
    for kind, rates in true.items():
        assert list(vars(found[kind]).values()) == pytest.approx(list(vars(rates).values()), rel=0.02), kind


@pytest.mark.parametrize(
    ("operation", "share"),
    [("_allgather_base_", 2 / 4), ("send", 1 / 3), ("alltoall_base_", 8 / 12)],
    ids=["ring", "line of stages", "all pairs"],
)
def test_bytes_leave_a_node_by_the_neighbours_of_an_operation(operation, share):
    assert share_across_nodes(Message(operation, (6, 7, 8, 9), 1), ranks_per_node=8) == pytest.approx(share)
    assert share_across_nodes(Message(operation, (0, 1, 2, 3), 1), ranks_per_node=8) == 0


@pytest.mark.ranks
def test_a_plan_has_the_seconds_of_each_stage(tmp_path):
    file = tmp_path / "plan.json"
    done = run_job("plan", QUICKSTART, "--ranks", "2", "--nodes", "2", "--json", str(file), "algo.kl_coef=0.01")
    assert done.returncode == 0, done.stderr
    plan, (line,) = json.loads(file.read_text()), [line for line in done.stdout.splitlines() if "Eq. 5" in line]
    assert {"switch", "generation", "reference", "update", "sample flow"} == plan["stages"].keys()
    assert min(plan["stages"].values()) > 0
    assert sum(plan["stages"].values()) == pytest.approx(plan["step_seconds"])
    # Each rank gathers the other's half in bfloat16, as for a switch; an update sums gradients in float32, too.
    sent, half = plan["bytes_by_link"], plan["bytes_by_link"]["switch"]["cross_node"]
    assert sent["scoring"] == {"node": 0, "cross_node": half}
    assert sent["training"] == {"node": 0, "cross_node": 3 * half}
    tokens = 64 * 8 * (58 + 6)
    assert plan["tokens_per_second_per_device"] == pytest.approx(tokens / plan["step_seconds"] / 2)
    assert line.endswith(f"{plan['tokens_per_second_per_device']:.4g}")


def test_a_process_that_ends_without_a_result_is_told():
    assert each_in_a_child(*(partial(pow, number, 2) for number in (1, 2, 3))) == [1, 4, 9]
    with pytest.raises(RuntimeError, match="ended with 7 and without a result"):
        each_in_a_child(partial(os._exit, 7))
    with pytest.raises(ValueError, match="invalid literal"):
        each_in_a_child(partial(int, "no number"))


RATE = "{tflops: 1, gib_per_second: 1, launch_us: 1}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{memory_gib: 8.0}", "it has no kernels"),
        ("{memory_gib: 8.0, kernels: cuda, rates: {training: {}}}", "it has no rates.training.tflops"),
        (f"{{memory_gib: 8.0, kernels: cuda, rates: {{training: {RATE}}}}}", "it has no 'generation'"),
        ("[]", "not a mapping"),
        ("{memory_gib: 8.0, kernels: CUDA}", "kernels is 'CUDA', but must be one of cpu, cuda"),
        ("{memory_gib: '8', kernels: cuda}", "memory_gib is '8'"),
        ("{memory_gib: -8, kernels: cuda}", "memory_gib is -8"),
        ("{memory_gib: .inf, kernels: cuda}", "memory_gib is inf"),
        ("{memory_gib: null, kernels: cuda}", "memory_gib is None"),
        ("{memory_gib: 8, kernels: cuda, overlap: true}", "there is no overlap"),
        ("{memory_gib: 8, kernels: cuda, links: {node: {gib_per_second: 0}}}", "links.node.gib_per_second is 0"),
    ],
)
def test_a_device_file_with_parts_missing_or_wrong_is_refused(tmp_path, text, says):
    file = tmp_path / "device.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="shows the form") as caught:
        read_profile(str(file))
    assert says in str(caught.value)


def plan_few_others() -> None:
    """Stop at fewer layouts and devices than the verb does."""
    alternatives.MOST_LAYOUTS, alternatives.MOST_DEVICES = 2, 20


@pytest.mark.ranks
@pytest.mark.slow
def test_other_layouts_and_more_nodes_are_planned(tmp_path):
    file = tmp_path / "plan.json"
    where = ["--ranks", "4", "--nodes", "2", "--search", "--scale", "--json", str(file)]
    done = run_job("plan", QUICKSTART, *where, prepare=plan_few_others)
    assert done.returncode == 0, done.stderr
    plan = json.loads(file.read_text())
    found = plan["layouts"]
    assert [one["tokens_per_second_per_device"] for one in found] == sorted(
        (one["tokens_per_second_per_device"] for one in found), reverse=True
    )
    changed = [one["settings"] for one in found]
    # Two layouts of updates (of which one is the run's own), generation on two ranks, and two sets of ranks.
    assert {} in changed and {"resources.update.data": 2, "resources.update.shard": 2} in changed
    assert any(settings.get("resources.generation.tensor") == 2 for settings in changed)
    assert any(settings.get("resources.ranks.generation") == 2 for settings in changed)
    assert [(row["nodes"], row["devices"]) for row in plan["nodes"]] == [(2, 4), (8, 16), (10, 20)]
    first, *others = plan["nodes"]
    assert first["linearity"] == 1 > max(row["linearity"] for row in others)
    assert first["tokens_per_second_per_device"] == pytest.approx(plan["tokens_per_second_per_device"], rel=0.2)


def test_a_search_needs_rates(tmp_path):
    profile = tmp_path / "tiny.yaml"
    profile.write_text("{memory_gib: 1.0, kernels: cuda}\n")
    with pytest.raises(ConfigError, match="--search needs times, but the device tiny has no rates"):
        require_rates(read_profile(str(profile)), "--search")
