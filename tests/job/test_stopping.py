"""Runs that are asked to stop save, leave with 75, and go on as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from tests.bench.faults.planned_faults import MODULE
from tests.support.jobs import (
    ROOT,
    environment,
    finished,
    metrics_of,
    run_job,
    summary_of,
    tiny_config,
    torchrun_script,
    untimed,
    weights_digest,
)
from tests.support.ranks import HOST, end, fork, rank_environment
from torch.distributed import TCPStore

from spmdrl.cli.failure_page import end_with
from spmdrl.job.start.watching import deadline_of, with_end_of_job
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig
from spmdrl.resources import world as world_module
from spmdrl.resources.startup.rendezvous import Network
from spmdrl.resources.world import open_world
from spmdrl.runtime.launch import read_launch_environment
from spmdrl.runtime.supervision.stop_request import STOPPED, Stopped, request
from spmdrl.runtime.supervision.watch import Watch, WatchConfig
from spmdrl.runtime.workers.descent import ProcessTree

# Signals its rank once, while it scores the prompts of a certain call or those that are held out.
REWARD = """
import os, signal, time
from pathlib import Path

FOLDER = Path(__file__).parent

def rank_of(pid):
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return rank_of(parent) if b"runtime.workers" in command else pid

def share_of_digits(prompts, completions, **columns):
    stop = FOLDER / "stop"
    is_due = stop.exists() and stop.read_text() in (os.environ.get("RANK", "0"), "any")
    if is_due and len(list(FOLDER.glob("run/metrics.jsonl"))) and lines() >= 2 and WHEN(prompts):
        stop.unlink()
        os.kill(rank_of(os.getpid()), signal.SIGTERM)
        time.sleep(SECONDS)
    return [sum(letter.isdigit() for letter in text) / 8 for text in completions]

def lines():
    return len((FOLDER / "run" / "metrics.jsonl").read_text().splitlines())
"""
STEPS = 4


def stopping_config(folder: Path, *, when: str = "True", seconds: float = 0.0) -> Path:
    config = tiny_config(folder)
    (folder / "reward.py").write_text(REWARD.replace("WHEN(prompts)", when).replace("SECONDS", str(seconds)))
    return config


def settled(metrics: list[dict]) -> list[dict]:
    """Without what a clock measured, and without the bytes of news, which hold where rows lie in a rank's file."""
    return [{key: value for key, value in step.items() if key != "dock/metadata_bytes"} for step in untimed(metrics)]


def stopped_and_finished(folder: Path, config: Path, *options: str, ranks: int, asked: str) -> list[str]:
    """Stderr of a run that is asked to stop in its third step; what it comes to is that of one which isn't."""
    options = (f"train.max_steps={STEPS}", *options)
    finished(run_job("train", config, f"run.dir={folder / 'whole'}", *options, ranks=ranks))
    (folder / "stop").write_text(asked)
    started = time.monotonic()
    stopped = run_job("train", config, f"run.dir={folder / 'run'}", *options, ranks=ranks)
    # Less than what slow rewards and environments take.
    assert time.monotonic() - started < 80
    assert stopped.returncode == STOPPED, stopped.stderr
    assert summary_of(folder / "run")["verdict"] == "stopped"
    (step,) = [int(path.name[5:]) for path in (folder / "run" / "checkpoints").glob("step_*")]
    finished(run_job("train", config, f"run.dir={folder / 'run'}", *options, ranks=ranks))
    assert weights_digest(folder / "run", STEPS) == weights_digest(folder / "whole", STEPS)
    assert settled(metrics_of(folder / "run")) == settled(metrics_of(folder / "whole"))
    return [f"{step}", *(line for line in stopped.stderr.splitlines() if line.startswith("spmdrl:"))]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_stopped_in_a_step_does_it_again_to_the_bit(ranks, tmp_path):
    config = stopping_config(tmp_path)
    step, line = stopped_and_finished(tmp_path, config, "reward.isolation=inline", ranks=ranks, asked=str(ranks - 1))
    assert step == "2"
    assert line.startswith("spmdrl: stopped by SIGTERM")
    assert line.endswith(f"in step 3 of 4; the same command goes on from {tmp_path}/run/checkpoints/step_000002")


def test_slow_rewards_are_not_waited_for_and_pending_groups_begin_again(tmp_path):
    config = stopping_config(tmp_path, seconds=100.0)
    partial_rollout = ("rollout.partial_max_rounds=3", "rollout.partial_extra_prompts=4", "reward.timeout_seconds=200")
    step, _ = stopped_and_finished(tmp_path, config, *partial_rollout, ranks=1, asked="any")
    assert step == "2"


def test_a_run_stopped_in_an_evaluation_evaluates_when_it_goes_on(tmp_path):
    config = stopping_config(tmp_path, when="any(len(prompt) > 4 for prompt in prompts)")
    held_out = ("data.eval=synthetic://addition?low=10&high=19&count=8", "eval.interval=1", "reward.isolation=inline")
    step, _ = stopped_and_finished(tmp_path, config, *held_out, ranks=1, asked="0")
    assert step == "3"


# Answers late, and once signals its rank in its third step and never answers.
ENVIRONMENT = """
import os, random, signal, time
from pathlib import Path
from spmdrl.engines.environment.episode import End, Episode, Observation

FOLDER = Path(__file__).parent

def rank_of(pid):
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return rank_of(parent) if b"runtime.workers" in command else pid

class Slow:
    def step(self, episode: Episode):
        time.sleep(random.random() * 0.02)
        metrics = FOLDER / "run" / "metrics.jsonl"
        if (FOLDER / "stop").exists() and metrics.exists() and len(metrics.read_text().splitlines()) >= 2:
            if random.random() < 0.2:
                (FOLDER / "stop").unlink(missing_ok=True)
                os.kill(rank_of(os.getpid()), signal.SIGTERM)
                time.sleep(100)
        return End() if len(episode.turns) == 2 else Observation(str(episode.seed % 100))
"""
TURNS = (
    "model.make.max_position_embeddings=64",
    "rollout.max_completion_length=40", "rollout.stop=[=, +]", "algo.kl_coef=0.1",
    "environment.timeout_seconds=200",
)  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        [],
        [
            "resources.generation.tensor=2",
            "rollout.partial_max_rounds=3", "rollout.partial_extra_prompts=8", "algo.rollout_is=tis",
        ],
    ],
    ids=["replicas", "tensor parallel, over several steps"],
)  # fmt: skip
def test_turns_under_way_are_given_up_where_ranks_score_portions_meanwhile(more, tmp_path):
    config = tiny_config(tmp_path)
    (tmp_path / "slow.py").write_text(ENVIRONMENT)
    options = (*TURNS, f"environment.function={tmp_path / 'slow.py'}:Slow", *more)
    step, _ = stopped_and_finished(tmp_path, config, *options, ranks=2, asked="any")
    assert step == "2"


def ask_after_steps(path: Path, number: int) -> None:
    """Send one rank SIGUSR1 once so many steps are logged."""
    if os.environ.get("RANK", "1") == "1":
        _signal_after_steps(path, number, signal.SIGUSR1)


def die_after_steps(path: Path, number: int) -> None:
    """Kill each rank once so many steps are logged."""
    _signal_after_steps(path, number, signal.SIGKILL)


def _signal_after_steps(path: Path, number: int, sent: signal.Signals) -> None:
    def watch() -> None:
        while not path.exists() or len(path.read_text().splitlines()) < number:
            time.sleep(0.005)
        os.kill(os.getpid(), sent)

    threading.Thread(target=watch, daemon=True).start()


PAIRS = ("data.train=synthetic://addition?low=0&high=9&count=40&max_error=5",)
SUPERVISED = {
    "sft": ("sft.max_steps=40",),
    "preferences": (*PAIRS, "preferences={max_steps: 40, rows_per_step: 7, optim: {lr: 1.0e-3}}"),
    "reward-model": (*PAIRS, "reward_model={max_steps: 40, rows_per_step: 7, optim: {lr: 1.0e-3}}"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("verb", ["sft", *(pytest.param(verb, marks=pytest.mark.slow) for verb in [*SUPERVISED][1:])])
def test_supervised_steps_stop_where_all_ranks_agree(verb, tmp_path):
    config, options = tiny_config(tmp_path), SUPERVISED[verb]
    finished(run_job(verb, config, f"run.dir={tmp_path / 'whole'}", *options, ranks=2))
    ask = partial(ask_after_steps, tmp_path / "run" / "metrics.jsonl", 3)
    stopped = run_job(verb, config, f"run.dir={tmp_path / 'run'}", *options, ranks=2, prepare=ask)
    assert stopped.returncode == STOPPED, stopped.stderr
    num_done = len(metrics_of(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / f"step_{num_done:06d}").is_dir()
    assert 3 <= num_done < 40
    finished(run_job(verb, config, f"run.dir={tmp_path / 'run'}", *options, ranks=2))
    assert weights_digest(tmp_path / "run", 40) == weights_digest(tmp_path / "whole", 40)
    assert untimed(metrics_of(tmp_path / "run")) == untimed(metrics_of(tmp_path / "whole"))


def test_a_run_leaves_at_its_time_limit(tmp_path):
    limited = run_job(
        "sft",
        tiny_config(tmp_path),
        f"run.dir={tmp_path / 'run'}",
        "sft.max_steps=100000",
        "checkpoint.save_by=0:00:02",
    )
    assert limited.returncode == STOPPED, limited.stderr
    assert "stopped by checkpoint.save_by in step" in limited.stderr


def reach_slurms_end() -> None:
    os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()))


def test_slurms_end_stops_what_saves_and_nothing_else(tmp_path):
    config, held_out = tiny_config(tmp_path), "data.eval=synthetic://addition?low=0&high=9&count=4"
    options = (f"run.dir={tmp_path / 'run'}", held_out)
    assert run_job("sft", config, *options, "sft.max_steps=9", prepare=reach_slurms_end).returncode == STOPPED
    finished(run_job("eval", config, *options, prepare=reach_slurms_end))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.cpu_only(reason="torchrun starts ranks of its own")
def test_the_script_ends_with_the_code_of_ranks_of_which_one_is_asked(tmp_path):
    # tests/job/test_sockets.py asks the script itself.
    folder, config = tmp_path / "run", tiny_config(tmp_path)
    command = [*torchrun_script(tmp_path), "sft", str(config), f"run.dir={folder}", "sft.max_steps=100000"]
    own = environment(PYTHON=sys.executable, RANKS_PER_NODE="2")
    job = subprocess.Popen(command, env=own, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
        while not metrics.exists() or not metrics.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks = [one.pid for one in ProcessTree(job.pid).members() if is_rank(one.pid)]
        os.kill(ranks[1], signal.SIGUSR1)
        _, errors = job.communicate(timeout=60)
    finally:
        job.terminate()
    assert job.returncode == STOPPED, errors
    assert errors.splitlines()[-1].startswith("spmdrl: stopped by SIG"), errors
    assert len(list((folder / "checkpoints").iterdir())) == 1


def is_rank(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"spmdrl" in command and b"torch.distributed.run" not in command


TWICE = """
import os, signal, sys, time
from spmdrl.runtime.supervision.stop_request import request
with request.handling_signals(0):
    request.phase = "running"
    for seconds in (0.0, float(sys.argv[1])):
        time.sleep(seconds)
        os.kill(os.getpid(), int(sys.argv[2]))
    print(request.reason)
"""


def twice(seconds: float, number: int, *, is_ignored: bool = False) -> tuple[int, str]:
    """The exit code and output of a process that sends itself a signal two times."""

    def prepare() -> None:
        # A test that a shell runs in the background has Ctrl-C ignored, and behind nohup SIGHUP.
        signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)

    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(seconds), str(int(number))], env=environment(), capture_output=True,
        text=True, preexec_fn=prepare,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C"), (signal.SIGHUP, "SIGHUP")]
)
def test_the_same_signal_again_ends_at_once_unless_it_was_forwarded(number, reason):
    assert twice(0.0, number) == (0, f"{reason}\n")
    assert twice(1.1, number) == (-number, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_the_shell_has_ignored_asks_for_nothing(number):
    assert twice(1.1, number, is_ignored=True) == (0, "None\n")


WAITING = """
import sys
from datetime import timedelta
import torch.distributed as dist
from spmdrl.runtime.supervision import stop_request
from spmdrl.runtime.supervision.stop_request import request
stop_request._LEAVING_SECONDS = 0.5
with request.handling_signals(0):
    request.begin_set_up()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    print("waits", flush=True)
    store.wait(["what never comes"], timedelta(seconds=60))
"""


def test_a_rank_that_waits_outside_of_python_while_it_is_set_up_leaves_in_time():
    job = subprocess.Popen(
        [sys.executable, "-c", WAITING], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert job.stdout.readline() == "waits\n"
        time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=20)
    finally:
        job.kill()
    assert job.returncode == STOPPED, errors
    assert "stopped by SIGTERM before it began" in errors


def be_asked_while_connecting() -> None:
    """Ask this process once it looks for listening sockets before it connects to the other ranks."""

    def ask(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal is_asked
        frame = sys._getframe() if event == "os.listdir" and not is_asked else None
        while frame is not None and frame.f_code.co_name != "closing_new_listeners":
            frame = frame.f_back
        if frame is not None:
            is_asked = True
            os.kill(os.getpid(), signal.SIGTERM)

    is_asked = False
    sys.addaudithook(ask)


def set_up(own: dict[str, str], folder: Path, place: str, *, is_stopped: bool) -> None:
    """Be a rank of two that are set up. The first is asked to stop, and the other waits in C++ for what never comes."""
    os.environ.update(own)
    launch = read_launch_environment(os.environ)
    with request.handling_signals(launch.rank):
        request.begin_set_up()
        # Where the other one has left, or waits for what never comes.
        world_module._STOP_LINGER_SECONDS = 3.0
        if place == "connecting" and launch.rank == 0:
            be_asked_while_connecting()
        try:
            with open_world("cpu", network=Network(folder)) as world:
                watched = world.beside
                with Watch(WatchConfig(world.rank, world.size), watched).running():
                    if launch.rank == 0:
                        time.sleep(1.0)
                        os.kill(os.getpid(), signal.SIGTERM if is_stopped else signal.SIGKILL)
                    world.store.wait(["what never comes"], timedelta(seconds=60))
        except Stopped:
            raise SystemExit(STOPPED) from None
        except Exception as failure:
            raise SystemExit(end_with(failure, folder, launch)) from None


def codes_of_two_set_up(folder: Path, place: str, *, is_stopped: bool) -> list[int | None]:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    set_up_so = partial(set_up, folder=folder, place=place, is_stopped=is_stopped)
    ranks = [fork(set_up_so, environment(**rank_environment(rank, 2, 2, store.port))) for rank in range(2)]
    try:
        for rank in ranks:
            rank.join(40)
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            end(rank, 0.0)


@pytest.mark.ranks
@pytest.mark.parametrize("place", ["connecting", pytest.param("connected", marks=pytest.mark.slow)])
def test_a_rank_that_waits_outside_of_python_leaves_with_the_one_that_was_asked(place, tmp_path):
    assert codes_of_two_set_up(tmp_path, place, is_stopped=True) == [STOPPED, STOPPED]


@pytest.mark.ranks
def test_a_rank_whose_store_was_lost_without_a_request_has_not_been_stopped(tmp_path):
    assert codes_of_two_set_up(tmp_path, "connected", is_stopped=False) == [-signal.SIGKILL, 1]


def set_up_beside_a_death(own: dict[str, str], folder: Path) -> None:
    """Be a rank of two that are set up, of which the last one ends without a message."""
    os.environ.update(own)
    launch = read_launch_environment(os.environ)
    with request.handling_signals(launch.rank):
        request.begin_set_up()
        try:
            with open_world("cpu", network=Network(folder)):
                if launch.rank == 1:
                    os._exit(3)
                time.sleep(60)
        except Stopped as stopped:
            raise SystemExit(stopped.code) from None
        except Exception as failure:
            (folder / "found").write_text(str(failure))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            raise SystemExit(end_with(failure, folder, launch)) from None


@pytest.mark.ranks
def test_a_launchers_signal_after_a_death_in_the_start_up_is_no_request(tmp_path):
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    be_rank = partial(set_up_beside_a_death, folder=tmp_path)
    ranks = [fork(be_rank, environment(**rank_environment(rank, 2, 2, store.port))) for rank in range(2)]
    try:
        ranks[1].join(40)
        ranks[0].terminate()
        ranks[0].join(20)
        assert [rank.exitcode for rank in ranks] == [-signal.SIGTERM, 3]
        found = f"rank 1 failed: process {ranks[1].pid} ended without a message"
        assert (tmp_path / "found").read_text().startswith(found)
    finally:
        for rank in ranks:
            end(rank, 0.0)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.cpu_only(reason="torchrun starts ranks of its own")
@pytest.mark.parametrize(("kind", "restarts", "code"), [("sigkill", 1, 0), ("exit", 0, 1)])
def test_a_rank_that_dies_in_the_start_up_is_restarted_or_named(kind, restarts, code, tmp_path):
    program = [f"--max-restarts={restarts}", "-m", MODULE]
    words = ["sft", str(tiny_config(tmp_path)), f"run.dir={tmp_path / 'run'}", "sft.max_steps=1"]
    own = environment(SPMDRL_FAULT=f"load:1:0:{kind}", PYTHON=sys.executable, RANKS_PER_NODE="2")
    command = [*torchrun_script(tmp_path, *program), *words]
    job = subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert job.returncode == code, job.stderr
    assert "stopped by" not in job.stderr
    named = re.match(r"spmdrl: rank 1: process \d+ ended without a message", job.stderr.splitlines()[-1])
    assert restarts or named, job.stderr


FORKED = """
import os, signal, time
from spmdrl.runtime.supervision import stop_request
from spmdrl.runtime.supervision.stop_request import request
stop_request._LEAVING_SECONDS = 0.2
with request.handling_signals(0):
    request.begin_set_up()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    time.sleep(1)
"""


def test_the_end_of_a_forked_process_is_not_this_ones():
    done = subprocess.run([sys.executable, "-c", FORKED], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "seconds"), [("0:00:02", 2), ("11:50:00", 42600), ("1-00:00:00", 86400), (None, None)]
)
def test_wall_times_are_read_as_slurm_writes_them(text, seconds):
    assert CheckpointConfig(save_by=text).save_by_seconds == seconds


def test_a_wall_time_of_another_form_is_refused():
    with pytest.raises(ValueError, match="save_by is '90', but must be HH:MM:SS"):
        CheckpointConfig(save_by="90")


@pytest.mark.parametrize(("length", "margin"), [(7200, 120), (600, 60)])
def test_slurms_end_is_a_deadline_with_a_margin(length, margin):
    now = int(time.time())
    slurm = {"SLURM_JOB_START_TIME": str(now), "SLURM_JOB_END_TIME": str(now + length)}
    deadline = deadline_of(None, slurm)
    assert deadline is not None
    assert deadline.time == now + length - margin
    assert deadline_of(None, {}) is None


@pytest.mark.parametrize(
    ("printed", "end"), [("2026-03-01T12:00:30", datetime(2026, 3, 1, 12, 0, 30).timestamp()), ("N/A", None)]
)
def test_the_end_of_a_job_comes_from_squeue_where_slurm_is_too_old_to_export_it(printed, end, tmp_path):
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$*" = "--noheader --jobs=17 --format=%e" ] && echo "{printed}"\n')
    squeue.chmod(0o755)
    environ = {"PATH": str(tmp_path), "SLURM_JOB_ID": "17"}
    assert with_end_of_job(environ).get("SLURM_JOB_END_TIME") == (end and f"{end:.0f}")
    known = environ | {"SLURM_JOB_END_TIME": "5"}
    assert with_end_of_job(known) == known and with_end_of_job({"PATH": str(tmp_path)}) == {"PATH": str(tmp_path)}
