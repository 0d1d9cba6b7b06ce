"""Tests' view of a program in another process: questions to it, and proxies for its values."""

from __future__ import annotations

import builtins
import json
import os
from typing import Any

from spmdrl.runtime.sandbox.inside.plain_values import decode, encode

_link: Link


class ProgramEnded(BaseException):
    """The program's process is gone, so that no test after this one can pass."""


def connect() -> Link:
    """Return the link to the program of this process's box."""
    global _link
    _link = Link()
    return _link


class Link:
    """Questions to the program, one at a time."""

    def __init__(self) -> None:
        self._answers, self._questions = os.fdopen(3, encoding="utf-8"), os.fdopen(4, "w", encoding="utf-8")
        self.exceptions: dict[str, type[BaseException]] = {}

    def names(self) -> tuple[dict[str, Any], int]:
        """Return the program's names, and the exit code of its loading."""
        first = self._read()
        return first["names"], first["status"]

    def ask(self, what: str, *of: Any, **named: Any) -> Any:
        """Ask the program to do something; raises its exception if tests know the class, else RuntimeError."""
        question = {"do": what, "of": encode(list(of), None), "named": encode(named, None)}
        try:
            self._questions.write(json.dumps(question) + "\n")
            self._questions.flush()
        except BrokenPipeError as error:
            raise ProgramEnded from error
        answer = self._read()
        if "raised" in answer:
            known = (self.exceptions.get(name) or builtin_exception(name) for name in answer["raised"])
            raise next((kind for kind in known if kind), RuntimeError)(answer["message"])
        for own, after in zip(of[1:], answer["of"], strict=True):
            _update(own, decode(after, Remote))
        return decode(answer["result"], Remote)

    def _read(self) -> Any:
        line = self._answers.readline()
        if not line.endswith("\n"):
            raise ProgramEnded
        return json.loads(line)


class Remote:
    """Proxy for a program's value that isn't data; never equal to data, whatever its `__eq__` returns."""

    def __init__(self, number: int):
        self.__dict__["number"] = number

    def _tests_number(self) -> int:
        return self.__dict__["number"]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _link.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return _link.ask("attribute", self, name)

    def __iter__(self) -> Any:
        return iter(_link.ask("items", self))

    def __next__(self) -> Any:
        return _link.ask("next", self)

    def __contains__(self, value: Any) -> bool:
        return value in list(self)

    def __getitem__(self, key: Any) -> Any:
        return _link.ask("item", self, key)

    def __len__(self) -> int:
        return _link.ask("length", self)

    def __str__(self) -> str:
        return _link.ask("text", self)

    def __repr__(self) -> str:
        return _link.ask("representation", self)

    def __bool__(self) -> bool:
        return _link.ask("truth", self)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Remote) and _link.ask("equal", self, other)

    def __hash__(self) -> int:
        return hash(self.__dict__["number"])

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and _link.ask("is_instance", self, value)


def builtin_exception(name: str) -> type[BaseException] | None:
    """Return the built-in exception of that name."""
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


def _update(own: Any, after: Any) -> None:
    """Apply the program's changes to an argument."""
    if isinstance(own, list) and isinstance(after, list):
        own[:] = after
    elif isinstance(own, (dict, set)) and type(own) is type(after):
        own.clear()
        own.update(after)
