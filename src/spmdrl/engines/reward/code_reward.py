"""The reward `code`: runs the program in a response against the row's tests, in a sandbox.

Stdout is compared here, and other tests run in a process of their own: the program has neither the expected values nor
a way to write a verdict.
"""

from __future__ import annotations

import ast
import json
import re
import signal
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from spmdrl.engines.reward.code_tests import RowTests, read_tests
from spmdrl.nouns.settings.reward_config import CodeConfig
from spmdrl.runtime.sandbox.boxes import Box, BoxLimits, BoxLost, BoxServer, Finished, SandboxRefused
from spmdrl.runtime.sandbox.inside.program import OUT_OF_MEMORY
from spmdrl.runtime.workers.verdict import Verdict

_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_LANGUAGES = ("", "py", "python", "python3")
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True)
class Judged:
    """A row's value, with the reason if it is 0."""

    value: float
    verdict: Verdict


@dataclass
class _Tally:
    """Test results of a row."""

    total: int = 0
    passed: int = 0
    first_failure: Verdict | None = None

    def count(self, failure: Verdict | None) -> None:
        self.total += 1
        self.passed += failure is None
        self.first_failure = self.first_failure or failure


class CodeReward:
    """A reward function in TRL's form. The constructor starts the boxes' server, which ends with this process.

    Raises ValueError if the kernel can't make boxes.
    """

    def __init__(self, config: CodeConfig):
        self._config = config
        try:
            self._server = BoxServer(BoxLimits(int(config.memory_gib * 2**30), config.readable))
        except SandboxRefused as refused:
            raise ValueError(
                f"reward.functions: 'code' runs programs in Linux namespaces, which this system refuses "
                f"({refused}); allow them (docs/security.md#programs-of-the-policy has the ways), or run programs "
                "elsewhere in a function of your own"
            ) from refused

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[Judged | Exception | None]:
        rows = [{name: values[row] for name, values in columns.items()} for row in range(len(prompts))]
        return [self._judged(*one) for one in zip(prompts, completions, rows, strict=True)]

    def close(self) -> None:
        """End the boxes' server."""
        self._server.close()

    def _judged(self, prompt: Any, completion: str, row: dict[str, Any]) -> Judged | Exception | None:
        try:
            tests = read_tests(row)
            if tests is None:
                return None
            program = program_in(completion, prompt)
            if program is None:
                return Judged(0.0, Verdict.NO_PROGRAM)
            with self._server.box() as box:
                return self._counted(_run_tests(box, program, tests, self._config))
        except (ValueError, BoxLost, SandboxRefused) as problem:
            return problem

    def _counted(self, tally: _Tally) -> Judged:
        share = tally.passed / tally.total
        value = share if self._config.score == "share" else float(share == 1)
        return Judged(value, Verdict.SCORED if value else tally.first_failure or Verdict.WRONG)


def _run_tests(box: Box, program: str, tests: RowTests, config: CodeConfig) -> _Tally:
    tally, deadline = _Tally(), time.monotonic() + config.row_seconds
    for given, wanted in tests.texts:
        left = deadline - time.monotonic()
        if left <= 0 or tally.first_failure is Verdict.PROGRAM_TIMED_OUT:
            # A program too slow for one test isn't given the time of all.
            tally.count(Verdict.PROGRAM_TIMED_OUT)
            continue
        finished = box.run_program(program, given, min(left, config.test_seconds))
        ending = _ending(finished)
        tally.count(ending if ending or _is_same_output(finished.output, wanted) else Verdict.WRONG)
    if tests.calls or tests.asserts or tests.source:
        spec = {"seconds": config.test_seconds, **asdict(tests)}
        _count_verdicts(tally, box.run_assertions(program, spec, max(0.01, deadline - time.monotonic())))
    return tally


def _ending(finished: Finished) -> Verdict | None:
    """Return the verdict of a program that didn't end well, else None."""
    if finished.late or -signal.SIGXCPU in finished.codes:
        return Verdict.PROGRAM_TIMED_OUT
    if OUT_OF_MEMORY in finished.codes:
        return Verdict.PROGRAM_OUT_OF_MEMORY
    return Verdict.PROGRAM_CRASHED if any(finished.codes) else None


def _count_verdicts(tally: _Tally, finished: Finished) -> None:
    lines = [json.loads(line) for line in finished.output.splitlines()]
    if unsupported := next((line["unsupported"] for line in lines if "unsupported" in line), None):
        raise ValueError(f"the row's tests can't run beside the program: {unsupported}")
    verdicts = [line["passed"] for line in lines if "passed" in line]
    for passed in verdicts:
        tally.count(None if passed else Verdict.WRONG)
    total = next((line["total"] for line in lines if "total" in line), 1)
    is_late = finished.late or any("late" in line for line in lines)
    served = replace(finished, codes=finished.codes[1:], late=is_late)
    for _ in range(total - len(verdicts)):
        tally.count(_ending(served) or Verdict.PROGRAM_CRASHED)


def _is_same_output(written: str, wanted: str) -> bool:
    """Return True if outputs have the same lines, ignoring trailing spaces and trailing empty lines.

    Lines of numbers are compared as numbers: 1.50 equals 1.5.
    """
    lines, wanted_lines = ([line.strip() for line in text.strip().splitlines()] for text in (written, wanted))
    if len(lines) != len(wanted_lines):
        return False
    return all(
        line == other or _decimals(line) == (_decimals(other) or ())
        for line, other in zip(lines, wanted_lines, strict=True)
    )


def _decimals(line: str) -> list[Decimal] | None:
    try:
        return [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None


def program_in(response: str, prompt: Any) -> str | None:
    """Return the last fenced block of Python after the thoughts; without fences the whole response, if it is Python.

    A response may continue a program that its prompt begins, as in HumanEval.
    """
    answer = response.rpartition(_END_OF_THOUGHT)[2]
    if blocks := [text for language, text in _FENCED.findall(answer) if language.lower() in _LANGUAGES]:
        return blocks[-1] if blocks[-1].strip() else None
    if "```" in answer:
        return None
    begun = [prompt + response] if isinstance(prompt, str) else []
    return next((text for text in (answer, *begun) if is_program(text)), None)


def is_program(text: str) -> bool:
    """Return True if a text is Python that defines or does something."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    # A word or a number is Python too.
    return any(not isinstance(one, ast.Expr) or isinstance(one.value, ast.Call) for one in tree.body)
