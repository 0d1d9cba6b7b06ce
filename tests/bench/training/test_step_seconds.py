"""Seconds of profiled steps are counted once, in the stage and kind that they belong to."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.cpp.cpu_library import cpu_library
from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.settings.model_config import MakeConfig
from tests.bench.__main__ import main
from tests.bench.training.step_seconds import (
    BETWEEN,
    KINDS,
    Interval,
    kind_of,
    recorded_calls,
    seconds_by_stage,
    union,
    without,
)

SECOND = 1e6


def between(name: str, start: float, end: float) -> Interval:
    return Interval(name, start * SECOND, end * SECOND)


def test_operations_waits_and_python_fill_each_stage() -> None:
    stages = [between("generation", 1, 5), between("reshard", 2, 4)]
    operations = [between("aten::linear", 1, 2), between("aten::mm", 1.25, 1.75), between("aten::add", 4.5, 5.5)]
    in_flight = [between("gloo:all_gather", 2.5, 3), between("gloo:all_reduce", 4.75, 6)]
    seconds = seconds_by_stage(stages, operations, in_flight, (0, 7 * SECOND))
    assert seconds["generation"] == pytest.approx(
        {"products": 0.5, "attention": 0, "other operations": 1.5, "waits for ranks": 0, "python": 0, "all": 2}
    )
    assert seconds["reshard"] == pytest.approx(
        {"products": 0, "attention": 0, "other operations": 0, "waits for ranks": 0.5, "python": 1.5, "all": 2}
    )
    # An operation counts where it begins, its moments where they are.
    assert seconds[BETWEEN]["waits for ranks"] == pytest.approx(0.5)
    assert sum(stage["all"] for stage in seconds.values()) == pytest.approx(7)


def test_kinds_follow_from_names() -> None:
    names = ["aten::mm", "mkldnn::_linear_pointwise", "aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert [kind_of(name) for name in names] == ["products", "products", "attention"]
    assert [kind_of(name) for name in ("aten::mul", "c10d::allreduce_")] == ["other operations", "waits for ranks"]


def test_moments_in_flight_are_taken_once_and_without_those_that_are_busy() -> None:
    flight = union(iter([(4.0, 6.0), (0.0, 2.0), (1.0, 3.0)]))
    assert flight == [(0.0, 3.0), (4.0, 6.0)]
    assert without(flight, [(1.0, 1.5), (2.5, 4.5), (7.0, 8.0)]) == [(0.0, 1.0), (1.5, 2.5), (4.5, 6.0)]


@pytest.mark.skipif(cpu_library() is None, reason="there is no compiler to build the library with")
def test_calls_of_the_cpus_library_are_operations_while_they_are_profiled() -> None:
    library, rows = cpu_library(), torch.ones(8, 16)
    pages, table, lengths = torch.ones(1, 1, 4, 16), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2).int()

    def compute() -> None:
        ops.swiglu(rows, rows)
        ops.paged_attention(torch.ones(2, 2, 16), pages, pages, table, lengths)

    compute()
    before = dict(vars(library))
    with recorded_calls(library), profile(activities=[ProfilerActivity.CPU]) as profiler:
        compute()
    kinds = {one.name: kind_of(one.name) for one in profiler.events() if one.name.startswith("spmdrl::")}
    assert kinds == {"spmdrl::swiglu": "other operations", "spmdrl::paged_attention_float32": "attention"}
    assert vars(library) == before


@pytest.mark.slow
def test_the_table_of_a_runs_seconds_adds_up(tmp_path, capsys) -> None:
    prompts, model, out = (tmp_path / name for name in ("prompts.jsonl", "model", "out.json"))
    prompts.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))
    make_model_folder(
        model, MakeConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1), seed=0
    )
    sizes = ["--prompts-per-step", "2", "--num-generations", "2", "--length", "8", "--steps", "3", "--ranks", "1"]
    arguments = ["step", "--table", "--model", str(model), "--prompts", str(prompts), *sizes, "--json", str(out)]
    assert main(arguments) == 0
    assert "share of products" in capsys.readouterr().out
    found = json.loads(out.read_text())
    rows = {row["stage"]: row for row in found["rows"]}
    assert rows["update"]["products"] > 0 and rows["generation"]["python"] > 0
    for row in rows.values():
        assert sum(row[kind] for kind in KINDS) == pytest.approx(row["all"], rel=0.02)
    assert 0 < found["share_of_products"] < 1
