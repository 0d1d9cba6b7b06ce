"""Every call comes back in time with an explicit verdict, whatever the reward function does, and leaves no process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdrl.engines.reward.pool import RewardConfig, RewardPool
from spmdrl.engines.reward.verdict import Verdict

POISONS = Path(__file__).with_name("poisons.py")
TIMEOUT_SECONDS = 0.5


def config_of(*functions: str, **settings) -> RewardConfig:
    specs = tuple(f"{POISONS}:{name}" for name in functions)
    return RewardConfig(specs, **{"timeout_seconds": TIMEOUT_SECONDS, "isolation": "process", **settings})


def submit(pool: RewardPool, key, *completions: str, **columns) -> None:
    pool.submit(key, ["p"] * len(completions), completions, [(1,)] * len(completions), columns)


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


def group_members(leader: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == leader:
                members.append(int(entry.name))
    return members


@pytest.fixture(scope="module")
def poisoned():
    with RewardPool(config_of("poison", memory_limit_gib=0.1)) as pool:
        yield pool
        groups = [pid for leader in pool.worker_pids() for pid in group_members(leader)]
        assert groups
    assert wait_until_dead(groups) == []


@pytest.mark.parametrize(
    ("poison", "verdict"),
    [
        ("raise", Verdict.CRASHED),
        ("exit", Verdict.CRASHED),
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
    ],
)
def test_a_poisoned_call_has_its_verdict_in_time_and_the_next_call_is_scored(poisoned, poison, verdict):
    scored(poisoned, "fine")  # a replacement that still starts is no part of the call's time
    start = time.monotonic()
    result = scored(poisoned, poison, poison)
    assert time.monotonic() - start < TIMEOUT_SECONDS + 1
    assert result.verdicts == [verdict] * 2
    assert result.rewards == ([1.0, 1.0] if verdict is Verdict.SCORED else [None, None])
    assert (result.error is None) == (verdict is Verdict.SCORED)
    assert scored(poisoned, "fine").rewards == [1.0]


def test_a_grandchild_dies_with_its_call(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMDRL_TEST_PID_FILE", str(tmp_path / "pid"))
    with RewardPool(config_of("poison")) as pool:
        assert scored(pool, "grandchild").verdicts == [Verdict.TIMED_OUT]
        assert wait_until_dead([int((tmp_path / "pid").read_text())]) == []


def test_a_dead_worker_is_noticed_though_its_forked_child_holds_the_pipe():
    with RewardPool(config_of("poison", timeout_seconds=10.0)) as pool:
        assert scored(pool, "fork").verdicts == [Verdict.CRASHED]


def test_other_calls_go_on_beside_one_that_hangs():
    with RewardPool(config_of("poison", workers=2)) as pool:
        submit(pool, "bad", "sleep")
        for key in range(5):
            submit(pool, key, "fine")
        assert [result.rewards for result in pool.collect(range(5))] == [[1.0]] * 5
        assert pool.ready() == []
        assert pool.collect(["bad"])[0].verdicts == [Verdict.TIMED_OUT]


def test_a_call_larger_than_a_pipe_goes_through():
    with RewardPool(config_of("fine", timeout_seconds=5.0)) as pool:
        assert scored(pool, "a" * 2_000_000, "b").rewards == [2_000_000.0, 1.0]


def test_several_functions_add_up_by_weight_and_none_leaves_the_row_out():
    with RewardPool(config_of("none_for_empty", "first_letter", weights=(2.0, 0.5))) as pool:
        result = scored(pool, "ab", "bb", "", answer=["a", "a", "a"])
    assert result.rewards == [1.5, 1.0, None]
    assert result.parts == {"none_for_empty": [0.5, 0.5, None], "first_letter": [1.0, 0.0, 0.0]}
    assert result.verdicts == [Verdict.SCORED, Verdict.SCORED, Verdict.LEFT_OUT]


def test_zero_by_every_function_is_wrong_and_not_an_error():
    with RewardPool(config_of("first_letter")) as pool:
        result = scored(pool, "b", answer=["a"])
    assert (result.rewards, result.verdicts, result.error) == ([0.0], [Verdict.WRONG], None)


def test_closing_ends_a_worker_that_is_in_a_loop():
    pool = RewardPool(config_of("poison", timeout_seconds=60.0))
    pids = pool.worker_pids()
    submit(pool, "bad", "loop")
    pool.close()
    assert wait_until_dead(pids, 0.0) == []
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


def test_a_killed_parent_leaves_no_worker_and_no_grandchild(tmp_path):
    program = (
        "import sys, time\n"
        "from spmdrl.engines.reward.pool import RewardConfig, RewardPool\n"
        f"pool = RewardPool(RewardConfig(('{POISONS}:poison',), timeout_seconds=60.0, isolation='process'))\n"
        "pool.submit(1, ['p'], ['grandchild'], [[1]], {})\n"
        "print(pool.worker_pids()[0], flush=True)\n"
        "time.sleep(60)\n"
    )
    pid_file = tmp_path / "pid"
    environment = {**os.environ, "SPMDRL_TEST_PID_FILE": str(pid_file), "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        deadline = time.monotonic() + 5
        while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        group = group_members(worker)
        assert int(pid_file.read_text()) in group
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    assert wait_until_dead(group) == []


def test_inline_runs_in_this_process_and_auto_follows_the_debugger(monkeypatch):
    with RewardPool(config_of("poison", isolation="inline")) as pool:
        assert pool.worker_pids() == []
        assert scored(pool, "fine").rewards == [1.0]
        assert scored(pool, "raise").verdicts == [Verdict.CRASHED]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "pdb", "-m", "spmdrl"])
    assert RewardConfig().runs_inline
    assert not RewardConfig(isolation="process").runs_inline


def test_a_key_is_used_once_and_an_unknown_key_is_refused():
    with RewardPool(config_of("fine", isolation="inline")) as pool:
        submit(pool, "a", "x")
        with pytest.raises(ValueError, match="not yet collected"):
            submit(pool, "a", "x")
        assert pool.ready() == ["a"]
        with pytest.raises(KeyError, match="no reward call"):
            pool.collect(["b"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"functions": ()}, "reward.functions is empty"),
        ({"weights": (1.0, 2.0)}, "reward.weights has 2 values"),
        ({"weights": (float("nan"),)}, "must be finite"),
        ({"timeout_seconds": 0.0}, "reward.timeout_seconds is 0"),
        ({"max_error_rate": 2.0}, "reward.max_error_rate"),
        ({"workers": 0}, "reward.workers is 0"),
        ({"call_level": "row"}, "reward.call_level is .row., but must be response or group"),
        ({"isolation": "thread"}, "reward.isolation"),
        ({"functions": ("math",), "isolation": "inline"}, "math needs a process that can be killed"),
        ({"memory_limit_gib": 0.0}, "reward.memory_limit_gib"),
    ],
)
def test_a_config_value_that_cannot_be_is_refused_by_its_key(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**settings)


def test_the_package_imports_no_torch():
    code = "import sys, spmdrl.engines.reward.pool, spmdrl.engines.reward.worker; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
