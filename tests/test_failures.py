"""What is on the screen when a job ends early, and what is left of it: one cause, and nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.bench.faults.fault_jobs import FaultJobs
from tests.support.jobs import ROOT, environment, summary_of, tiny_config, torchrun_script

NUM_KILLS = int(os.environ.get("SPMDRL_KILLS", "1"))
ENDLESS = ["train.max_steps=100000", "checkpoint.interval=50"]
SCRIPT, PLAIN = "launch/torchrun.sh", "torch.distributed.run"

# Ctrl-C while a finalizer runs: Python prints that it ignores the exception, and goes on.
SWALLOWS = """
import os, signal

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100_000):
            pass

def fn(completions, **columns):
    Finalized()
    return [0.0] * len(completions)
"""

FAILS = """
import os, sys
from spmdrl.dataflow.samples import samples
from spmdrl.cli.command_line import main

def fail(*arguments, calls=[]):
    calls.append(1)
    if len(calls) == 2 and os.environ.get("RANK", "1") == "1":
        raise RuntimeError("the cause\\nand more of it")
    return prompt_columns(*arguments)

prompt_columns, samples.prompt_columns = samples.prompt_columns, fail
raise SystemExit(main())
"""


@dataclass
class Job:
    """A job that runs, with a directory of its own for temporary files."""

    process: subprocess.Popen[str]
    screen: Path
    errors: Path
    tmp: Path
    mark: str
    """a word of its environment, and so of all that it starts"""

    def shown(self) -> list[str]:
        """The lines of its stderr."""
        return [line for line in self.errors.read_text().splitlines() if line.strip()]

    def wait_for(self, condition: Callable[[], object], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            shown = self.screen.read_text()[-1500:] + self.errors.read_text()[-1500:]
            assert self.process.poll() is None and time.monotonic() < deadline, shown
            time.sleep(0.02)

    def has_stepped(self, step: int = 1) -> bool:
        return f"step {step}/" in self.screen.read_text()

    def launcher(self) -> int:
        """The process of torchrun, which may be a child of its script's."""
        if "bash" not in self.process.args:
            return self.process.pid
        of_script = [(child, read(f"/proc/{child}/cmdline")) for child in children(self.process.pid)]
        return next((child for child, command in of_script if PLAIN.encode() in command), 0)

    def ranks(self) -> list[int]:
        return children(self.launcher())

    def processes(self) -> list[int]:
        """All processes that the job started, theirs too, wherever they have gone."""
        return [pid for pid in pids() if self.mark.encode() in read(f"/proc/{pid}/environ")]


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    return [int(child) for child in read(f"/proc/{pid}/task/{pid}/children").split()]


def parent(pid: int) -> int:
    return int(read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])


def heed_interrupts() -> None:
    # Ignored in what a shell starts in the background, and so in all that these tests start.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(tmp_path: Path, program: Sequence[str], *arguments: str, launcher: str | None = SCRIPT) -> Iterator[Job]:
    """A job of two ranks under a launcher, or of one process without one."""
    python = [sys.executable, "-m", PLAIN, "--standalone", "--nproc-per-node=2"] if launcher else [sys.executable]
    launch = [*python, *program]
    if launcher == SCRIPT:
        launch = torchrun_script(tmp_path, *program)
    folder = tmp_path / f"tmp{time.monotonic_ns()}"
    folder.mkdir()
    job_mark = f"SPMDRL_TEST_JOB={folder}"
    name, _, value = job_mark.partition("=")
    own = environment(TMPDIR=str(folder), PYTHON=sys.executable, RANKS_PER_NODE="2", **{name: value})
    command = [*launch, "train", *arguments, f"run.dir={tmp_path / 'run'}"]
    screen, errors = folder.with_suffix(".stdout"), folder.with_suffix(".stderr")
    with open(screen, "w") as out, open(errors, "w") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, text=True, cwd=ROOT, env=own, preexec_fn=heed_interrupts
        )
    job = Job(process, screen, errors, folder, job_mark)
    try:
        yield job
    finally:
        process.kill()
        process.wait()
        for pid in job.processes():
            os.kill(pid, signal.SIGKILL)


MODULE = ["-m", "spmdrl"]


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", [PLAIN, pytest.param(SCRIPT, marks=pytest.mark.slow)])
def test_a_rank_that_fails_is_the_one_cause_on_the_screen(tmp_path, launcher):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    with started(tmp_path, [str(script)], str(tiny_config(tmp_path)), launcher=launcher) as job:
        assert job.process.wait(90) == 1
    shown = [line for line in job.shown() if "*" not in line and "OMP_NUM_THREADS" not in line]
    cause = r"spmdrl: rank 1: RuntimeError: the cause \(at spmdrl/dataflow/samples/samples\.py:\d+\)"
    assert re.match(f"{cause}; the traceback is", shown[0])
    assert sum("closed by peer" in line for line in shown) == 0
    # torchrun's own page follows; its last entry is the same cause, and so is the script's last line.
    assert re.search(f"traceback : {cause}", shown[-3 if launcher == SCRIPT else -2]), shown
    assert re.fullmatch(cause, shown[-1]) or launcher == PLAIN
    assert "the cause" in (tmp_path / "run" / "failures" / "rank_00001.txt").read_text()
    assert summary_of(tmp_path / "run")["error"] == "rank 1: RuntimeError: the cause"


@pytest.mark.ranks
@pytest.mark.slow
def test_another_nodes_launcher_shows_the_same_cause_once(tmp_path):
    script, config = tmp_path / "fails.py", str(tiny_config(tmp_path))
    script.write_text(FAILS)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1"]
    # Where ranks fail, torchrun leaves its folder behind.
    launcher = [sys.executable, "-m", PLAIN, *meeting, f"--log-dir={tmp_path / 'logs'}"]
    command = [*launcher, str(script), "train", config, f"run.dir={tmp_path / 'run'}"]
    screens = [tmp_path / f"node{node}" for node in range(2)]
    nodes = []
    for screen in screens:
        with screen.open("w") as out:
            nodes.append(subprocess.Popen(command, stderr=out, cwd=ROOT, env=environment(GLOO_SOCKET_IFNAME="lo")))
    try:
        assert [node.wait(120) for node in nodes] == [1, 1]
    finally:
        for node in nodes:
            node.kill()
    for screen in screens:
        lines = [line for line in screen.read_text().splitlines() if line.startswith("spmdrl:")]
        assert len(lines) == 1 and lines[0].startswith("spmdrl: rank 1: RuntimeError: the cause"), lines


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", [None, pytest.param(SCRIPT, marks=pytest.mark.slow)])
def test_ctrl_c_is_one_line_that_says_where_the_run_goes_on(tmp_path, launcher):
    with started(tmp_path, MODULE, str(tiny_config(tmp_path)), *ENDLESS, launcher=launcher) as job:
        job.wait_for(job.has_stepped)
        os.kill(job.process.pid, signal.SIGINT)
        assert job.process.wait(30) == 130
    line = job.shown()[-1]
    assert sum(shown == line for shown in job.shown()) == (2 if launcher else 1), job.shown()
    # Saved, whatever checkpoint.interval is.
    assert re.match(r"spmdrl: interrupted in step \d+ of 100000; the same command goes on from .*/step_\d+", line), line
    assert summary_of(tmp_path / "run")["verdict"] == "interrupted"


@pytest.mark.slow
def test_ctrl_c_that_a_callback_swallows_ends_the_run_in_its_step(tmp_path):
    config = tiny_config(tmp_path)
    reward = tmp_path / "swallows.py"
    reward.write_text(SWALLOWS)
    with started(tmp_path, MODULE, str(config), *ENDLESS, f"reward.functions=[{reward}:fn]", "reward.isolation=inline",
                 launcher=None) as job:  # fmt: skip
        assert job.process.wait(90) == 130
    assert re.match(r"spmdrl: interrupted in step 1 of 100000", job.shown()[-1]), job.shown()


@pytest.mark.slow
def test_ctrl_c_at_any_moment_of_the_start_is_one_line(tmp_path):
    """Also while modules are imported: some go on half done where an interrupt cuts their own imports short."""
    config = tiny_config(tmp_path)
    for milliseconds in range(100, 3700, 1200):
        with started(tmp_path, MODULE, str(config), *ENDLESS, "resume=never", launcher=None) as job:
            time.sleep(milliseconds / 1000)
            os.kill(job.process.pid, signal.SIGINT)
            job.process.wait(30)
        said = job.shown()
        # In the first moments, and after its last line, Python itself answers.
        assert job.process.returncode in (130, -signal.SIGINT), (milliseconds, said)
        if job.process.returncode == 130:
            assert len(said) == 1 and said[0].startswith("spmdrl: interrupted"), (milliseconds, said)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_in_one_line(tmp_path):
    with started(tmp_path, MODULE, str(tiny_config(tmp_path)), *ENDLESS) as job:
        job.wait_for(job.has_stepped)
        rank = job.ranks()[0]
        os.kill(rank, signal.SIGKILL)
        assert job.process.wait(30) == 1
    line = f"spmdrl: rank 0: process {rank} ended without a message, like a killed one"
    assert job.shown()[-1] == line and {shown for shown in job.shown() if shown.startswith("spmdrl:")} == {line}
    assert summary_of(tmp_path / "run")["error"] == line.removeprefix("spmdrl: ")


@pytest.mark.ranks
@pytest.mark.slow
def test_another_rank_that_is_killed_is_named_in_one_line_of_the_first(tmp_path):
    # No launcher ends the first rank.
    job = FaultJobs(tmp_path, 2, "train.max_steps=100000").run("run", fault="backward:1:2:sigkill")
    assert job.codes == [1, -signal.SIGKILL], job.screen
    pattern = r"spmdrl: rank 1: process \d+ ended without a message, like a killed one"
    (line,) = [line for line in job.screen.splitlines() if re.fullmatch(pattern, line)]
    assert job.screen.rstrip().endswith(line)
    assert summary_of(tmp_path / "run")["error"] == line.removeprefix("spmdrl: ")


@pytest.mark.ranks
@pytest.mark.slow
def test_a_stopped_rank_is_killed_once_it_has_been_named(tmp_path):
    limit = "resources.stage_timeout_seconds=4"
    with started(tmp_path, MODULE, str(tiny_config(tmp_path)), *ENDLESS, limit) as job:
        # In a first step, stages may take three times the limit.
        job.wait_for(partial(job.has_stepped, 2))
        os.kill(job.ranks()[1], signal.SIGSTOP)
        job.wait_for(lambda: any(line.startswith("spmdrl:") for line in job.shown()))
        named = time.monotonic()
        job.wait_for(lambda: not job.launcher())
        # torchrun's own SIGTERM would wait for half a minute.
        assert time.monotonic() - named < 10
        assert job.process.wait(10) == 124
    line = job.shown()[-1]
    assert line.startswith("spmdrl: rank 1 hangs: no answer for"), line


@pytest.mark.ranks
@pytest.mark.slow
def test_a_second_signal_ends_a_job_with_a_stopped_rank_at_once(tmp_path):
    with started(tmp_path, MODULE, str(tiny_config(tmp_path)), *ENDLESS) as job:
        job.wait_for(job.has_stepped)
        os.kill(job.ranks()[1], signal.SIGSTOP)
        job.process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(10) == 143
        assert_nothing_is_left(job)
    assert "[torchrun] asked to stop for the second time; the ranks are killed" in job.shown()


def test_a_crash_in_c_shows_where_python_was(tmp_path):
    (tmp_path / "crashing.py").write_text("import ctypes\n\nctypes.string_at(0)\n")
    command = [sys.executable, *MODULE, "check", tiny_config(tmp_path), "reward.isolation=inline"]
    command.append(f"reward.functions=[{tmp_path}/crashing.py:fn]")
    job = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert job.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in job.stderr and 'crashing.py", line 3' in job.stderr


# A reward function with a child of its own, which outlives the call where nobody ends it.
FAMILY = """
import subprocess
child = None
def share_of_digits(completions, **columns):
    global child
    child = child or subprocess.Popen(["sleep", "1000"])
    return [sum(letter.isdigit() for letter in text) / 8 for text in completions]
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_nothing_is_left_after_kills_at_random_moments(tmp_path):
    config = tiny_config(tmp_path)
    (tmp_path / "reward.py").write_text(FAMILY)
    for number in range(NUM_KILLS):
        kill_at_random(number, tmp_path, config)


def kill_at_random(number: int, tmp_path: Path, config: Path) -> None:
    draw = random.Random(number)
    launcher = draw.choice([SCRIPT, PLAIN])
    with started(tmp_path, MODULE, str(config), *ENDLESS, "resume=never", launcher=launcher) as job:
        # At any moment: of the start, with ranks or none, or of the steps.
        if draw.random() < 0.3:
            time.sleep(draw.uniform(0.0, 6.0))
        else:
            job.wait_for(job.has_stepped)
            time.sleep(draw.uniform(0.0, 1.5))
        kind, victim = draw.choice(victims(job))
        sent = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        print(f"kill {number}: {sent.name} to {kind} under {launcher}", flush=True)
        signalled = time.monotonic()
        os.kill(victim, sent)
        if kind.startswith("reward"):
            # The run may go on with another worker.
            time.sleep(0.5)
            os.kill(job.launcher() or job.process.pid, signal.SIGKILL)
        job.process.wait(60)
        assert_nothing_is_left(job)
        print(f"  gone after {time.monotonic() - signalled:.1f} s", flush=True)


def victims(job: Job) -> list[tuple[str, int]]:
    found = [("the launcher", job.launcher() or job.process.pid)]
    for rank in job.ranks():
        found.append(("a rank", rank))
        for worker in children(rank):
            found += [("reward worker", worker), *(("reward's child", child) for child in children(worker))]
    return found


def assert_nothing_is_left(job: Job) -> None:
    """No process, and with them no port; no file beside the run's folder, and no shared memory (see conftest.py)."""
    deadline = time.monotonic() + 5
    while running := job.processes():
        commands = [read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode() for pid in running]
        assert time.monotonic() < deadline, commands
        time.sleep(0.05)
    # PyTorch keeps compiled kernels from job to job; torchrun leaves a folder where it ends before its ranks begin.
    kept = ("torchinductor_",) if "bash" in job.process.args else ("torchinductor_", "torchelastic_")
    left = [path.name for path in job.tmp.iterdir() if not path.name.startswith(kept)]
    assert left == [], left
