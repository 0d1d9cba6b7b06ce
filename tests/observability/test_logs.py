"""Log files keep numbers exactly, survive cut lines, and forget what a resumed run does again."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.nouns.settings.log_config import LogConfig
from spmdrl.observability.jsonl import number, read_jsonl, to_json
from spmdrl.observability.log import MetricsLog, SampleRecord, SamplesLog, read_metrics
from spmdrl.observability.summary import read_summary, software_versions, write_summary
from spmdrl.observability.timeline import (
    HeldMemory,
    Moved,
    Timeline,
    read_timeline,
    timeline_file,
    write_perfetto,
)


@given(st.floats())
def test_every_float_round_trips_through_strict_json(value):
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} isn't JSON")

    back = number(json.loads(to_json({"x": value}), parse_constant=refuse)["x"])
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_metrics_are_one_sorted_object_a_step(tmp_path: Path):
    log = MetricsLog(tmp_path, ["jsonl"])
    log.write(1, {"z": 0.1 + 0.2, "a": math.nan})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"a": "NaN", "step": 1, "z": 0.30000000000000004}\n'
    [(step, metrics)] = read_metrics(tmp_path)
    assert step == 1 and metrics["z"] == 0.1 + 0.2 and math.isnan(metrics["a"])


def test_resuming_cuts_later_steps_and_goes_on(tmp_path: Path):
    log = MetricsLog(tmp_path, ["jsonl"])
    for step in range(1, 6):
        log.write(step, {"reward": step / 10})
    log.truncate_after(3)
    log.write(4, {"reward": 9.0})
    log.close()
    assert dict(read_metrics(tmp_path)) == {
        1: {"reward": 0.1},
        2: {"reward": 0.2},
        3: {"reward": 0.3},
        4: {"reward": 9.0},
    }


def test_a_line_cut_by_a_crash_costs_only_itself(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "reward": 0.5}\n{"step": 2, "rew\xc3')
    log = MetricsLog(tmp_path, ["jsonl"])
    log.write(3, {"reward": 0.7})
    log.close()
    assert dict(read_metrics(tmp_path)) == {1: {"reward": 0.5}, 3: {"reward": 0.7}}


def test_samples_are_truncated_too(tmp_path: Path):
    log = SamplesLog(tmp_path)
    for step in (1, 2):
        log.write([_sample(step, "ok \ud800 </script>")])
    log.truncate_after(1)
    log.close()
    [sample] = read_jsonl(tmp_path / "samples.jsonl")
    assert sample["step"] == 1 and sample["response"] == "ok \ud800 </script>"


def test_unknown_backends_are_refused_by_name():
    with pytest.raises(ValueError, match="log.backends names syslog"):
        LogConfig(backends=("jsonl", "syslog"))


def test_a_backend_that_is_not_installed_says_how_to_install_it(tmp_path: Path, monkeypatch):
    # As if it weren't there, wherever it is.
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"run `pip install wandb`"):
        MetricsLog(tmp_path, ["wandb"])


def test_the_timeline_keeps_stages_also_of_a_step_that_raises(tmp_path: Path):
    timeline = Timeline(timeline_file(tmp_path, 3), 3)
    with timeline.stage("generation", 1):
        pass
    with pytest.raises(KeyError), timeline.stage("update", 1):
        raise KeyError("x")
    timeline.memory(1, HeldMemory("update", {"optimizer": 7}, {"kv_cache": 0}, {"optimizer": 9}, 11))
    assert set(timeline.stage_seconds(1)) == {"generation", "update"}
    # Not closed: every line must be on disk already.
    records = read_timeline(tmp_path / "timeline")
    assert [(span.rank, span.stage, span.error) for span in records.spans] == [
        (3, "generation", ""), (3, "update", "KeyError"),
    ]  # fmt: skip
    assert records.spans[0].end <= records.spans[1].start
    assert records.snapshots[0].held == HeldMemory("update", {"optimizer": 7}, {"kv_cache": 0}, {"optimizer": 9}, 11)
    timeline.close()


def test_a_stage_keeps_what_was_moved_in_it_over_which_link(tmp_path: Path):
    timeline = Timeline(timeline_file(tmp_path, 0), 0)
    with timeline.stage("resharding", 1):
        timeline.note_moved(Moved("node", 3 * 10**9, 2.0))
        with timeline.stage("inner", 1):
            timeline.note_moved(Moved("cross_node", 5, 0.0))
        timeline.note_moved(Moved("to_host", 10**9, 0.5))
    with timeline.stage("update", 1):
        pass
    timeline.background("return", 1, start=0.0, end=4.0, moved=[Moved("from_host", 10**9, 4.0)])
    with pytest.raises(AssertionError, match="outside any stage"):
        timeline.note_moved(Moved("node", 1, 1.0))
    timeline.close()
    moved = {span.stage: span.moved for span in read_timeline(tmp_path / "timeline").spans}
    assert moved == {
        "resharding": (Moved("node", 3 * 10**9, 2.0), Moved("to_host", 10**9, 0.5)),
        "inner": (Moved("cross_node", 5, 0.0),),
        "update": (),
        "return": (Moved("from_host", 10**9, 4.0),),
    }
    assert [one.gb_per_second for one in (*moved["resharding"], *moved["inner"])] == [1.5, 2.0, 0.0]


def test_timelines_without_peaks_or_bytes_and_with_odd_ones_are_read(tmp_path: Path):
    span, memory = '{"step": 1, "s": ["s", 0, 1]', '{"step": 1, "h": ["s", 1, 0]'
    lines = [
        '{"step": -1, "rank": 0, "from": 1.0}', '{"step": 1, "stage": "s", "start": 1, "end": 2}',
        '{"step": 1, "s": ["s", 0]}', '{"step": 1, "h": [7, 0, 0]}',
        span + "}", span + ', "m": 3}', span + ', "m": [1, ["node"], [2, 7, 1]]}',
        span + ', "m": [["node", 7, "NaN"]]}', span + ', "m": [["node", 7, 1]]}',
        memory + ', "d": {"optimizer": 7}}', '{"step": 2, "h": ["s", 2, "x"], "d": [], "p": []}',
    ]  # fmt: skip
    (tmp_path / "rank.jsonl").write_text("\n".join(lines))
    records = read_timeline(tmp_path)
    assert [span.moved for span in records.spans] == [(), (), (), (), (Moved("node", 7, 1.0),)]
    assert [one.held for one in records.snapshots] == [HeldMemory("s", {"optimizer": 7}, {}), HeldMemory("s", {}, {})]


def test_stage_seconds_add_up_and_old_steps_are_forgotten(tmp_path: Path):
    timeline = Timeline(tmp_path / "rank.jsonl", 0)
    for step in (1, 1, 2, 3):
        with timeline.stage("update", step):
            pass
    spans = read_timeline(tmp_path).spans
    assert timeline.stage_seconds(1) == {}
    assert timeline.stage_seconds(3)["update"] == pytest.approx(spans[-1].seconds, abs=1e-6)
    timeline.truncate_after(1)
    assert [span.step for span in read_timeline(tmp_path).spans] == [1, 1]
    timeline.close()


def test_a_perfetto_trace_has_every_stage_and_snapshot(tmp_path: Path):
    for rank in (0, 1):
        timeline = Timeline(timeline_file(tmp_path, rank), rank)
        with timeline.stage("update", 5):
            timeline.note_moved(Moved("to_host", 10**9, 0.5))
        timeline.memory(5, HeldMemory("update", {"optimizer": 7}, {}))
        timeline.memory(5, HeldMemory("update", {"optimizer": 7}, {}, {"optimizer": 8}, 9))
        timeline.close()
    write_perfetto(tmp_path / "timeline", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    stages = [event for event in events if event["ph"] == "X"]
    assert [(event["pid"], event["name"]) for event in stages] == [(0, "update"), (1, "update")]
    moved = {"to_host_bytes": 10**9, "to_host_seconds": 0.5, "to_host_gb_per_second": 2.0}
    assert [event["args"] for event in stages] == [{"step": 5} | moved] * 2
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in stages)
    counters = [(event["name"], event["args"]) for event in events if event["ph"] == "C"]
    held, peaks = ("device memory", {"optimizer": 7}), ("device memory peak", {"optimizer": 8, "all owners": 9})
    assert counters == [held, held, peaks] * 2


def test_the_summary_keeps_earlier_fields_and_always_has_the_promised_ones(tmp_path: Path):
    write_summary(tmp_path, verdict="running", versions=software_versions())
    write_summary(tmp_path, verdict="ok", steps=3, checkpoint=tmp_path / "model", reward_last=math.inf)
    summary = read_summary(tmp_path)
    assert summary["verdict"] == "ok" and summary["steps"] == 3 and "python" in summary["versions"]
    assert summary["accuracy_after"] is None and summary["checkpoint"] == str(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_missing_or_broken_summary_is_empty(tmp_path: Path):
    assert read_summary(tmp_path) == {}
    (tmp_path / "summary.json").write_text('{"verdict": "o')
    assert read_summary(tmp_path) == {}


def _sample(step: int, response: str) -> SampleRecord:
    return SampleRecord(
        step=step, row=0, prompt="p", response=response, answer="a", reward=1.0, parts={"exact": 1.0},
        verdict="scored", advantage=None, mismatch=None, version=0, tokens=[],
    )  # fmt: skip
