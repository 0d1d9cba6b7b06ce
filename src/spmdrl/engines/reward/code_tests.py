"""A row's tests for programs, in the forms of published data sets.

{"inputs": [...], "outputs": [...], "fn_name": ...}     APPS, TACO, PRIME; without fn_name texts for stdin and stdout
{"input": [...], "output": [...]}                       CodeContests
[{"input", "output", "type" or "testtype", "fn_name"}]  LiveCodeBench, DeepCoder; within {"test_cases"} open-r1
["assert f(1) == 2", ...]                               MBPP; within {"assert_case"} verl
"def check(candidate): ..."                             HumanEval, with `entry_point`; functions test_*: KodCode
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

TEST_COLUMNS = ("tests", "test_cases", "verification_info", "input_output", "test_list", "test", "public_tests",
                "public_test_cases", "answer")  # fmt: skip
_SETUP_COLUMNS = ("test_setup_code", "test_imports")


@dataclass(frozen=True)
class FunctionCall:
    """A test that calls a function of the program."""

    function: str
    arguments: Sequence[Any]
    expected: Sequence[Any]
    """values of which any is right: published data has some of them in a list of one"""


@dataclass
class RowTests:
    """Tests of a row: texts for stdin with expected stdout, and code or calls that need the program's names."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    calls: list[FunctionCall] = field(default_factory=list)
    asserts: list[str] = field(default_factory=list)
    source: str = ""
    setup: str = ""
    entry_point: str | None = None


def read_tests(columns: Mapping[str, Any]) -> RowTests | None:
    """Return the tests in a row's columns, None without any. Raises ValueError for an unreadable one."""
    name = next((name for name in TEST_COLUMNS if columns.get(name)), None)
    if name is None:
        return None
    tests = RowTests(setup=_setup(columns), entry_point=columns.get("entry_point"))
    try:
        _add(tests, _read(columns[name]), columns)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{error!r:.100}") from error
    except ValueError as error:
        raise ValueError(
            f"the tests in the column '{name}' can't be read: {error}; docs/rewards.md has their forms"
        ) from error
    for text in (*tests.asserts, tests.source, tests.setup):
        try:
            tree = ast.parse(text)
            if text and text is not tests.setup and not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
                raise SyntaxError("there is no assert")
        except SyntaxError as error:
            raise ValueError(
                f"the tests in the column '{name}' aren't tests in Python: {error}: {text!r:.80}"
            ) from error
    return tests


def _setup(columns: Mapping[str, Any]) -> str:
    given = [columns.get(name) for name in _SETUP_COLUMNS]
    return "\n".join("\n".join(text) if isinstance(text, list) else text for text in given if text)


def _read(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _add(tests: RowTests, value: Any, columns: Mapping[str, Any]) -> None:
    if isinstance(value, str):
        tests.source = value
    elif isinstance(value, Mapping):
        _add_mapping(tests, value, columns)
    elif isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        tests.asserts += value
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        for one in value:
            kind = one.get("type", one.get("testtype"))
            name = one.get("fn_name") or one.get("func_name") or _function_of(columns)
            _add_pair(tests, one["input"], one["output"], name if kind not in ("stdin", "stdin_stdout") else None)
    else:
        raise ValueError(f"it is a {type(value).__name__}, {value!r:.80}")


def _add_mapping(tests: RowTests, value: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
    inner = next((value[name] for name in ("test_cases", "assert_case") if value.get(name)), None)
    if inner is not None:
        _add(tests, _read(inner), columns)
        return
    given = value["inputs"] if "inputs" in value else value["input"]
    wanted = value["outputs"] if "outputs" in value else value["output"]
    if not given or len(given) != len(wanted):
        raise ValueError(f"there are {len(given)} inputs, but {len(wanted)} outputs")
    for one, output in zip(given, wanted, strict=True):
        _add_pair(tests, one, output, value.get("fn_name"))


def _function_of(columns: Mapping[str, Any]) -> str | None:
    metadata = _read(columns.get("metadata"))
    return metadata.get("func_name") if isinstance(metadata, Mapping) else None


def _add_pair(tests: RowTests, given: Any, wanted: Any, function: str | None) -> None:
    if function is None:
        tests.texts.append((_text(given), _text(wanted)))
        return
    if isinstance(given, str):
        # A line of JSON for each argument.
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
    if isinstance(wanted, str):
        with suppress(json.JSONDecodeError):
            wanted = json.loads(wanted)
    is_wrapped = isinstance(wanted, list) and len(wanted) == 1
    tests.calls.append(FunctionCall(function, given, [wanted, wanted[0]] if is_wrapped else [wanted]))


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
