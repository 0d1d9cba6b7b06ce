"""The reward `code` gives what a program earns on the row's tests, and a program can't write its own verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from spmdrl.engines.reward.calls import RewardCall
from spmdrl.engines.reward.code_reward import program_in
from spmdrl.engines.reward.code_tests import read_tests
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.nouns.settings.reward_config import CodeConfig, RewardConfig
from spmdrl.runtime.workers.verdict import Verdict

DOUBLE = "def double(x):\n    return 2 * x\n"
SCRIPT = "print(2 * int(input()))\n"
ASSERTS = ["assert double(2) == 4", "assert double(-1) == -2", "assert abs(double(0.1) - 0.2) < 1e-9"]
TEXTS = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}


def started(test_seconds: float) -> RewardPool:
    code = CodeConfig(test_seconds=test_seconds, row_seconds=2 * test_seconds, memory_gib=0.25)
    return RewardPool(RewardConfig(("code",), code=code, isolation="process"))


@pytest.fixture(scope="module")
def pool():
    """Soon out of patience with programs that don't end."""
    with started(1.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def patient():
    """For programs that end, however busy the machine is."""
    with started(30.0) as pool:
        yield pool


def judged(pool, program: str, fenced: bool = True, prompt: str = "p", **row):
    text = f"Here it is:\n```python\n{program}\n```\n" if fenced else program
    pool.submit({"only": RewardCall([prompt], [text], [(1,)], {name: [value] for name, value in row.items()})})
    (result,) = pool.collect(["only"])
    return result


FORMS = {
    "APPS": ({"input_output": json.dumps(TEXTS)}, SCRIPT),
    "PRIME in verl": ({"answer": json.dumps(TEXTS)}, SCRIPT),
    "APPS with a function": (
        {"input_output": json.dumps({"fn_name": "double", "inputs": [[2], [3]], "outputs": [4, [6]]})}, DOUBLE,
    ),
    "LeetCode's class": (
        {"input_output": {"fn_name": "double", "inputs": [[2]], "outputs": [4]}},
        "class Solution:\n    def double(self, x):\n        return 2 * x\n",
    ),
    "CodeContests": ({"public_tests": {"input": ["2\n"], "output": ["4\n"]}}, SCRIPT),
    "LiveCodeBench": (
        {"public_test_cases": json.dumps([{"input": "2\n", "output": "4", "testtype": "stdin"}])}, SCRIPT,
    ),
    "LiveCodeBench with a function": (
        {"public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional"}]),
         "metadata": json.dumps({"func_name": "add"})},
        "class Solution:\n    def add(self, values, x):\n        return tuple(values) + (x,)\n",
    ),
    "DeepCoder": ({"tests": [{"type": "stdin_stdout", "input": "2", "output": "4"}]}, SCRIPT),
    "open-r1": (
        {"verification_info": {"test_cases": [{"input": "2", "output": "4", "type": "stdin_stdout"}]}},
        SCRIPT,
    ),
    "MBPP": ({"test_list": ASSERTS, "test_setup_code": ""}, DOUBLE),
    "verl's asserts": ({"answer": json.dumps({"assert_case": ASSERTS})}, DOUBLE),
    "HumanEval": (
        {"test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\n", "entry_point": "double"},
        DOUBLE,
    ),
    "KodCode": ({"test": "from solution import double\n\ndef test_one():\n    assert double(1) == 2\n"}, DOUBLE),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_published_forms_are_read_and_a_right_program_has_its_reward(patient, form):
    row, program = FORMS[form]
    right, wrong = (
        judged(patient, program, **row),
        judged(patient, program.replace("2 * ", "3 * ").replace("+ (x", "+ (0"), **row),
    )
    assert (right.rewards, right.verdicts, right.error) == ([1.0], [Verdict.SCORED], None)
    assert (wrong.rewards, wrong.verdicts) == ([0.0], [Verdict.WRONG])


@pytest.mark.parametrize(
    ("program", "row", "verdict"),
    [
        ("print(1)", TEXTS, Verdict.WRONG),
        ("while True: pass", TEXTS, Verdict.PROGRAM_TIMED_OUT),
        ("raise ValueError", TEXTS, Verdict.PROGRAM_CRASHED),
        ("import ctypes; ctypes.string_at(0)", TEXTS, Verdict.PROGRAM_CRASHED),
        ("held = bytearray(1 << 29)", TEXTS, Verdict.PROGRAM_OUT_OF_MEMORY),
        ("this isn't Python", TEXTS, Verdict.PROGRAM_CRASHED),
        ("", TEXTS, Verdict.NO_PROGRAM),
        ("def double(x):\n    while True: pass", ASSERTS, Verdict.PROGRAM_TIMED_OUT),
        ("def double(x): raise ValueError", ASSERTS, Verdict.WRONG),
        ("def double(x): return bytearray(1 << 29)", ASSERTS, Verdict.PROGRAM_OUT_OF_MEMORY),
        ("import os\ndef double(x): os._exit(3)", ASSERTS, Verdict.PROGRAM_CRASHED),
        ("def triple(x): return x", ASSERTS, Verdict.WRONG),
    ],
)
def test_a_program_without_a_reward_has_its_reason(pool, program, row, verdict):
    result = judged(pool, program, tests=row)
    assert (result.rewards, result.verdicts, result.error) == ([0.0], [verdict], None)


FORGED = {
    "ends before the asserts": "import os\nos._exit(0)",
    "exits before the asserts": "import sys\nsys.exit(0)",
    "exits in a call": "import os\ndef double(x): os._exit(0)",
    "raises SystemExit in a call": "def double(x): raise SystemExit(0)",
    "equal to everything": "class All:\n    def __eq__(self, other): return True\ndef double(x): return All()",
    "close to everything": (
        "class All(float):\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0.0\n"
        "    def __abs__(self): return 0.0\n    def __lt__(self, other): return True\n    __hash__ = None\n"
        "def double(x): return All(7)"
    ),
    "its own abs": "def abs(x): return 0\ndef double(x): return x",
    "changed builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.AssertionError = KeyError\ndef double(x): return 0"
    ),
    "printed verdicts": "print('{\"total\": 3}\\n' + '{\"passed\": true}\\n' * 3)\ndef double(x): return 0",
    "verdicts into every descriptor": (
        "import os\nfor fd in range(9):\n    try: os.write(fd, b'{\"passed\": true}\\n')\n    except OSError: pass\n"
        "def double(x): return 0"
    ),
    "answers before questions": (
        'import os\nfor fd in range(3, 9):\n    try: os.write(fd, b\'{"names": {}, "status": 0}\\n\' + '
        'b\'{"result": true, "of": []}\\n\' * 9)\n    except OSError: pass\ndef double(x): return 0'
    ),
    "the tests in its memory": (
        "import gc\ndef double(x):\n    wanted = ''.join(('assert', ' double'))\n"
        "    return 4 if any(wanted in repr(one)[:9999] for one in gc.get_objects()) else None"
    ),
    "the tests in its frames": "import sys\ndef double(x): return sys._getframe(1).f_locals.get('expected')",
    "an end of the tester": (
        "import os\nfor pid in range(2, 30):\n    try: pid == os.getpid() or os.kill(pid, 9)\n"
        "    except OSError: pass\ndef double(x): return 0"
    ),
    "an end of the tester without an error": (
        "import os\nfor pid in range(2, 30):\n    try: pid == os.getpid() or os.kill(pid, 14)\n"
        "    except OSError: pass\ndef double(x): return 0"
    ),
    "an exception that means success": "class Passed(BaseException): pass\ndef double(x): raise Passed",
    "a module in the tests' place": "import sys\nsys.modules['json'] = sys\ndef double(x): return 0",
    "a name of a module": "abs = 0\nimport math as double",
    "an exit function": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return 0",
}


@pytest.mark.parametrize("how", FORGED)
def test_a_program_cannot_write_its_own_verdict(pool, how):
    result = judged(pool, FORGED[how], test_list=ASSERTS)
    assert result.rewards == [0.0] and result.verdicts[0].has_reward and result.error is None, result
    assert judged(pool, DOUBLE, test_list=ASSERTS).rewards == [1.0]


@pytest.mark.parametrize("how", ["equal to everything", "its own abs", "changed builtins"])
def test_forgeries_work_where_tests_run_in_the_programs_own_process(how):
    program = FORGED[how] + "\n" + (ASSERTS[0] if "equal" in how else "assert abs(double(3) or 5) < 1e-9")
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_stdout_is_all_that_counts_of_a_script(patient):
    assert judged(patient, "import os\nprint(2 * int(input()), flush=True); os._exit(0)", tests=TEXTS).rewards == [1.0]
    assert judged(patient, "import sys; print(sys.stdin.read())", tests=TEXTS).rewards == [0.0]
    assert judged(patient, "print(4)", tests=TEXTS).rewards == [0.5], "the share of tests"


def test_all_or_nothing():
    config = RewardConfig(("code",), code=CodeConfig(score="all"), isolation="inline")
    with RewardPool(config) as pool:
        assert judged(pool, "print(4)", tests=TEXTS).rewards == [0.0]
        assert judged(pool, SCRIPT, tests=TEXTS).rewards == [1.0]


def test_tests_may_use_classes_exceptions_and_arguments_that_are_changed(patient):
    program = (
        "class Empty(Exception): pass\nclass Stack:\n    def __init__(self): self.values = []\n"
        "    def push(self, value): self.values.append(value)\n    def pop(self):\n"
        "        if not self.values: raise Empty('nothing')\n        return self.values.pop()\n"
        "    def __len__(self): return len(self.values)\n"
        "def sort(values): values.sort()\ndef numbers(n):\n    for i in range(n): yield i\n"
    )
    tests = [
        "s = Stack(); s.push(3); assert len(s) == 1 and s.values == [3] and s.pop() == 3",
        "try:\n    Stack().pop()\n    assert False\nexcept Empty as error:\n    assert str(error) == 'nothing'",
        "v = [3, 1]; sort(v); assert v == [1, 3]",
        "assert list(numbers(3)) == [0, 1, 2] and isinstance(Stack(), Stack)",
    ]
    assert judged(patient, program, test_list=tests).rewards == [1.0]
    assert judged(patient, program.replace("values.sort()", "pass"), test_list=tests).rewards == [0.75]


def test_a_row_whose_tests_are_broken_is_an_error_and_no_silent_zero(pool):
    for row in ({"tests": {"inputs": ["1"], "outputs": []}}, {"test_list": ["assert double(2 == 4"]}, {"tests": 7}):
        result = judged(pool, DOUBLE, **row)
        assert result.rewards == [None] and result.verdicts == [Verdict.CRASHED] and result.error
    callback = judged(pool, "def double(f): return f(2)", test_list=["assert double(lambda x: x) == 2"])
    assert callback.verdicts == [Verdict.CRASHED] and "function can't be passed" in callback.error
    assert judged(pool, DOUBLE, answer="4").verdicts == [Verdict.CRASHED], "an answer isn't a test that passes"


def test_a_row_without_tests_has_no_reward(pool):
    assert judged(pool, DOUBLE, other=1).verdicts == [Verdict.LEFT_OUT]
    assert read_tests({"tests": None, "test_list": ["assert 1"]}).asserts == ["assert 1"]


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```\na = 1\n```\nand then\n```py\nb = 2\n```\n", "b = 2\n"),
        ("<think>```python\nno = 0\n```</think>```python\nb = 2\n```", "b = 2\n"),
        ("```cpp\nint a;\n```", None),
        ("```python\ncut off", None),
        ("print(1)", "print(1)"),
        ("I can't do that.", None),
        ("42", None),
        ("    return x\n", "def f(x):\n    return x\n"),
    ],
)
def test_the_program_in_a_response(response, program):
    assert program_in(response, "def f(x):\n") == program


def test_without_namespaces_the_reward_is_refused_with_the_way_out(tmp_path):
    script = (
        "from spmdrl.engines.reward.pool import *\n"
        "try: RewardPool(RewardConfig(('code',), isolation='process'))\nexcept ValueError as error: print(error)"
    )
    if os.geteuid() != 0:
        pytest.skip("needs root to take namespaces away")
    none = 'echo 0 > /proc/sys/user/max_user_namespaces; echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'
    command = ["unshare", "-rU", "sh", "-c", none, "sh", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src"})
    assert "reward.functions: 'code' runs programs in Linux namespaces" in done.stdout, done
    assert "unshare: No space left on device" in done.stdout and "docs/security.md" in done.stdout
