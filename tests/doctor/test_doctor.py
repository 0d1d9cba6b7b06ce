"""Whatever becomes of a stage is a verdict, the other stages go on, and what passed is not run again."""

from __future__ import annotations

import io
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from spmdrl.cli.command_line import main
from spmdrl.config.reader import ConfigError
from spmdrl.verbs.doctor.doctor import STAGES, Check, chosen_stages, run_stages
from spmdrl.verbs.doctor.stage_run import CheckReport, RankOutcome, StageVerdict, verdict_of
from tests.bench.accelerator import accelerator_bench
from tests.doctor.planted_stages import FAULTY, HANGING, PLANTED
from tests.support.jobs import ROOT

CPU = {"kind": "cpu", "name": "a test", "count": 1}
SCHEMA = {
    "type": "object",
    "required": ["device", "stages"],
    "additionalProperties": False,
    "properties": {
        "device": {"type": "object", "required": ["kind", "name", "count"]},
        "stages": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["stage", "verdict", "reason", "figures"],
                "additionalProperties": False,
                "properties": {
                    "stage": {"type": "string"},
                    "verdict": {"enum": ["passed", "failed", "skipped"]},
                    "reason": {"type": "string"},
                    "figures": {"type": "object"},
                },
            },
        },
    },
}


@pytest.fixture(autouse=True)
def children_find_the_tests(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))


def check_in(folder: Path, **settings: object) -> Check:
    return replace(Check(CPU, "full", 1, folder), **settings)


def verdicts_of(report: CheckReport) -> dict[str, StageVerdict]:
    return {verdict.stage: verdict for verdict in report.stages}


@pytest.mark.slow
def test_whatever_becomes_of_a_stage_is_a_verdict_and_what_passed_is_not_run_again(tmp_path):
    report = run_stages(PLANTED, check_in(tmp_path))
    found = verdicts_of(report)
    assert not report.passed
    assert (found["raises"].verdict, found["raises"].reason) == ("failed", "ValueError: the planted error")
    assert found["raises"].figures["before"] == 1
    assert "the planted error\nwith a second line" in (tmp_path / "raises.log").read_text()
    assert found["crashes"].verdict == "failed" and "ended with -6" in found["crashes"].reason
    assert (found["is_skipped"].verdict, found["is_skipped"].reason) == ("skipped", "nothing to check here")
    assert found["works"].verdict == "passed" and found["works"].figures["ranks"] == 1
    jsonschema.validate(json.loads(report.to_json()), SCHEMA)
    assert (tmp_path / "doctor.json").read_text() == report.to_json()
    assert "| raises | failed | before 1, seconds" in (tmp_path / "doctor.md").read_text()

    works = [stage for stage in PLANTED if stage.name == "works"]
    kept = found["works"]
    assert run_stages(works, check_in(tmp_path)).stages == [kept]
    # Run anew: another device, or by wish.
    written = [(tmp_path / "works.json").stat().st_mtime_ns]
    newer = check_in(tmp_path, device=CPU | {"torch": "another"})
    for check in (newer, replace(newer, again=True)):
        run_stages(works, check)
        written.append((tmp_path / "works.json").stat().st_mtime_ns)
    assert written[0] < written[1] < written[2]


@pytest.mark.slow
def test_what_a_stage_that_crashes_wrote_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    crashes = [stage for stage in PLANTED if stage.name == "crashes"]
    [verdict] = run_stages(crashes, check_in(tmp_path / "check")).stages
    assert "ended with -6" in verdict.reason
    assert [path.name for path in tmp_path.iterdir()] == ["check"]


@pytest.mark.slow
def test_a_stage_that_hangs_is_ended(tmp_path):
    [verdict] = run_stages([HANGING], check_in(tmp_path)).stages
    assert (verdict.verdict, verdict.reason) == ("failed", "ended, as there was nothing within 6 s")


def test_ranks_are_one_stage_whose_fault_names_the_rank(tmp_path):
    [verdict] = run_stages([FAULTY], check_in(tmp_path, num_ranks=2)).stages
    assert verdict.figures["ranks"] == 2 and verdict.figures["steps_per_second"] == 0.5
    assert (verdict.verdict, verdict.reason) == ("failed", "rank 1: two is not three")


def test_a_rate_is_that_of_the_slowest_rank_and_tables_are_left_to_the_json():
    ranks = [RankOutcome({"gb_per_second": rate, "count": rate, "table": {"a": 1}}) for rate in (2.0, 0.5, 1.0)]
    verdict = verdict_of("device", ranks, crash=None, seconds=1.0)
    screen = io.StringIO()
    CheckReport(CPU, [verdict]).print(screen)
    assert "| device | passed | gb_per_second 0.5, count 2, seconds 1 |  |" in screen.getvalue()


def test_a_rank_that_died_without_a_word_fails_the_stage():
    verdict = verdict_of("device", [RankOutcome({"a": 1})], crash="its process ended with -9", seconds=1.0)
    assert (verdict.verdict, verdict.reason) == ("failed", "its process ended with -9")


def test_stages_run_in_the_order_of_the_table_and_unknown_ones_are_refused():
    assert [stage.name for stage in chosen_stages(["quickstart", "device"], STAGES)] == ["device", "quickstart"]
    assert chosen_stages([], STAGES) == list(STAGES)
    with pytest.raises(ConfigError, match="no stage is named speed; there are device, "):
        chosen_stages(["speed"], STAGES)


def test_every_stage_names_a_function_and_is_explained():
    page = (ROOT / "docs" / "accelerators.md").read_text()
    for stage in accelerator_bench.STAGES:
        module, _, function = stage.function.partition(":")
        path = ROOT / ("src" if stage in STAGES else "") / f"{module.replace('.', '/')}.py"
        assert f"def {function}(run: StageRun) -> None:" in path.read_text()
        assert f"| `{stage.name}` |" in page


def test_what_a_kind_of_device_lacks_is_skipped_with_its_reason():
    reasons = {stage.name: stage.skipped_on(CPU) for stage in accelerator_bench.STAGES}
    assert reasons["swap"] and reasons["graphs"] == "graphs are captured on CUDA only"
    assert reasons["vllm"] == "vllm is not installed"
    assert not any(stage.skipped_on({"kind": "cuda", "vllm": "1"}) for stage in accelerator_bench.STAGES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device cuda", "resources.device is 'cuda', but PyTorch finds 'cpu'"),
        ("--nproc 0", "--nproc is 0, but a check needs a rank"),
        ("speed", "no stage is named speed"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(words: str, message: str, tmp_path, capsys):
    assert main(["doctor", *words.split(), "--folder", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
