"""The bench of faults counts what was survived, and a promise that isn't kept fails it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from spmdrl.observability.fault_points import faultpoint
from spmdrl.runtime.supervision.activity import activity
from tests.bench.__main__ import main
from tests.bench.faults import weight_faults
from tests.bench.faults.fault_jobs import JobEnd, difference, outcome_of
from tests.bench.faults.fault_tally import Tally
from tests.bench.faults.kills.random_kills import KINDS, lost_or_doubled, stages_of
from tests.bench.faults.noted_passes import Pass, Passes, note_passes
from tests.bench.faults.watched.hung_jobs import Hang, Seen, all_hangs
from tests.bench.faults.watched.hung_sets import Layout, draw_hangs
from tests.bench.faults.watched.stopped_jobs import Stop, _out_of_time, random_stops
from tests.support.jobs import environment
from tests.support.ranks import fork

# Slow-downs are left out where there is little time.
PROMISES = (
    "R1", "R2", "R3", "R4", "R5", "R6", "R8", "R9", "R10", "R11", "R12", "R13", "tools", "nodes", "switch", "sets",
    "kills",
)  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("promise", PROMISES)
def test_a_few_faults_of_each_kind_are_survived(promise, tmp_path, monkeypatch):
    # As any test that opened a world in this process leaves it.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    out = tmp_path / "rows.json"
    assert main(["faults", "--short", "--only", promise, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    # What is left of a kill is counted beside it.
    ids = {"R1": {"R1", "R14"}, "kills": {"R1", "R14"}, "sets": {"R2"}}
    assert {row["id"] for row in rows} == ids.get(promise, {promise})
    # Namespaces are not everywhere; the row says what is missing.
    tried = [row for row in rows if not row["fault"].startswith("not tried: ")]
    assert tried == rows or promise == "nodes"
    assert all(row["survived"] == row["injected"] > 0 for row in tried), rows


def test_every_promise_is_tried(capsys):
    assert main(["faults", "--only", "R1,R99"]) == 2
    assert (
        f"--only names 'R99', but there are {', '.join([*PROMISES[:12], 'R15', *PROMISES[12:]])}"
        in capsys.readouterr().err
    )


TWO_RANKS = """
import sys
from pathlib import Path
from tests.bench.faults.fault_jobs import FaultJobs
print(FaultJobs(Path(sys.argv[1]), 2, "train.max_steps=1").run("run").screen)
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_have_one_thread_whatever_the_bench_was_started_with(tmp_path):
    command = [sys.executable, "-c", TWO_RANKS, str(tmp_path)]
    environ = environment(OMP_NUM_THREADS="2")
    job = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=True)
    assert "cpu, 1 thread each" in job.stdout, job.stdout


class DoneWithin:
    """Jobs that take so many seconds, and are stopped by a limit that comes before."""

    def __init__(self, root: Path, seconds: int):
        self.root, self._seconds, self.limits = root, seconds, list[str]()

    def start(self, name: str, limit: str) -> SimpleNamespace:
        (self.root / name).mkdir()
        self.limits.append(limit)
        code = 0 if int(limit[-2:]) >= self._seconds else 75
        return SimpleNamespace(end=lambda: JobEnd([code], 0.0, "", []))


@pytest.mark.parametrize(("seconds", "limits", "codes"), [(3, [4, 3, 2], [75]), (9, [4], [75]), (1, [4, 3, 2, 1], [0])])
def test_a_job_that_is_done_before_its_limit_gets_a_shorter_one(tmp_path, seconds, limits, codes):
    jobs = DoneWithin(tmp_path, seconds)
    stop = Stop("train", 1, "checkpoint.save_by", (), 0.0, 2, 4.0)
    assert _out_of_time(jobs, "run", stop).codes == codes
    assert jobs.limits == [f"checkpoint.save_by=0:00:{limit:02}" for limit in limits]


def test_what_is_not_survived_is_counted_with_its_reason():
    tally = Tally("R4", "flipped byte")
    with tally.timed("one") as problems:
        problems.append("it was not found")
    with tally.timed("other"):
        pass
    assert (tally.row()["injected"], tally.row()["survived"]) == (2, 1)
    assert tally.failures == ["one: it was not found"]


def finished_run(folder: Path, rows: dict[int, list[list[int]]]) -> Path:
    """A run's folder of two ranks with these rows by step and rank, 4 of which each step trains."""
    files = {"trainer/shards_00000.safetensors": "s", "model/model.safetensors": "m", "samples.json": "{}"}
    for name, text in files.items():
        path = folder / "checkpoints/step_000002" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    times = dict.fromkeys(("time/step", "environment/seconds/add", "environment/open_seconds"), folder.name)
    steps = [json.dumps({"step": step, "dock/trained": 4} | times) for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join(steps))
    (folder / "rows").mkdir()
    for rank in (0, 1):
        lines = [json.dumps({"step": step, "rows": of_ranks[rank]}) for step, of_ranks in rows.items()]
        (folder / f"rows/rank_{rank:05d}.jsonl").write_text("\n".join(lines))
    return folder


SOUND = {1: [[0, 1], [2, 3]], 2: [[0, 2], [1, 3]]}


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (SOUND, ""),
        (SOUND | {2: [[0, 2], [1, 2, 3]]}, "step 2 has a row twice"),
        (SOUND | {2: [[0, 2], [1]]}, "step 2 lacks rows: 3 of 4"),
        (SOUND | {3: [[0], [1]]}, r"rows of no step: [3]"),
    ],
)
def test_lost_and_doubled_rows_are_found(tmp_path, rows, found):
    assert lost_or_doubled(finished_run(tmp_path / "run", rows)) == found


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("checkpoints/step_000002/trainer/shards_00000.safetensors", "other state: trainer/shards_00000.safetensors"),
        ("checkpoints/step_000002/samples.json", "other account of rows: num_trained"),
        ("rows/rank_00001.jsonl", "other digests of rows: rank_00001.jsonl.0, rank_00001.jsonl.1"),
        ("metrics.jsonl", "other metrics: 0.dock/trained, 1"),
    ],
)
def test_any_other_part_of_an_outcome_is_a_difference_but_not_its_times(tmp_path, name, part):
    whole, other = (finished_run(tmp_path / name, SOUND) for name in ("whole", "other"))
    assert difference(outcome_of(whole), outcome_of(other)) is None
    content = {"samples.json": '{"num_trained": 1}', "metrics.jsonl": '{"step": 1}'}
    (other / name).write_text(content.get(Path(name).name, "changed"))
    assert difference(outcome_of(whole), outcome_of(other)) == part


def test_weights_that_nothing_changed_are_found_sound():
    assert not weight_faults._is_found(lambda arrived, earlier, random: None, Random(0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--part 3/2", "--part is '3/2', but must be K/N"),
        ("--kills 0", "--kills is 0, but must be at least 1"),
    ],
)
def test_wrong_choices_are_refused(words, message, capsys):
    assert main(["faults", *words.split()]) == 2
    assert message in capsys.readouterr().err


LINE = "rank 1 hangs: no progress for 2 s; rank 1 in generation of step 2 (at x.py:1, rows 1, 2 not ended, 3 steps)"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"struck": False}, "it never came"),
        ({"named_seconds": 3.1}, "named after 3.10 s"),
        ({"line": LINE.replace("rank 1", "rank 0")}, "named 'rank 0"),
        ({"line": LINE.replace("of step 2", "of step 1")}, "named 'rank 1"),
        ({"line": LINE.replace("rows 1, 2 not ended, ", "")}, "named 'rank 1"),
        ({"stacks": [0]}, "no stacks of [1]"),
        ({"is_held": [0]}, "ranks [0] don't end"),
    ],
)
def test_a_hang_that_is_not_named_rightly_is_a_problem(change, problem):
    seen = Seen(JobEnd([124, 124], 0.0, "", []), True, LINE, 2.2, 0.1, True, [0, 1], [])
    found = replace(seen, **change).problem(Hang("sleep", 1, 2, "generate", 2, 0))
    assert found is None if problem is None else problem in found


def test_faults_drawn_by_chance_are_the_same_each_time():
    hangs, stops = all_hangs(200), random_stops(60)
    assert hangs == all_hangs(200) and stops == random_stops(60)
    assert {hang.way for hang in hangs} == {"sleep", "sigstop", "lock", "collective", "reward", "tool"}
    assert {stop.verb for stop in stops} == {"train", "sft", "preferences", "reward-model"}
    assert max(stop.apart_seconds for stop in stops) > 4


def test_ranks_of_either_set_or_all_are_killed_beginning_with_the_one_whose_stage_counts():
    (kind,) = (kind for kind in KINDS.values() if kind.generating)
    assert kind.victims(4) == {
        "a rank that trains": [[0], [1], [2]], "a rank that generates": [[3]],
        "all ranks": [[0, 1, 2, 3], [3, 0, 1, 2]],
    }  # fmt: skip
    assert KINDS["plain steps"].victims(2) == {"a rank": [[0], [1]]}


def passed(seconds: float, in_step: int, stage: str, *, point: str = "", step: int = 0) -> Pass:
    return Pass(seconds, in_step, point, step or in_step, stage)


def test_a_stage_lasts_until_the_next_one_begins_whatever_points_lie_in_it():
    passes = [passed(1.0, 1, "update"), passed(1.5, 1, "update", point="forward"), passed(3.0, 1, "checkpoint"),
              passed(3.5, 2, "update"), passed(4.5, 2, "between stages")]  # fmt: skip
    assert stages_of(passes) == {"update": [(1, 2.0), (2, 1.0)], "checkpoint": [(1, 0.5)]}


def _note(folder: Path) -> None:
    note_passes(folder)
    faultpoint("step", 2)
    with activity.in_stage("generation", 4):
        faultpoint("generate")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_has_noted_its_last_place(tmp_path):
    rank = fork(_note, tmp_path)
    rank.join()
    reader = Passes(tmp_path, 0)
    last = reader.new()[-1]
    assert (last.in_step, last.point, last.step, last.stage) == (2, "generate", 4, "generation")
    assert reader.new() == []
    with open(tmp_path / "0", "a") as file:
        for part, stages in {"1.0\t3\t": [], "\t5\tupd": [], "ate\n2": ["update"]}.items():
            file.write(part)
            file.flush()
            assert [one.stage for one in reader.new()] == stages


SETS = Layout(1, 1, 1)
LINE_OF_SETS = (
    "rank 1 hangs: no progress for 2 s; rank 1 in generation of step 3 (at x.py:1, rows 1 not ended); rank 0 waits in "
    "barrier in wait_for_generation of step 2 (at y.py:1)"
)


def test_hangs_of_sets_come_where_ranks_passed_and_the_set_that_waits_is_to_be_named():
    passes = {
        0: [passed(1, 2, "update"), passed(1, 2, "update", point="forward"), passed(1, 2, "update", point="forward")],
        1: [passed(1, 2, "generation", step=3), passed(1, 2, "generation", point="generate", step=3)],
    }
    hangs = list(draw_hangs(SETS, passes, 12, Random(0)))
    assert hangs == list(draw_hangs(SETS, passes, 12, Random(0)))
    assert {(hang.way, hang.rank) for hang in hangs} == set(product(("sleep", "sigstop", "collective"), (0, 1)))
    assert {hang.fault for hang in hangs if hang.rank == 0} == {"", "forward:0:2:hang:0", "forward:0:2:hang:1"}
    generating = next(hang for hang in hangs if hang.rank == 1 and hang.way == "sleep")
    assert (generating.fault, generating.named_step) == ("generate:1:2:hang:0", 3)
    seen = Seen(JobEnd([124, 124], 0.0, "", []), True, LINE_OF_SETS, 2.2, 0.1, True, [0, 1], [])
    assert seen.problem(generating) is None
    lines = LINE_OF_SETS.partition("; rank 0")[0], LINE_OF_SETS.replace("wait_for_generation", "update")
    for line in (*lines, LINE_OF_SETS.replace("; rank 0", "; rank 0 hangs: no progress for 2 s; rank 0")):
        assert "the other set isn't named" in str(replace(seen, line=line).problem(generating))
