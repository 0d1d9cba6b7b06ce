"""Jobs that stand still end soon, with the rank that holds them up and the stacks of all; healthy ones aren't ended."""

from __future__ import annotations

import bdb
import ctypes
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.bench.faults.fault_jobs import FaultJobs, RunningJob
from tests.support.jobs import finished, metrics_of, run_job, summary_of, tiny_config
from torch.distributed import HashStore, distributed_c10d

from spmdrl.runtime.supervision import main_thread
from spmdrl.runtime.supervision.activity import BETWEEN, Activity, activity
from spmdrl.runtime.supervision.board import Line, RankState, culprits
from spmdrl.runtime.supervision.hang_report import HUNG
from spmdrl.runtime.supervision.watch import Watch, WatchConfig

LIMIT = 4.0
# A rank whose last sign of life is of its first step has three times as long, and stops have 15 s.
MOST_SECONDS = 3.5 * LIMIT + 15


def state(rank: int, *, idle: float, collective: str = "", boundaries: int = 5, patience: float = 1.0) -> RankState:
    return RankState(rank, "update", 3, boundaries, idle, collective, "at x.py:1", patience)


@pytest.mark.parametrize(
    ("states", "silent", "expected"),
    [
        # All wait for one that works: nothing hangs, however long they wait.
        ([state(0, idle=99, collective="barrier"), state(1, idle=0.1)], {}, []),
        ([state(0, idle=99, collective="barrier"), state(1, idle=11)], {}, [1]),
        ([state(0, idle=99, collective="barrier"), state(1, idle=11, patience=3.0)], {}, []),
        ([state(0, idle=9, collective="barrier"), state(1, idle=9)], {}, []),
        ([state(0, idle=0.1), state(1, idle=0.1)], {0: 0.2, 1: 12.0}, [1]),
        ([state(0, idle=11, collective="sum"), state(1, idle=12, collective="barrier", boundaries=4)], {}, [1]),
        ([state(0, idle=11, collective="sum"), state(1, idle=12, collective="barrier")], {}, [0, 1]),
        ([state(0, idle=11)], {}, [0]),
        # Ranks of two sets pass other stages, and one of them may wait for the other.
        (
            [
                replace(state(0, idle=11, collective="barrier", boundaries=4), stage="wait_for_generation"),
                replace(state(1, idle=11, collective="gather"), rank_set=1),
            ],
            {},
            [1],
        ),
        (
            [
                state(0, idle=11, collective="barrier", boundaries=4),
                state(1, idle=11, collective="gather"),
                replace(state(2, idle=11, collective="barrier"), rank_set=1),
            ],
            {},
            [0, 2],
        ),
    ],
)
def test_who_holds_a_job_up(states, silent, expected):
    assert culprits(states, silent, 10.0) == expected


def test_a_collective_is_named_by_its_function_and_not_by_what_decorates_it():
    torchs, own = "x/torch/distributed/", str(Path(main_thread.__file__))
    paths = [f"{torchs}distributed_c10d.py", f"{torchs}distributed_c10d.py", f"{torchs}c10d_logger.py", own]
    names = ["_new_group_with_tag", "new_group", "wrapper", "update"]
    frames = [
        SimpleNamespace(f_code=SimpleNamespace(co_filename=path, co_name=name), f_lineno=1)
        for path, name in zip(paths, names, strict=True)
    ]
    assert main_thread._collective_of(frames) == "new_group"
    assert main_thread._collective_of(frames[3:]) == ""


def test_what_comes_between_stages_belongs_to_the_step_under_way():
    process = Activity()
    process.begin_step(3)
    with process.in_stage("update", 3):
        pass
    assert (process.stage, process.step, process.is_warm) == (BETWEEN, 3, False)
    process.begin_step(4)
    assert process.is_warm
    with process.in_stage("checkpoint", 4):
        pass
    assert (process.stage, process.step) == (BETWEEN, 4)


def test_a_batch_that_is_generated_ahead_changes_neither_the_step_under_way_nor_whether_it_is_the_first():
    process = Activity()
    with process.in_stage("evaluation", 3):
        pass
    process.begin_step(4)
    with process.in_stage("generation", 6):
        assert (process.step, process.is_warm) == (6, False)
    assert (process.stage, process.step) == (BETWEEN, 4)


class WatchThatGoesOn(Watch):
    """Notes the lines with which it would end the process."""

    lines: tuple[str, ...] = ()

    def _end(self, line, *, shows, has_store=True):
        self.lines += (line,)


class EndedStore(HashStore):
    """As a store looks whose host has ended."""

    def check(self, keys):
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("none", r"rank 0 hangs: no answer for \d+ s.*; last, rank 0 in update of step 3 \(at x.py:1\)"),
        ("new ones", None),
        ("gone", r"rank 0 has ended, and rank 1 hangs: no progress for \d+ s; rank 1 "),
        ("store ended", r"rank 0 has ended, and rank 1 hangs: no progress for \d+ s; rank 1 "),
    ],
)
def test_a_rank_decides_by_itself_where_rank_0_answers_no_longer_and_where_it_has_ended(lines, found, tmp_path):
    store, began = EndedStore() if lines == "store ended" else HashStore(), time.monotonic()
    watch = WatchThatGoesOn(WatchConfig(1, 2, 1.0, tmp_path), store)
    main = Line(1, state(0, idle=0.0), has_left=lines == "gone")
    store.set("line/0", main.to_json())
    with watch.running():
        while time.monotonic() < began + (30 if found else 4.5) and not watch.lines:
            time.sleep(0.01)
            if lines == "new ones":
                main = replace(main, number=main.number + 1)
                store.set("line/0", main.to_json())
    assert bool(watch.lines) == bool(found)
    if found:
        assert re.match(found, watch.lines[0]), watch.lines[0]


def test_a_rank_that_a_debugger_has_stopped_is_left_alone(tmp_path):
    watch = WatchThatGoesOn(WatchConfig(0, 1, 0.2, tmp_path), None)

    def stand_still(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not watch.lines:
            time.sleep(0.01)

    with watch.running():
        bdb.Bdb().runcall(stand_still, 1.5)
        assert not watch.lines
        # The same without a debugger, which has three times as long before the first step.
        stand_still(30.0)
    assert watch.lines[0].startswith("rank 0 hangs: no progress for")


def hang(how: str, stage: str, rank: int, run: Path) -> None:
    """Have this process stand still in a stage of its second step or, from outside, a later one, if it is that rank."""
    if int(os.environ.get("RANK", "0")) != rank:
        return
    if how == "sleep":
        activity.__class__ = Sleeping
        Sleeping.where = stage
        return

    def wait() -> None:
        # C's timer is set when the watchdog has looked for the first time, which may be some short steps later.
        while not (run / "failures" / f"rank_{rank:05d}.txt").exists():
            time.sleep(0.0005)
        time.sleep(2 * LIMIT / 20)
        while activity.stage != stage or activity.step < 2:
            time.sleep(0.0005)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        # Python's lock is held in C.
        ctypes.PyDLL(None).sleep(60)

    threading.Thread(target=wait, daemon=True).start()


class Sleeping(type(activity)):
    """Never gets further in its main thread than the beginning of a stage."""

    where = ""

    def _pass(self, name: str, step: int) -> None:
        super()._pass(name, step)
        if name == self.where and step == 2:
            time.sleep(60)


def hanging_run(folder: Path, *options: str, ranks: int, prepare=None) -> tuple[int, str, float]:
    """Exit code and stderr of a run that hangs, and how long it took from its last metrics to its end."""
    job = run_job(
        "train", tiny_config(folder), f"run.dir={folder / 'run'}", f"resources.stage_timeout_seconds={LIMIT}",
        "train.max_steps=1000", *options, ranks=ranks, prepare=prepare, timeout=100,
    )  # fmt: skip
    seconds = time.time() - (folder / "run" / "metrics.jsonl").stat().st_mtime
    return job.returncode, job.stderr, seconds


@pytest.mark.ranks
@pytest.mark.cpu_only(reason="a rank is stopped from outside")
@pytest.mark.parametrize(
    ("how", "stage", "rank", "ranks", "words"),
    [
        ("sleep", "update", 1, 2, r"rank 1 hangs: no progress for \d+ s; rank 1 in update of step 2"),
        pytest.param(
            "sleep",
            "generation",
            0,
            2,
            r"rank 0 hangs: no progress for \d+ s; rank 0 in generation of step 2",
            marks=pytest.mark.slow,
        ),
        ("sleep", "reward", 0, 1, r"rank 0 hangs: no progress for \d+ s; rank 0 in reward of step 2"),
        pytest.param(
            "stopped", "update", 1, 2, r"rank 1 hangs: no answer for \d+ s, so it is stopped", marks=pytest.mark.slow
        ),
        pytest.param(
            "stopped", "generation", 0, 2, r"rank 0 hangs: no answer for \d+ s.*; last, rank 0 ", marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_that_stands_still_is_named_and_the_job_ends(how, stage, rank, ranks, words, tmp_path):
    code, errors, seconds = hanging_run(
        tmp_path, ranks=ranks, prepare=partial(hang, how, stage, rank, tmp_path / "run")
    )
    # A stopped process ends at SIGKILL alone, and it or the rank that named it is the first that the launcher sees.
    assert code == HUNG or how == "stopped" and code == -signal.SIGKILL, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("spmdrl:")]
    assert re.search(words, line), line
    assert seconds < MOST_SECONDS
    able = [other for other in range(ranks) if how == "sleep" or other != rank]
    for other in able:
        stacks = (tmp_path / "run" / "failures" / f"rank_{other:05d}.txt").read_text()
        assert "Thread 0x" in stacks and "most recent call first" in stacks
    if rank != 0 or how == "sleep":
        assert summary_of(tmp_path / "run")["verdict"] == "failed"
        assert f"rank {rank} hangs" in summary_of(tmp_path / "run")["error"]


@pytest.mark.cpu_only(reason="holds Python's lock")
def test_a_rank_that_holds_pythons_lock_leaves_its_stacks(tmp_path):
    prepare = partial(hang, "lock", "update", 0, tmp_path / "run")
    code, _, seconds = hanging_run(tmp_path, ranks=1, prepare=prepare)
    assert code not in (0, None)
    assert seconds < MOST_SECONDS
    assert "Thread 0x" in (tmp_path / "run" / "failures" / "rank_00000.txt").read_text()


SLOW = """
import time
def share_of_digits(completions, **columns):
    time.sleep(SECONDS)
    return [sum(letter.isdigit() for letter in text) / 8 for text in completions]
"""


@pytest.mark.slow
def test_a_reward_that_takes_too_long_is_named_with_its_prompts(tmp_path):
    config = tiny_config(tmp_path)
    (tmp_path / "reward.py").write_text(SLOW.replace("SECONDS", "100"))
    job = run_job(
        # In a first step, stages may take three times the limit.
        "train", config, f"run.dir={tmp_path / 'run'}", f"resources.stage_timeout_seconds={LIMIT / 2}",
        "reward.timeout_seconds=100", timeout=100,
    )  # fmt: skip
    assert job.returncode == HUNG, job.stderr
    assert re.search(r"rank 0 hangs: .* in reward of step 1 .*waits for \d+ reward calls: \(0, \d\), ", job.stderr)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_healthy_run_whose_stages_take_about_the_limit_is_left_alone(tmp_path):
    config = tiny_config(tmp_path)
    # The rewards of a step take longer than the limit, each of them less.
    (tmp_path / "reward.py").write_text(SLOW.replace("SECONDS", "0.28"))
    options = ("reward.call_level=group", "rollout.prompts_per_step=32", "train.max_steps=2")
    run = run_job(
        "train", config, f"run.dir={tmp_path / 'run'}", f"resources.stage_timeout_seconds={LIMIT}", *options, ranks=2
    )
    finished(run)
    assert metrics_of(tmp_path / "run")[-1]["time/step"] > LIMIT
    assert not (tmp_path / "run" / "failures").exists()


def die_at_a_group(rank: int, number: int) -> None:
    """Have this process, if it is that rank, be killed where it is to make its so-many-th group."""
    make, left = distributed_c10d._new_group_with_tag, iter(range(number))

    def made(*arguments, **named):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return make(*arguments, **named)

    if os.environ["RANK"] == str(rank):
        distributed_c10d._new_group_with_tag = made


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.cpu_only(reason="groups of gloo")
def test_a_rank_that_is_killed_where_others_connect_to_it_is_named_long_before_the_limit(tmp_path):
    jobs = []
    # At once, as both wait for most of their time. No launcher ends the other ranks.
    for number in (0, 1):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        made = FaultJobs(folder, 3, "resources.ranks.generation=1", "train.max_steps=1")
        jobs.append(made.start("run", prepare=partial(die_at_a_group, 1, number)))
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(RunningJob.end, jobs))
    for end in ends:
        assert end.codes == [1, -signal.SIGKILL, 1] and end.survivor_seconds < 30
        line = r"spmdrl: rank 1: process \d+ ended without a message, like a killed one"
        assert re.search(line, end.screen), end.screen


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.cpu_only(reason="asynchronous checkpoints of four ranks")
def test_a_start_that_goes_on_from_a_checkpoint_and_stands_still_is_named_and_ends(tmp_path, monkeypatch):
    asynchronous = (f"run.dir={tmp_path / 'run'}", "checkpoint.asynchronous=true", "checkpoint.interval=1")
    finished(run_job("train", tiny_config(tmp_path), *asynchronous, "train.max_steps=1", ranks=4))
    monkeypatch.setenv("SPMDRL_FAULT", "load:2:0:hang")
    job = run_job(
        "train", tiny_config(tmp_path), *asynchronous, "train.max_steps=2",
        f"resources.stage_timeout_seconds={LIMIT / 2}", ranks=4, timeout=90,
    )  # fmt: skip
    assert job.returncode == HUNG, job.stderr
    assert re.search(r"spmdrl: rank 2 hangs: no progress for \d+ s; rank 2 in start-up \(at ", job.stderr), job.stderr
    for rank in range(4):
        assert "most recent call first" in (tmp_path / "run" / "failures" / f"rank_{rank:05d}.txt").read_text()
