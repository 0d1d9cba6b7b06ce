"""A policy's program: run as a script, or loaded and then called by tests in another process."""

from __future__ import annotations

import builtins
import json
import os
import sys
import threading
import traceback
import types
from typing import Any, TextIO

from spmdrl.runtime.sandbox.inside.plain_values import Handles, decode, encode

FAILED, OUT_OF_MEMORY = 1, 97
"""exit codes of a program that raised, or exceeded its memory"""


def run_main(source: str) -> int:
    """Run a script as Python would; returns its exit code."""
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode, encoding="utf-8", errors="replace", closefd=False)
                                         for fd, mode in enumerate(("r", "w", "w")))  # fmt: skip
    status = _executed(source, _as_main("__main__").__dict__)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or FAILED
    return status


def serve(source: str) -> int:
    """Load a program and answer the tests' questions on descriptors 3 and 4."""
    questions, answers = os.fdopen(3, encoding="utf-8"), os.fdopen(4, "w", encoding="utf-8")
    namespace = _as_main("solution").__dict__
    status = _executed(source, namespace)
    handles = Handles()
    names = {} if status else {name: _offered(value, handles) for name, value in namespace.items() if name[:2] != "__"}
    _write(answers, {"names": names, "status": status})
    for line in questions:
        _write(answers, _answer(json.loads(line), handles))
    return status


def _as_main(name: str) -> types.ModuleType:
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "spmdrl"]:
        del sys.modules[loaded]
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    sys.argv = [f"{name}.py"]
    return module


def _executed(source: str, namespace: dict[str, Any]) -> int:
    try:
        exec(compile(source, "<program>", "exec"), namespace)  # noqa: S102
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except MemoryError:
        return OUT_OF_MEMORY
    except BaseException:
        traceback.print_exc(limit=-8)
        return FAILED
    return 0


def _offered(value: Any, handles: Handles) -> Any:
    """Describe a program's value to the tests, which rebuild modules and exceptions."""
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, type) and issubclass(value, BaseException):
        return ["exception", value.__name__, [base.__name__ for base in value.__mro__[1:]]]
    return ["value", encode(value, handles)]


def _answer(question: dict[str, Any], handles: Handles) -> dict[str, Any]:
    try:
        subject, *arguments = decode(question["of"], handles.get)
        named = dict(decode(question["named"], handles.get))
        result = _OPERATIONS[question["do"]](subject, *arguments, **named)
        # Tests also see changes that a call makes to its arguments.
        return {"result": encode(result, handles), "of": [encode(argument, handles) for argument in arguments]}
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"raised": kinds, "message": str(error)[:1000]}


_OPERATIONS: dict[str, Any] = {
    "call": lambda subject, *arguments, **named: subject(*arguments, **named),
    "attribute": lambda subject, name: getattr(subject, name),
    "items": lambda subject: [value for value, _ in zip(subject, range(100_000), strict=False)],
    "next": next,
    "item": lambda subject, key: subject[key],
    "length": len,
    "text": str,
    "representation": repr,
    "truth": bool,
    "equal": lambda subject, other: bool(subject == other),
    "is_instance": lambda subject, value: isinstance(value, subject),
}


def _write(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
