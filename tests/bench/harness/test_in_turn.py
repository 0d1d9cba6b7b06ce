"""Contenders run in turn, and one that fails ends alone."""

from __future__ import annotations

import pytest

from tests.bench.harness.in_turn import in_turn


def test_contenders_take_turns_until_an_optional_one_fails():
    calls = []

    def contender(name: str, *, fails_at: int = -1) -> int:
        calls.append(name)
        if calls.count(name) == fails_at:
            raise OSError("long\nshort")
        return len(calls)

    turns = in_turn({"a": lambda: contender("a"), "b": lambda: contender("b", fails_at=2)}, 3, optional=["b"])
    assert calls == ["a", "b", "a", "b", "a"]
    assert (turns["a"].results, turns["a"].missing) == ([1, 3, 5], None)
    assert (turns["b"].results, turns["b"].missing) == ([2], "short")
    with pytest.raises(OSError, match="short"):
        in_turn({"b": lambda: contender("b", fails_at=3)}, 1)
