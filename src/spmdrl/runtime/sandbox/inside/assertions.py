"""Tests that call a program in another process, so that it can't change how they judge it.

They send questions on descriptor 4, read answers on 3, and write verdicts as JSON lines on 5, which the program lacks.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import signal
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from spmdrl.runtime.sandbox.inside.plain_values import Unsupported, decode
from spmdrl.runtime.sandbox.inside.stand_ins import Link, ProgramEnded, Remote, builtin_exception, connect


class TestLate(BaseException):
    """One test took too long."""


def run(spec_text: str) -> int:
    """Run the tests of a row, each within its own time."""
    spec, link = json.loads(spec_text), connect()
    signal.signal(signal.SIGALRM, _raise_late)
    with os.fdopen(5, "w", encoding="utf-8") as verdicts:

        def report(**verdict: Any) -> None:
            verdicts.write(json.dumps(verdict) + "\n")
            verdicts.flush()

        try:
            tests = _limited(lambda: _tests(spec, link), spec["seconds"])
            report(total=len(tests))
            for test in tests:
                report(passed=_passes(test, spec["seconds"]))
        except ProgramEnded:
            report(ended=True)
        except TestLate:
            report(late=True)
        except Unsupported as error:
            report(unsupported=str(error))
        except (Exception, SystemExit):
            # Code before the first test may call the program too.
            report(passed=False)
    return 0


def _passes(test: Callable[[], None], seconds: float) -> bool:
    try:
        _limited(test, seconds)
    except Unsupported:
        raise
    except (Exception, SystemExit):
        return False
    return True


def _limited(act: Callable[[], Any], seconds: float) -> Any:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return act()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _tests(spec: dict[str, Any], link: Link) -> list[Callable[[], None]]:
    """Return the row's tests as functions, not yet called."""
    namespace = _namespace(link)
    _run_text(spec["setup"], namespace)
    tests: list[Callable[[], None]] = [partial(_run_text, text, namespace) for text in spec["asserts"]]
    tests += [partial(_check_call, one, namespace) for one in spec["calls"]]
    if not spec["source"]:
        return tests
    before = set(namespace)
    if spec["entry_point"] or "def test_" not in spec["source"]:
        return [*tests, lambda: _run_whole(spec, namespace)]
    _run_text(spec["source"], namespace)
    return tests + [value for name, value in namespace.items() if name.startswith("test_") and name not in before]


def _run_whole(spec: dict[str, Any], namespace: dict[str, Any]) -> None:
    _run_text(spec["source"], namespace)
    if spec["entry_point"] and "check" in namespace:
        namespace["check"](namespace[spec["entry_point"]])


def _check_call(one: dict[str, Any], namespace: dict[str, Any]) -> None:
    function = namespace.get(one["function"])
    if function is None and "Solution" in namespace:
        function = getattr(namespace["Solution"](), one["function"])
    if function is None:
        raise NameError(f"the program defines no {one['function']}")
    result = function(*one["arguments"])
    assert _lists(result) in [_lists(value) for value in one["expected"]], f"got {result!r:.200}"


def _lists(value: Any) -> Any:
    """Turn tuples into lists, as JSON has no tuples."""
    return [_lists(one) for one in value] if isinstance(value, (list, tuple)) else value


def _namespace(link: Link) -> dict[str, Any]:
    """Return the program's names without those of built-ins: tests that use `abs` mean Python's."""
    try:
        names, status = link.names()
        offered = {name: (kind, what) for name, (kind, *what) in names.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ProgramEnded from error  # it sent something else instead
    if status != 0:
        raise ProgramEnded
    solution = types.ModuleType("solution")
    for name, (kind, what) in offered.items():
        if hasattr(builtins, name):
            continue
        if kind == "value":
            solution.__dict__[name] = decode(what[0], Remote)
        elif kind == "exception":
            own = type(name, (_exception_base(what[1]),), {})
            solution.__dict__[name] = link.exceptions[what[0]] = own
        elif what[0].partition(".")[0] in sys.stdlib_module_names:
            solution.__dict__[name] = importlib.import_module(what[0])
    sys.modules["solution"] = solution
    return {"__name__": "tests", **{name: value for name, value in vars(solution).items() if name[:2] != "__"}}


def _exception_base(names: list[str]) -> type[BaseException]:
    known = (builtin_exception(name) for name in names)
    return next((kind for kind in known if kind), Exception)


def _run_text(text: str, namespace: dict[str, Any]) -> None:
    # Safe: this is a box, where the row's own code runs too.
    exec(compile(text, "<tests>", "exec"), namespace)  # noqa: S102


def _raise_late(*_: object) -> None:
    raise TestLate
