"""A timeline stays small, is cut where a run resumes, and is read whole, whatever wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter, sleep

from hypothesis import given
from hypothesis import strategies as st

from spmdrl.observability.timeline import (
    PART_BYTES,
    HeldMemory,
    Moved,
    Span,
    Timeline,
    closed_parts,
    read_part,
    read_timeline,
    timeline_file,
)
from spmdrl.observability.timeline_lines import LineReader, LineWriter, MemorySnapshot
from tests.observability.synthetic import write_run

OWNERS = ("bucket", "generation_weights", "gradients", "kv_cache", "optimizer", "reference_weights", "update_weights")
STAGES = ("probe", "resharding", "probe", "generation", "resharding", "reward", "resharding", "advantage", "update")
bytes_by_owner = st.dictionaries(st.sampled_from(OWNERS), st.integers(0, 10**12))
times = st.integers(0, 10**12).map(lambda micros: 1.7e9 + micros / 1e6)


def _live(timeline: Timeline, steps: range) -> None:
    """Stages and memory as a real run has them."""
    for step in steps:
        for at, stage in enumerate(STAGES):
            with timeline.stage(stage, step):
                if stage == "resharding":
                    timeline.note_moved(Moved("to_host", 153_600 + step, 0.0123456))
            sizes = {owner: 100_000 * (place + 1) * ((at + place) % 3) for place, owner in enumerate(OWNERS)}
            timeline.memory(step, HeldMemory(stage, sizes, {"optimizer": 12_345 * at}, sizes, 10**7 + at))


def test_a_step_of_one_rank_takes_a_few_hundred_bytes_once_its_part_is_closed(tmp_path: Path):
    timeline = Timeline(timeline_file(tmp_path, 0), 0, part_bytes=100_000)
    _live(timeline, range(200))
    timeline.close()
    parts = closed_parts(timeline_file(tmp_path, 0))
    steps = {line["step"] for part in parts for line in read_part(part)}
    assert len(parts) >= 2 and sum(part.stat().st_size for part in parts) / len(steps) < 600
    assert timeline_file(tmp_path, 0).stat().st_size < 110_000


def test_parts_are_read_in_order_and_hold_each_line_once(tmp_path: Path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    for folder, part_bytes in ((whole, PART_BYTES), (parted, 4000)):
        timeline = Timeline(timeline_file(folder, 3), 3, part_bytes=part_bytes)
        _live(timeline, range(30))
        timeline.close()
    assert len(closed_parts(timeline_file(parted, 3))) > 5 and not closed_parts(timeline_file(whole, 3))
    first, second = (read_timeline(folder / "timeline") for folder in (whole, parted))
    assert [(one.rank, one.step, one.stage, one.moved) for one in first.spans] == [
        (one.rank, one.step, one.stage, one.moved) for one in second.spans
    ]
    assert [(one.step, one.held) for one in first.snapshots] == [(one.step, one.held) for one in second.snapshots]


def test_a_resumed_run_forgets_in_closed_parts_too_and_goes_on(tmp_path: Path):
    path = timeline_file(tmp_path, 0)
    first = Timeline(path, 0, part_bytes=4000)
    _live(first, range(30))
    first.close()
    again = Timeline(path, 0, part_bytes=4000)
    again.truncate_after(7)
    _live(again, range(8, 20))
    again.close()
    records = read_timeline(tmp_path / "timeline")
    assert [span.step for span in records.spans] == [step for step in range(20) for _ in STAGES]
    assert all(one.held.peak >= 10**7 for one in records.snapshots)
    fresh = Timeline(path, 0)
    fresh.truncate_after(-1)
    fresh.close()
    assert read_timeline(tmp_path / "timeline").spans == [] and closed_parts(path) == []


def test_a_broken_part_costs_only_itself_and_one_left_uncompressed_is_read(tmp_path: Path):
    path = timeline_file(tmp_path, 0)
    timeline = Timeline(path, 0, part_bytes=4000)
    _live(timeline, range(30))
    timeline.close()
    parts = closed_parts(path)
    whole = len(read_timeline(tmp_path / "timeline").spans)
    parts[0].write_bytes(parts[0].read_bytes()[:-300])
    assert whole - 100 < len(read_timeline(tmp_path / "timeline").spans) <= whole
    # Killed between renaming and compressing, and between compressing and deleting.
    parts[1].with_suffix("").write_text('{"step": 1, "s": ["never read", 0, 1]}\n')
    path.with_name("rank_00000.9999.jsonl").write_text('{"step": 99, "s": ["left", 0, 1]}\n')
    stages = {span.stage for span in read_timeline(tmp_path / "timeline").spans}
    assert "left" in stages and "never read" not in stages


@given(st.lists(st.tuples(st.integers(0, 3), times, bytes_by_owner, bytes_by_owner, bytes_by_owner), max_size=12))
def test_memory_reads_back_as_it_was_whatever_changes_between_lines(steps):
    writer, reader = LineWriter(5, 1.7e9), LineReader()
    reader.record(writer.header)
    for step, time, device, host, peaks in sorted(steps, key=lambda one: one[0]):
        held = HeldMemory("update", device, host, peaks, 7)
        back = reader.record(json.loads(json.dumps(writer.memory(step, time, held))))
        assert isinstance(back, MemorySnapshot) and back.held == held and (back.rank, back.step) == (5, step)
        assert abs(back.time - time) < 2e-6


@given(times, st.floats(0, 1e4), st.text(), st.booleans(), st.lists(st.tuples(st.text(), st.integers(0, 10**15))))
def test_stages_read_back_to_the_microsecond(start, seconds, error, background, moved):
    links = tuple(Moved(link, size, seconds / 3) for link, size in moved)
    span = Span(2, 9, "update", start, start + seconds, error, background, links)
    writer, reader = LineWriter(2, 1.7e9), LineReader()
    reader.record(writer.header)
    back = reader.record(json.loads(json.dumps(writer.span(span))))
    assert isinstance(back, Span) and abs(back.start - start) < 2e-6 and abs(back.end - span.end) < 2e-6
    assert (back.error, back.background, back.moved) == (error, background, links)


leaves = st.none() | st.booleans() | st.floats() | st.text() | st.integers()
keys = st.sampled_from(["step", "s", "h", "d", "m", "from", "rank"])


@given(st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner)))
def test_odd_lines_are_no_error(value):
    reader = LineReader()
    lines = [{"step": 1, "s": value}, {"step": 1, "h": value, "d": value}, {"step": 1, "s": ["x", 1, 2], "m": value}]
    for line in (*lines, {"step": -1, "from": value}, value if isinstance(value, dict) else {}):
        reader.record(line)


def test_files_of_earlier_versions_are_read_beside_new_lines(tmp_path: Path):
    run = write_run(tmp_path / "run", num_steps=3, num_ranks=1)
    before = read_timeline(run / "timeline")
    timeline = Timeline(timeline_file(run, 0), 0)
    _live(timeline, range(4, 6))
    timeline.close()
    after = read_timeline(run / "timeline")
    assert after.spans[: len(before.spans)] == before.spans and len(after.spans) == len(before.spans) + 2 * len(STAGES)


def test_a_stage_inside_another_counts_once_and_hides_what_the_other_waits_for(tmp_path: Path):
    timeline = Timeline(tmp_path / "rank.jsonl", 0)
    started = perf_counter()
    with timeline.stage("generation", 1):
        with timeline.stage("reference", 1):
            sleep(0.02)
        scored = perf_counter()
        timeline.waited("generation", 1, start=started, end=scored - 0.005)
    took = perf_counter() - started
    timeline.waited("reward", 1, start=timeline.end_of("generation", 1), end=started)
    timeline.close()
    seconds, waits = timeline.stage_seconds(1), timeline.waits(1)
    assert seconds["reference"] >= 0.02 and sum(seconds.values()) <= took
    assert seconds["generation"] < took - 0.02
    assert waits.keys() == {"generation"}, "rewards that came before the end of generation aren't waited for"
    assert 0.01 <= waits["generation"].hidden_seconds <= waits["generation"].seconds <= scored - 0.0049 - started
