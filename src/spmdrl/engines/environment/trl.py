"""Functions and classes in the forms that TRL's trainers take, as environments: `tools` and `environment_factory`.

A turn with calls gets a message of each one's result; a turn without any ends its row.
"""

from __future__ import annotations

import asyncio
import bdb
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

from spmdrl.engines.environment.episode import End, Reply, Row, ToolCall, Turn
from spmdrl.runtime.workers.loading import load_attribute

_NO_TOOLS = ("reset", "get_reward")
_UNREAD = "unknown"
"""name of the function in a call that can't be read"""


class ToolsLost(ConnectionError):
    """Failure of what the tools run on: it ends the row, and isn't reported to the model."""


def load_tools(key: str, specs: Sequence[str]) -> Callable[[], ToolFunctions]:
    """Load functions that the model may call; the result builds their environment."""
    from transformers.utils.chat_template_utils import get_json_schema  # Takes seconds.

    functions = [load_attribute(spec, key, (), kind="function") for spec in specs]
    return partial(ToolFunctions, functions, get_json_schema)


def load_factory(key: str, specs: Sequence[str]) -> Callable[[], ToolObjects]:
    """Load a class with an object per row; the result builds the environment."""
    from transformers.utils.chat_template_utils import get_json_schema  # Takes seconds.

    return partial(ToolObjects, load_attribute(specs[0], key, (), kind="class"), get_json_schema)


class ToolFunctions:
    """Environment of functions without state."""

    def __init__(self, functions: Sequence[Callable[..., Any]], schema_of: Callable[..., dict[str, Any]]):
        self._functions = {function.__name__: function for function in functions}
        if twice := [name for name, count in Counter(one.__name__ for one in functions).items() if count > 1]:
            raise ValueError(
                f"several functions are named {', '.join(twice)}, by which the model calls them; rename one"
            )
        self.tools = [schema_of(function) for function in functions]
        self._loop = asyncio.new_event_loop()

    def open(self, row: Row) -> FunctionSession:
        return FunctionSession(self._functions, self._loop)


class ToolObjects:
    """Environment of a class: an object per row, whose public methods are the tools."""

    has_openings = True

    def __init__(self, kind: type[Any], schema_of: Callable[..., dict[str, Any]]):
        if not callable(getattr(kind, "reset", None)):
            raise ValueError(f"{kind.__name__} has no method reset(**row), which begins a row")
        methods = dict(inspect.getmembers(kind, inspect.isfunction))
        self._names = [name for name in methods if not name.startswith("_") and name not in _NO_TOOLS]
        self.tools = [schema_of(MethodType(methods[name], kind)) for name in self._names]
        self._kind, self._loop = kind, asyncio.new_event_loop()

    def open(self, row: Row) -> ToolSession:
        one = self._kind()
        columns = {name: value for name, value in row.columns.items() if name != "answer" or value is not None}
        opening = _text_of(one.reset(**{**columns, "prompt": row.prompt}))
        functions = {name: getattr(one, name) for name in self._names}
        return ToolSession(functions, self._loop, opening, getattr(one, "get_reward", None))


class ToolSession:
    """Session of a row in which the model calls functions by name."""

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], loop: asyncio.AbstractEventLoop, opening: str = "",
        get_reward: Callable[[], Any] | None = None,
    ):  # fmt: skip
        self.opening = opening
        self._functions, self._loop, self._get_reward = functions, loop, get_reward

    def step(self, turn: Turn) -> Reply | End:
        """Run the turn's calls, coroutines among them together."""
        if turn.calls or turn.problems:
            return self._loop.run_until_complete(self._results(turn))
        return End(self._loop.run_until_complete(_awaited(self._get_reward)) if self._get_reward else None)

    async def _results(self, turn: Turn) -> Reply:
        results = [*await asyncio.gather(*map(self._result, turn.calls)), *({"error": one} for one in turn.problems)]
        names = [*(call.name for call in turn.calls), *[_UNREAD] * len(turn.problems)]
        named = list(zip(names, results, strict=True))
        messages = [
            {"role": "tool", "name": name, "content": result if isinstance(result, list) else str(result)}
            for name, result in named
        ]
        return Reply(
            messages, errors=[name for name, result in named if isinstance(result, dict) and "error" in result]
        )

    async def _result(self, call: ToolCall) -> Any:
        if call.name not in self._functions:
            return {"error": f"Tool {call.name} not found."}
        try:
            return await _awaited(partial(self._functions[call.name], **call.arguments))
        except (bdb.BdbQuit, ToolsLost):
            raise
        except Exception as error:
            return {"error": str(error)}


class FunctionSession(ToolSession):
    """Session of a row whose functions keep nothing of it."""

    def restore(self, turns: Sequence[Turn]) -> None:
        """Call nothing again: what was answered stands, and calls may have effects."""


async def _awaited(function: Callable[[], Any]) -> Any:
    result = function()
    return await result if inspect.isawaitable(result) else result


def _text_of(observation: Any) -> str:
    """Return the text of what `reset` gives: a text, parts of text or None."""
    if isinstance(observation, list):
        if unread := [part for part in observation if not isinstance(part, dict) or part.get("type") != "text"]:
            raise ValueError(f"reset gave {unread[0]!r:.200}, but an opening has parts of text alone")
        return "".join(part["text"] for part in observation)
    if not isinstance(observation, str | None):
        raise TypeError(f"reset gave {observation!r:.200}, but must give a text, a list of parts of text or None")
    return observation or ""
