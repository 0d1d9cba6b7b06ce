"""Every call comes back in time with an explicit verdict, whatever the reward function does, and leaves no process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdrl.engines.reward.calls import RewardCall, read_scores
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.nouns.settings.reward_config import RewardConfig
from spmdrl.runtime.workers.descent import ProcessTree
from spmdrl.runtime.workers.isolation import runs_inline
from spmdrl.runtime.workers.verdict import Verdict

POISONS = Path(__file__).with_name("poisons.py")
TIMEOUT_SECONDS = 1.5


def config_of(*functions: str, **settings) -> RewardConfig:
    specs = tuple(f"{POISONS}:{name}" for name in functions)
    return RewardConfig(specs, **{"timeout_seconds": TIMEOUT_SECONDS, "isolation": "process", **settings})


def submit(pool: RewardPool, key, *completions: str, **columns) -> None:
    pool.submit({key: call_of(*completions, **columns)})


def call_of(*completions: str, **columns) -> RewardCall:
    return RewardCall(["p"] * len(completions), completions, [(1,)] * len(completions), columns)


def scored(pool: RewardPool, *completions: str, **columns):
    submit(pool, "only", *completions, **columns)
    return pool.collect(["only"])[0]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A killed orphan may wait for whichever process 1 there is to reap it.
    return state != "Z"


def wait_until_dead(pids, seconds: float = 5.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [pid for pid in pids if is_alive(pid)]


def started_here() -> set[int]:
    """The processes that descend from this one: guards, workers and what these started."""
    return {one.pid for one in ProcessTree(os.getpid()).members()}


@pytest.fixture(scope="module")
def poisoned():
    before = started_here()
    with RewardPool(config_of("poison", memory_limit_gib=0.1)) as pool:
        yield pool
        started = started_here() - before
        assert len(started) >= 2
    assert wait_until_dead(started, 0.0) == []


@pytest.mark.parametrize(
    ("poison", "verdict"),
    [
        ("raise", Verdict.CRASHED),
        ("exit", Verdict.CRASHED),
        ("interrupt", Verdict.CRASHED),
        ("loop", Verdict.TIMED_OUT),
        ("sleep", Verdict.TIMED_OUT),
        ("segfault", Verdict.CRASHED),
        ("os_exit", Verdict.CRASHED),
        ("hog", Verdict.CRASHED),
        ("short", Verdict.MALFORMED),
        ("text", Verdict.MALFORMED),
        ("string", Verdict.MALFORMED),
        ("nan", Verdict.MALFORMED),
        ("huge", Verdict.MALFORMED),
        ("print", Verdict.SCORED),
        ("wrong_pipe", Verdict.CRASHED),
        ("forge", Verdict.CRASHED),
        ("forge_deep", Verdict.CRASHED),
        ("breakpoint", Verdict.CRASHED),
        ("pdb", Verdict.CRASHED),
        ("pdb_on_stdin", Verdict.CRASHED),
        ("input", Verdict.CRASHED),
    ],
)
def test_a_poisoned_call_has_its_verdict_in_time_and_the_next_call_is_scored(poisoned, poison, verdict):
    scored(poisoned, "fine")  # a replacement that still starts is no part of the call's time
    start = time.monotonic()
    result = scored(poisoned, poison, poison)
    # A second after the deadline on a quiet machine; other workers may be busy.
    assert time.monotonic() - start < TIMEOUT_SECONDS + 4
    assert result.verdicts == [verdict] * 2
    assert result.rewards == ([1.0, 1.0] if verdict is Verdict.SCORED else [None, None])
    assert (result.error is None) == (verdict is Verdict.SCORED)
    assert scored(poisoned, "fine").rewards == [1.0]


def test_a_grandchild_dies_with_its_call(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMDRL_TEST_PID_FILE", str(tmp_path / "pid"))
    with RewardPool(config_of("poison", variables=("SPMDRL_TEST_PID_FILE",))) as pool:
        assert scored(pool, "grandchild").verdicts == [Verdict.TIMED_OUT]
        assert wait_until_dead([int((tmp_path / "pid").read_text())]) == []


def pids_in(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


@pytest.mark.parametrize("kind", ["own_session", "daemon", "shell", "respawning"])
def test_what_a_call_leaves_behind_ends_before_the_next_call(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("SPMDRL_TEST_PID_FILE", str(tmp_path / "pids"))
    settings = {"variables": ("SPMDRL_TEST_PID_FILE",), "timeout_seconds": 10.0}
    with RewardPool(config_of("poison", **settings)) as pool:
        for _ in range(2):
            assert scored(pool, kind).rewards == [1.0]
        # A call ends before the next is begun, so this one finds nothing of those before it.
        assert scored(pool, "fine").rewards == [1.0]
        left = pids_in(tmp_path / "pids")
        assert len(left) >= 2 and wait_until_dead(left, 0.0) == []


def test_a_helper_that_a_reward_keeps_lives_as_long_as_the_worker():
    with RewardPool(config_of("poison", timeout_seconds=10.0)) as pool:
        assert [scored(pool, "helper").rewards for _ in range(3)] == [[1.0]] * 3


def test_a_worker_whose_guard_was_stopped_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMDRL_TEST_PID_FILE", str(tmp_path / "pids"))
    with RewardPool(config_of("poison", variables=("SPMDRL_TEST_PID_FILE",))) as pool:
        assert scored(pool, "stop_guard").verdicts == [Verdict.TIMED_OUT]
        assert wait_until_dead(pids_in(tmp_path / "pids"), 0.0) == []
        assert scored(pool, "fine").rewards == [1.0]


@pytest.mark.parametrize(
    ("kind", "limit_gib", "reason"),
    [
        ("many", 1.0, "more than 256"),
        ("bomb", 1.0, "more than 256"),
        ("shared_memory", 0.25, "reward.memory_limit_gib"),
        ("memory_file", 0.25, "reward.memory_limit_gib"),
        ("children_with_memory", 0.25, "reward.memory_limit_gib"),
    ],
)
def test_processes_and_memory_are_limited_for_all_that_a_call_starts(kind, limit_gib, reason):
    with RewardPool(config_of("poison", memory_limit_gib=limit_gib, timeout_seconds=120.0)) as pool:
        result = scored(pool, kind)
        assert result.verdicts == [Verdict.CRASHED]
        assert result.error is not None and reason in result.error


def test_whatever_a_function_raises_is_named_and_costs_no_process():
    with RewardPool(config_of("poison", "interrupted_later", timeout_seconds=20.0)) as pool:
        started = started_here()
        result = scored(pool, "interrupt")
        assert result.verdicts == [Verdict.CRASHED] and "poison: KeyboardInterrupt: stop" in result.error
        assert "interrupted_later: CancelledError" in scored(pool, "fine").error
        assert started_here() == started


def test_a_module_that_raises_no_ordinary_exception_is_named(tmp_path):
    (tmp_path / "rude.py").write_text("raise KeyboardInterrupt('no')\n")
    with pytest.raises(ValueError, match="reward.functions can't be loaded: KeyboardInterrupt: no"):
        RewardPool(RewardConfig((f"{tmp_path}/rude.py:reward",), isolation="process"))


def test_what_functions_print_steers_no_terminal(capfd):
    with RewardPool(config_of("poison", timeout_seconds=20.0)) as pool:
        assert scored(pool, "escape").rewards == [1.0]
    said = capfd.readouterr().err
    assert "\\x1b]0;title\\x07\\u202ered\n" in said and "\\x1b[2J half a letter: \\xff\n" in said


def test_a_limit_of_the_shell_below_the_rewards_limit_holds():
    program = (
        "from spmdrl.engines.reward.calls import RewardCall\n"
        "from spmdrl.engines.reward.pool import RewardConfig, RewardPool\n"
        f"with RewardPool(RewardConfig(('{POISONS}:poison',), isolation='process')) as pool:\n"
        "    pool.submit({0: RewardCall(['p'], ['fine'], [(1,)], {})})\n"
        "    print(pool.collect([0])[0].rewards)\n"
    )
    command = f'ulimit -d 2000000; exec "{sys.executable}" -c "{program}"'
    assert subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout == "[1.0]\n"


def test_a_forged_answer_never_counts():
    with RewardPool(config_of("poison")) as pool:
        for _ in range(3):
            result = scored(pool, "forge", "forge")
            assert result.rewards == [None, None] and result.verdicts == [Verdict.CRASHED] * 2
            assert result.error is not None and "something else wrote into its pipe" in result.error


@pytest.mark.parametrize(
    "parts",
    [
        None,
        [],
        [{"values": [1.0], "verdicts": [0]}],
        [{"values": [1.0, 2.0], "verdicts": [0, 0], "error": None}],
        [{"values": ["1"], "verdicts": [0], "error": None}],
        [{"values": [1e300], "verdicts": [0], "error": None}],
        [{"values": [float("nan")], "verdicts": [0], "error": None}],
        [{"values": [None], "verdicts": [0], "error": None}],
        [{"values": [1.0], "verdicts": [4], "error": None}],
        [{"values": [1.0], "verdicts": [99], "error": None}],
        [{"values": [1.0], "verdicts": [0], "error": 7}],
        [{"values": [1.0], "verdicts": [0], "error": None}] * 2,
    ],
)
def test_scores_that_no_function_gives_are_refused(parts):
    assert read_scores(parts, num_functions=1, num_rows=1) is None


def test_rewards_get_the_common_variables_and_those_that_the_config_names(monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    completions = ["environment"] * 4
    with RewardPool(config_of("poison")) as pool:
        assert scored(pool, *completions).rewards == [0.0, 0.0, 0.0, 1.0]
    with RewardPool(config_of("poison", variables=("JUDGE_KEY",))) as pool:
        assert scored(pool, *completions).rewards == [0.0, 0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="reward.variables names NO_SUCH_KEY"):
        RewardPool(config_of("poison", variables=("NO_SUCH_KEY",)))


@pytest.mark.parametrize("python_path", [None, "/of/the/job:/another"])
def test_what_a_function_starts_has_the_python_path_that_the_job_was_started_with(tmp_path, monkeypatch, python_path):
    source = """
import os

def is_own(completions, **columns):
    return [float(os.environ.get("PYTHONPATH", "none") == text) for text in completions]
"""
    (tmp_path / "own.py").write_text(source)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if python_path is not None:
        monkeypatch.setenv("PYTHONPATH", python_path)
    config = RewardConfig((f"{tmp_path}/own.py:is_own",), isolation="process")
    with RewardPool(config) as pool:
        assert scored(pool, python_path or "none", "another").rewards == [1.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("breakpoint", "breakpoint()"),
        ("pdb", "input() or a debugger"),
        ("pdb_on_stdin", "a debugger"),
        ("input", "input()"),
    ],
)
def test_a_reward_that_waits_for_a_terminal_is_explained(poisoned, kind, what):
    error = scored(poisoned, kind).error
    assert error is not None and f"a reward function called {what}" in error and "python -m pdb -m spmdrl" in error


def test_a_reward_that_imports_torch_fits_the_default_limit(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "import math_verify, sympy, torch\n"
        "def fn(completions, **columns):\n"
        "    return torch.ones(1 << 20)[: len(completions)].tolist()\n"
    )
    with RewardPool(RewardConfig((f"{path}:fn",), isolation="process", timeout_seconds=60.0)) as pool:
        assert scored(pool, "a", "b").rewards == [1.0, 1.0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_what_slurm_sends_to_every_process_of_a_job_disturbs_no_call(tmp_path, number):
    path = tmp_path / "reward.py"
    path.write_text(
        "import os, subprocess\n"
        "def fn(completions, **columns):\n"
        f"    for pid in (os.getpid(), os.getppid()):\n        os.kill(pid, {number:d})\n"
        # What it starts can still be ended so.
        "    child = subprocess.Popen(['sleep', '60'])\n"
        f"    child.send_signal({number:d})\n"
        f"    return [float(child.wait() == -{number:d})] * len(completions)\n"
    )
    with RewardPool(RewardConfig((f"{path}:fn",), isolation="process", timeout_seconds=20.0)) as pool:
        assert [scored(pool, "a").rewards for _ in range(2)] == [[1.0], [1.0]]


def test_a_dead_worker_is_noticed_though_its_forked_child_holds_the_pipe():
    with RewardPool(config_of("poison", timeout_seconds=10.0)) as pool:
        assert scored(pool, "fork").verdicts == [Verdict.CRASHED]


def test_other_calls_go_on_beside_one_that_hangs():
    with RewardPool(config_of("poison", workers=2)) as pool:
        submit(pool, "bad", "sleep")
        for key in range(5):
            submit(pool, key, "fine")
        assert [result.rewards for result in pool.collect(range(5))] == [[1.0]] * 5
        assert pool.collect(["bad"])[0].verdicts == [Verdict.TIMED_OUT]


@pytest.mark.parametrize("workers", [1, 2])
def test_calls_sent_with_one_that_hangs_or_dies_are_scored_by_another_worker(workers):
    texts = ["fine", "sleep", "fine", "os_exit", "raise", "fine", "fine"]
    expected = {"sleep": Verdict.TIMED_OUT, "os_exit": Verdict.CRASHED, "raise": Verdict.CRASHED}
    with RewardPool(config_of("poison", workers=workers)) as pool:
        pool.submit({key: call_of(text) for key, text in enumerate(texts)})
        results = pool.collect(range(len(texts)))
    assert [one.verdicts for one in results] == [[expected.get(text, Verdict.SCORED)] for text in texts]
    assert [one.rewards for one in results] == [[None if text in expected else 1.0] for text in texts]


def test_each_call_sent_with_others_has_its_own_time():
    texts = ["nap"] * 5
    with RewardPool(config_of("poison")) as pool:
        start = time.monotonic()
        pool.submit({key: call_of(text) for key, text in enumerate(texts)})
        first_came = pool.came_at([0])
        results, seconds = pool.collect(range(len(texts))), time.monotonic() - start
        assert first_came < time.perf_counter() - TIMEOUT_SECONDS, "an answer is there before those of later calls"
    assert seconds > TIMEOUT_SECONDS, "all of them together take longer than one may"
    assert [one.rewards for one in results] == [[1.0]] * len(texts)


def test_a_call_larger_than_a_pipe_goes_through():
    with RewardPool(config_of("fine", timeout_seconds=5.0)) as pool:
        assert scored(pool, "a" * 2_000_000, "b").rewards == [2_000_000.0, 1.0]


def test_an_answer_longer_than_a_read_arrives_whole():
    with RewardPool(config_of("fine", timeout_seconds=5.0)) as pool:
        assert scored(pool, *["a" * 7] * 40_000).rewards == [7.0] * 40_000


def test_several_functions_add_up_by_weight_and_none_of_one_leaves_the_others():
    with RewardPool(config_of("none_for_empty", "first_letter", weights=(2.0, 0.5))) as pool:
        result = scored(pool, "ab", "bb", "", answer=["a", "a", "a"])
    assert result.rewards == [1.5, 1.0, 0.0]
    assert result.parts == {"none_for_empty": [0.5, 0.5, None], "first_letter": [1.0, 0.0, 0.0]}
    assert result.verdicts == [Verdict.SCORED, Verdict.SCORED, Verdict.WRONG]


def test_none_of_all_functions_leaves_the_row_out():
    with RewardPool(config_of("none_for_empty", "even_only", isolation="inline")) as pool:
        result = scored(pool, "", "a", "bb")
    assert result.rewards == [None, 0.5, 2.5]
    assert result.verdicts == [Verdict.LEFT_OUT, Verdict.SCORED, Verdict.SCORED]


def test_zero_by_every_function_is_wrong_and_not_an_error():
    with RewardPool(config_of("first_letter")) as pool:
        result = scored(pool, "b", answer=["a"])
    assert (result.rewards, result.verdicts, result.error) == ([0.0], [Verdict.WRONG], None)


def test_closing_ends_a_worker_that_is_in_a_loop():
    before = started_here()
    pool = RewardPool(config_of("poison", timeout_seconds=60.0))
    started = started_here() - before
    submit(pool, "bad", "loop")
    pool.close()
    assert len(started) == 2 and wait_until_dead(started, 0.0) == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.collect(["bad"])
    with pytest.raises(RuntimeError, match="closed"):
        submit(pool, "more", "fine")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (None, "fn", "there is no file"),
        ("def fun(completions): pass", "fn", "did you mean 'fun'"),
        ("def fn(completions:", "fn", "SyntaxError.*reward.py:1"),
        ("import no_such_module_here", "fn", "ModuleNotFoundError"),
        ("raise SystemExit(2)", "fn", "SystemExit"),
        ("import os; os._exit(5)", "fn", "lost: .*exit code 5"),
        ("def fn(sample): pass", "fn", "takes \\(sample\\)"),
    ],
)
def test_a_function_that_cannot_load_is_one_clear_error_at_the_start(tmp_path, source, name, message):
    if source is not None:
        (tmp_path / "reward.py").write_text(source)
    with pytest.raises(ValueError, match=message):
        RewardPool(RewardConfig((f"{tmp_path / 'reward.py'}:{name}",), isolation="process"))


def start_pool_of_its_own(kind: str, pid_file: Path) -> subprocess.Popen[str]:
    """A process with a pool that prints a line once a call has written its own process ids."""
    program = (
        "import os, sys, time\n"
        "from spmdrl.engines.reward.calls import RewardCall\n"
        "from spmdrl.engines.reward.pool import RewardConfig, RewardPool\n"
        "config = RewardConfig((sys.argv[1],), timeout_seconds=60.0, isolation='process',\n"
        "                      variables=('SPMDRL_TEST_PID_FILE',))\n"
        "pool = RewardPool(config)\n"
        "pool.submit({1: RewardCall(['p'], [sys.argv[2]], [[1]], {})})\n"
        "path = os.environ['SPMDRL_TEST_PID_FILE']\n"
        "while not (os.path.exists(path) and open(path).read().endswith('\\n')):\n"
        "    time.sleep(0.001)\n"
        "print('called', flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "SPMDRL_TEST_PID_FILE": str(pid_file), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, f"{POISONS}:poison", kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)


@pytest.mark.parametrize("kind", ["grandchild", "own_session_and_wait", "daemon_and_wait"])
def test_a_killed_rank_leaves_no_worker_and_nothing_that_it_started(tmp_path, kind):
    pid_file = tmp_path / "pids"
    rank = start_pool_of_its_own(kind, pid_file)
    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        started = {one.pid for one in ProcessTree(rank.pid).members()}
        assert set(pids_in(pid_file)) < started
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.communicate()
    assert wait_until_dead(started) == []


def test_inline_runs_in_this_process_and_auto_follows_the_debugger(monkeypatch):
    before = started_here()
    with RewardPool(config_of("poison", isolation="inline")) as pool:
        assert started_here() == before
        assert scored(pool, "fine").rewards == [1.0]
        assert scored(pool, "raise").verdicts == [Verdict.CRASHED]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "pdb", "-m", "spmdrl"])
    assert runs_inline(RewardConfig().isolation)
    assert not runs_inline("process")


def test_a_key_is_used_once_and_an_unknown_key_is_refused():
    with RewardPool(config_of("fine", isolation="inline")) as pool:
        submit(pool, "a", "x")
        with pytest.raises(ValueError, match="not yet collected"):
            submit(pool, "a", "x")
        with pytest.raises(KeyError, match="no reward call"):
            pool.collect(["b"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"functions": ()}, "reward.functions is empty"),
        ({"weights": (1.0, 2.0)}, "reward.weights has 2 values"),
        ({"weights": (float("nan"),)}, "must be finite"),
        ({"functions": ("math",), "isolation": "inline"}, "math needs a process that can be killed"),
    ],
)
def test_a_config_value_that_cannot_be_is_refused_by_its_key(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**settings)


def test_the_package_imports_no_torch():
    code = "import sys, spmdrl.engines.reward.pool, spmdrl.runtime.workers.guard; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_a_pool_of_which_the_first_rows_all_failed_is_hopeless_until_one_is_scored():
    with RewardPool(config_of("as_written", isolation="inline")) as pool:
        scored(pool, *["no number"] * 7)
        assert pool.hopeless() is None
        scored(pool, "nor this")
        assert "as_written: ValueError" in pool.hopeless() and f"{POISONS}:" in pool.hopeless()
        scored(pool, "1")
        assert pool.hopeless() is None
    with RewardPool(config_of("as_written", isolation="inline", max_error_rate=1.0)) as pool:
        scored(pool, *["no number"] * 9)
        assert pool.hopeless() is None
