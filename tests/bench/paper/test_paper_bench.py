"""The bench of the paper: its printed figures follow or are named, ticks need tests, and models find their lines."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench.__main__ import main
from tests.bench.nodes.sample_flow import FlowSize
from tests.bench.paper import benchmark_sets, linearity, paper_bench, reward_curves
from tests.bench.paper.dispatch_times import PUBLISHED, Printed
from tests.bench.paper.end_to_end import PEER, figure7
from tests.bench.paper.features import FEATURES, Feature, missing_tests
from tests.bench.paper.linearity import NodeStep, StepModel
from tests.bench.paper.paper_bench import ITEMS, add_arguments
from tests.bench.resharding import redundancy


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_tables_and_redundancy_are_printed_with_one_line_for_each_item(tmp_path, capsys, monkeypatch):
    # The dense model's plan alone takes seconds; the bench of redundancy has tests of its own.
    monkeypatch.setattr(redundancy, "CASES", redundancy.CASES[1:2])
    out = tmp_path / "paper.json"
    assert main(["paper", "--only", "table1", "table2", "redundancy", "--json", str(out)]) == 0
    tables = json.loads(out.read_text())
    assert list(tables) == ["table1", "table2", "redundancy", "all"]
    lines = {row["item"]: row["here"] for row in tables["all"]["rows"]}
    assert len(lines) == len(ITEMS)
    assert lines["Eq. 3"] == "64.1 GB" and lines["Table 2"] == "19 of 19 features" and lines["Figure 9"] == "not run"
    assert "The paper's tables and figures" in capsys.readouterr().out


def test_table_1_follows_from_eq_2_in_powers_of_two():
    rows = ITEMS["table1"].run(parsed()).rows
    assert [row["TCV"] for row in rows] == pytest.approx([0.96893, 3.8129, 15.251, 97.005, 388.02, 3088.1], rel=1e-4)
    assert all(0.99 < row[f"{name}, ratio"] < 1.03 for row in rows for name in ("TCV", "T100", "T1K"))
    # Payload is shared out; a warehouse of 24 has a little more than a 24th, for its controllers' news.
    assert all(1 < row["Eq. 4, S=24"] * 24 / row["TCV"] < 1.01 for row in rows)
    assert len(rows) == len(PUBLISHED)


@pytest.mark.parametrize(
    ("text", "exact", "made"),
    [("3.9K", 3973.3, "cut off"), ("3.1K", 3088.1, "rounded"), ("15.2", 15.251, "cut off"), ("9.92", 10.4, "neither")],
)
def test_printed_figures_are_rounded_cut_off_or_wrong(text: str, exact: float, made: str):
    assert Printed(text).made_from(exact) == made


def test_every_tick_names_tests_that_exist(tmp_path: Path):
    assert missing_tests(FEATURES) == []
    assert all(feature.tests or feature.remark for feature in FEATURES), "a missing feature has a reason"
    (tmp_path / "test_it.py").write_text("def test_one(): ...\n\ndef helper(): ...\n")
    named = Feature("it", "yes", ("test_it.py::test_one", "test_it.py::test_two", "gone.py::test_one"))
    assert missing_tests([named], tmp_path) == ["test_it.py::test_two", "gone.py::test_one"]


def test_a_model_finds_the_step_that_made_its_figures():
    def step_on(count: int) -> NodeStep:
        elsewhere = 1 - 1 / count
        return NodeStep(count, 6.0, 0.05 + 0.3 * elsewhere + 0.01 * count, 12.0 * elsewhere + 0.5 * count)

    found = StepModel.of([step_on(count) for count in (1, 2, 4)], 300.0)
    steps = {count: found.step_seconds(count) for count in (1, 8, 24, 48)}
    assert steps == pytest.approx({count: step_on(count).seconds(300.0) for count in steps})
    assert found.line([24]) == [(24, pytest.approx(steps[1] / steps[24]))]


def test_a_model_has_no_term_that_shrinks_with_the_nodes():
    falling = [NodeStep(count, 6.0, 0.5 - 0.05 * count, 1.0) for count in (1, 2, 4, 8)]
    model = StepModel.of(falling, 300.0)
    assert min(*model.processor, *model.link) >= 0
    # Seconds keep their mean, which is what a constant is fitted to.
    assert model.processor == pytest.approx([0.3125, 0, 0]) and model.link == pytest.approx([1, 0, 0])


def test_figure_9_has_measured_and_modelled_lines_and_how_far_the_model_is_off():
    measured = [
        {"variant": "dock", "nodes": count, "step_s": 6 + 0.1 * count, "compute_s": 6.0, "dispatch_s": 0.1 * count,
         "rank_cpu_s": 0.05, "linearity": 6.1 / (6 + 0.1 * count), "busiest_veth_mb": 0.0}
        for count in (1, 2, 4, 8)
    ]  # fmt: skip
    table = linearity.table_of(measured, 300.0, FlowSize(rows_per_node=32, max_response_length=64))
    line = {(row["kind"], row["nodes"]): row["linearity"] for row in table.rows}
    assert line["measured", 8] == pytest.approx(6.1 / 6.8) and line["modelled, as emulated", 8] == pytest.approx(
        6.1 / 6.8
    )
    assert line["modelled, as emulated", 24] == pytest.approx(6.1 / 8.4)
    assert line["modelled, machines apart", 48] == pytest.approx(1.0)
    assert table.details["errors"]["dock, as emulated"] == pytest.approx((0, 0), abs=1e-9)
    found = {name: list(errors) for name, errors in table.details["plan_errors"]["dock"].items()}
    assert len(found) == 3 and all(counts == [1, 2, 4, 8] for counts in found.values())
    planned = {count: linearity for (kind, count), linearity in line.items() if kind == "plan, machines apart"}
    assert list(planned) == [1, 2, 4, 8, 24, 48] and planned[48] < planned[1] == 1
    apart = table.details["plan_errors"]["dock"]["plan, machines apart, beside the measured line"]
    assert apart[8] == pytest.approx(planned[8] / line["measured", 8] - 1)
    assert "plan, as emulated" not in {row["kind"] for row in linearity.table_of(measured[2:], 300.0).rows}
    shown = linearity.rows_of("dock", "planned", [(24, 0.9), (48, 0.8)])
    assert [row["paper"] for row in shown] == ["0.811 (MSRL)", None]


def test_figure_8_says_where_bands_overlap_and_draws_them():
    ours, theirs = (
        [[base + step / 1000 for step in range(99)] for base in bases] for bases in ((0.5, 0.6), (0.55, 0.7))
    )
    table = reward_curves.table_of({"spmdrl": ours, "the other trainer": theirs})
    assert [row["bands overlap"] for row in table.rows] == ["yes"] * 5
    assert table.rows[0]["steps"] == "2 to 20" and table.rows[0]["spmdrl"] == "0.559 (0.509 to 0.609)"
    apart = reward_curves.table_of({"spmdrl": ours, "the other trainer": [[0.0] * 99]})
    assert {row["bands overlap"] for row in apart.rows} == {"no"}
    root = ElementTree.fromstring(reward_curves.picture({"spmdrl": ours, "the other trainer": theirs}))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2


def test_figure_8_without_a_task_is_refused_in_one_line(capsys):
    assert main(["paper", "--only", "fig8"]) == 2
    assert "--start, --task and --curve-peer" in capsys.readouterr().err


def test_reference_answers_of_a_given_set_are_graded(tmp_path: Path):
    rows = tmp_path / "test.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}?", "answer": f"so it is #### {n}"}) + "\n" for n in range(3)))
    table = benchmark_sets.table3(parsed("--gsm8k", str(rows)))
    assert table.rows[-1]["rows"] == table.rows[-1]["reference answers right"] == 3
    assert table.rows[0]["rows"] is None


@pytest.mark.ranks
@pytest.mark.slow
def test_figure_7_runs_both_settings_beside_another_trainer(tmp_path: Path):
    peer = tmp_path / "peer.py"
    peer.write_text(
        "import json, sys\n"
        "assert sys.argv[1:] == ['2', '8']\n"
        "for _ in range(3): print(json.dumps({'ete': 4.0, 'gen': 1.0, 'update': 3.0, 'tok_s': 10.0}))\n"
    )
    words = ["--num-prompts", "2", "--length", "8", "--steps", "3"]
    table = figure7(parsed(*words, "--peer", f"{sys.executable} {peer} {{num_prompts}} {{length}}"))
    assert table.rows[-1]["run"] == PEER and table.rows[-1]["of it"] == {"generation": 0.25, "update": 0.75}
    for row in table.rows[:-1]:
        assert row["times the other's"] == pytest.approx(row["tokens_per_second_per_device"] / 10.0)
        assert 0 < row["share of product"] < 2 and {"generation", "update"} <= set(row["of it"])


@pytest.mark.ranks
@pytest.mark.slow
def test_figure_10_has_the_papers_switch_by_the_plan_and_a_small_one_measured(monkeypatch):
    monkeypatch.setattr(paper_bench, "_LAYERS_OF_MEMORY", 1)
    released, resident, ledger, peak = (row["ours"] for row in ITEMS["fig10"].run(parsed()).rows)
    assert round(released) == 8 and ledger == pytest.approx(1.0, abs=0.01)
    assert resident == pytest.approx(1.0, abs=0.15) and peak < 0.85


def test_a_tick_is_withdrawn_with_its_test(monkeypatch):
    lost = replace(FEATURES[0], tests=("algorithms/test_ppo.py::test_that_was_deleted",))
    monkeypatch.setattr("tests.bench.paper.features.FEATURES", (lost, *FEATURES[1:]))
    table = ITEMS["table2"].run(parsed())
    assert not table.passed and table.rows[0]["spmdrl"] == "no" and table.rows[1]["spmdrl"] == "yes"
