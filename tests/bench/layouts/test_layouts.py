"""The bench of update layouts: every combination is tried, each equals one process, and bytes are what was sent."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist

from spmdrl.engines.parallel.axis_collectives import RingShift, exchange_rows, gather_rows, scatter_row_sums
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.bench.__main__ import main
from tests.bench.layouts.layout_cases import LayoutCase
from tests.bench.layouts.layouts import LARGEST_ERROR, cases_of, compare_layouts, exceeds, layouts_of, run_cases
from tests.bench.layouts.traffic import Traffic, axes_of_groups, with_own_groups
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("model", ["dense", "moe", "mla"])
def test_every_product_of_degrees_is_there_once_with_every_kind(num_ranks: int, model: str):
    layouts = layouts_of(model, num_ranks)
    assert len(set(layouts)) == len(layouts)
    assert {layout.num_ranks for layout in layouts} == {num_ranks}
    degrees = [n for n in (1, 2, 4, 8) if n <= num_ranks]
    expected = {
        UpdateLayout(data, shard, pipeline, context, tensor, expert, kind)
        for data in degrees
        for shard in degrees
        for pipeline in degrees
        for context in degrees
        for tensor in degrees
        for kind in (("ring", "ulysses") if context > 1 else ("ring",))
        if data * shard * pipeline * context * tensor == num_ranks
        for expert in degrees
        if (data * shard * context) % expert == 0 and (expert == 1 or model != "dense")
    }
    assert {layout for layout in layouts if layout.pipeline_schedule == "1f1b"} == expected


def test_every_schedule_runs_alone_and_beside_sharded_experts():
    layouts = layouts_of("moe", 4)
    schedules = {"1f1b", "gpipe", "interleaved", "zero_bubble", "zbv"}
    for degrees in ({"shard": 1, "pipeline": 4}, {"shard": 2, "pipeline": 2, "expert": 2}):
        found = [x for x in layouts if all(getattr(x, name) == degree for name, degree in degrees.items())]
        assert {layout.pipeline_schedule for layout in found} == schedules
        plain = {replace(layout, pipeline_schedule="1f1b", pipeline_chunks=1) for layout in found}
        assert len(plain) == 1


def adds_something(case: LayoutCase) -> bool:
    """Return False on 4 ranks for what other cases show; the bench itself tries every product.

    Schedules don't depend on a stage's layers, attention doesn't on how experts and data are spread, the other weights
    of a model with experts are spread as those of dense, and mla differs from moe in attention alone.
    """
    layout = case.layout
    num_expert_ranks = layout.data * layout.shard * layout.context
    is_one_axis = 4 in (layout.data, layout.shard, layout.pipeline, layout.context, layout.tensor)
    has_other_schedule = layout.pipeline_schedule != "1f1b"
    is_ring = layout.context_kind == "ring"
    if case.model == "dense":
        return is_one_axis or not has_other_schedule and (is_ring or layout.shard == 2)
    if case.model == "mla":
        is_cut = max(layout.context, layout.tensor) > 1
        return is_cut and layout.expert == num_expert_ranks and layout.data == layout.shard == layout.pipeline == 1
    if has_other_schedule:
        # A tied head, as dense has one, can't run zbv.
        return layout.expert > 1 or layout.pipeline_schedule == "zbv"
    if layout.data == 2:
        return is_ring and layout.expert == 2
    # mla has the other kind.
    return is_ring and layout.expert in (2, num_expert_ranks)


# On 2 ranks, dense, by the bench below, and moe run all layouts, the others 1f1b and one of these schedules.
SCHEDULES = {"mla": "zbv", "hybrid": "zero_bubble", "sinks": "interleaved", "gemma": "gpipe", "gemma4": "interleaved"}


def is_of_a_model(case: LayoutCase) -> bool:
    """Return False on 2 ranks for what dense and moe show: copies, and attention whose ranks have all experts."""
    layout = case.layout
    has_all_experts = layout.expert == 1 and case.config.moe is not None
    is_known = layout.data == 2 or layout.context == 2 and has_all_experts
    return not is_known and layout.pipeline_schedule in ("1f1b", SCHEDULES[case.model])


# Models of one world together, so that each mesh is built once.
ON_4_RANKS = [case for case in cases_of(["dense", "moe", "mla"], 4) if adds_something(case)]
CASES = {
    "moe on 2 ranks": (2, cases_of(["moe"], 2)),
    "others on 2 ranks": (2, [case for case in cases_of(list(SCHEDULES), 2) if is_of_a_model(case)]),
    "4 ranks in one stage": (4, [case for case in ON_4_RANKS if case.layout.pipeline == 1]),
    "4 ranks in several stages": (4, [case for case in ON_4_RANKS if case.layout.pipeline > 1]),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        pytest.param(*case, id=name, marks=() if name == "moe on 2 ranks" else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_every_layout_trains_as_one_process_does(num_ranks: int, cases: list[LayoutCase]):
    found = compare_layouts(num_ranks, cases)
    for row in found.refused:
        print("refused: {model} on {world_size} ranks, {layout}: {reason}".format(**row))
    assert len(found.rows) + len(found.refused) == len(cases)
    check_rows(found.rows, found.refused)


def check_rows(rows: list[dict[str, object]], refused: list[dict[str, object]]) -> None:
    # Only tied heads, of which zbv would put two copies on one rank.
    of_tied_heads = ("dense", "gemma", "gemma4")
    assert all(row["model"] in of_tied_heads and "zbv" in str(row["layout"]) for row in refused)
    assert [row for row in rows if exceeds(row)] == []


@pytest.mark.ranks
@pytest.mark.slow
def test_delta_nets_windows_and_sinks_train_on_four_ranks_as_on_one():
    layouts = [
        UpdateLayout(shard=1, tensor=4),
        UpdateLayout(shard=1, context=4),
        UpdateLayout(shard=1, context=2, tensor=2, context_kind="ulysses"),
        UpdateLayout(shard=2, pipeline=2),
    ]
    cases = [LayoutCase(model, layout) for model in ("hybrid", "sinks") for layout in layouts]
    cases += [
        # Its attention is cut over four as nothing else's; what lies between two axes is dense's.
        *(LayoutCase("gemma", layout) for layout in layouts[:2]),
        LayoutCase("sinks", UpdateLayout(shard=2, tensor=2, expert=2)),
        LayoutCase("sinks", UpdateLayout(shard=1, context=4, expert=4)),
    ]
    found = run_cases(cases, 4)
    assert found.keys() == set(cases)
    assert [case for case, errors in found.items() if exceeds(asdict(errors))] == []


def test_a_row_fails_above_the_limit_and_without_a_number():
    row = {"loss_error": 0.0, "gradient_error": LARGEST_ERROR, "weight_error": 0.0}
    assert not exceeds(row)
    assert exceeds(row | {"weight_error": 1.1 * LARGEST_ERROR})
    assert exceeds(row | {"loss_error": float("nan")})


@pytest.mark.ranks
@pytest.mark.slow
def test_the_layouts_bench_prints_rows_and_refusals_as_json(capfd):
    assert main(["layouts", "--world-size", "2", "--models", "dense", "--json"]) == 0
    content = json.loads(capfd.readouterr().out)
    assert set(content) == {"rows", "refused"}
    names = {"model", "world_size", "layout", "loss_error", "gradient_error", "weight_error", "bytes"}
    assert all(set(row) == names for row in content["rows"])
    assert all(set(row) == {"model", "world_size", "layout", "reason"} for row in content["refused"])
    assert len(content["rows"]) + len(content["refused"]) == len(layouts_of("dense", 2))
    check_rows(content["rows"], content["refused"])
    by_layout = {row["layout"]: row for row in content["rows"]}
    assert by_layout["tensor 2"]["bytes"]["tensor"] > by_layout["tensor 2"]["bytes"]["all"] > 0


def _bytes_of_one_call_each(world: World) -> dict[str, int]:
    layout = UpdateLayout(data=1, shard=2, tensor=world.size // 2)
    mesh = with_own_groups(build_update_mesh(layout, world.device, world.rank))
    x = torch.zeros(8, 3)
    with Traffic(axes_of_groups(mesh)) as traffic:
        gather_rows(x, mesh.tensor)
        scatter_row_sums(x, mesh.tensor)
        mesh.data.sum(x)
        RingShift([x], mesh.data).wait()
        exchange_rows(x, *([[2, 6], [2, 6]] if mesh.data.rank == 0 else [[6, 2], [6, 2]]), mesh.data)
        dist.all_reduce(x, group=mesh.dense_shards.get_group())
        dist.broadcast(x, 0)
    return dict(traffic.bytes)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_traffic_is_counted_by_axis_also_where_two_axes_have_the_same_ranks(num_ranks: int):
    size = 8 * 3 * 4
    for found in run_ranks(num_ranks, _bytes_of_one_call_each):
        # Two ranks of an axis: a gather sends all, a scatter half, a sum twice the half, a shift all.
        tensor = {"tensor": size + size // 2} if num_ranks == 4 else {}
        everybody = (num_ranks - 1) * size // num_ranks
        assert found == {"data": size + size + 6 * 12, "shard": size, "all": everybody} | tensor
