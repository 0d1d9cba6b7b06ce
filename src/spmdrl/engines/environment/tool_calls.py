"""Reading of a model's turn: content, reasoning and tool calls.

A tokenizer's own `response_template` reads it, if there is one. Else the chat template shows the form of calls: it
renders calls with known names and arguments, and what stands around them is what a model writes around others.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from typing import Any

from spmdrl.engines.environment.episode import ToolCall, TurnParts
from spmdrl.engines.models.conversation import Conversation
from spmdrl.engines.models.renderer import Messages, Renderer
from spmdrl.engines.models.tokenizer import StopToken
from spmdrl.nouns.settings.data_config import RowNotRendered, thought

# Words that templates leave unchanged, and that no template has of its own.
_CONTENT, _THOUGHT, _NAMES = "Tangerine", "Apricot", ("plum_a", "plum_b")
_KEYS, _VALUES = ("cherry_a", "cherry_b"), ("medlar_a", "medlar_b")
_ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))
_ASKED = [{"role": "user", "content": "?"}]
_NAME = re.compile(r"[^\s<>{}()\[\]\"'=,]+")
_NUM_SHOWN = 200
_NO_SPACE = re.compile(r"[^\s,]")
# Some templates write these so.
_AS_PYTHON = {"True": True, "False": False, "None": None}
# Models write line breaks in strings.
_JSON = json.JSONDecoder(strict=False)


def check_tools(renderer: Renderer) -> None:
    """Raise ValueError unless the model's calls can be read, and the chat template writes tools and their results."""
    if not renderer.has_template:
        raise ValueError(
            "the environment has tools, but the tokenizer has no chat template; set data.chat_template_file"
        )
    if "tools" not in renderer.tokenizer.raw.get_chat_template(tools=[{}]):
        raise ValueError("the environment has tools, but the chat template writes none; set data.chat_template_file")
    if getattr(renderer.tokenizer.raw, "response_template", None) is None:
        # Raises ValueError if it can't be derived.
        _ = TurnReader(renderer).form
    Conversation(renderer).after_turn(_ASKED, {}, 0, [{"role": "tool", "name": _NAMES[0], "content": _CONTENT}])


def find_forks(renderer: Renderer, prompt: str | Messages, columns: Mapping[str, Any]) -> list[str]:
    """Return `Conversation.forks` behind tools' results, or the user's messages if the environment has no tools.

    A program's messages may be of either role, behind prompts of its own. Environments whose turns aren't read may
    continue a turn, which no message does.
    """
    if renderer.own_tools is None:
        return []
    if renderer.has_own_prompts:
        prompt, columns = _ASKED, {}
    roles = ["tool"] if renderer.own_tools else ["user", "tool"] if renderer.has_own_prompts else ["user"]
    return [line for role in roles for line in Conversation(renderer).forks(prompt, columns, role)]


Types = Mapping[str, Mapping[str, Any]]
"""schemas of the parameters of each function, by their names"""


@dataclass(frozen=True)
class _Form(ABC):
    """Form of calls in text."""

    mark: str
    """text in front of each call; empty if a call is all of the content"""
    outer: str
    """text in front of the first mark"""

    def find(self, text: str, start: int) -> int:
        """Return the place of the next call, -1 if there is none."""
        return text.find(self.mark, start)

    @abstractmethod
    def read(self, text: str, start: int, types: Types) -> tuple[list[ToolCall], int]:
        """Read calls behind a mark, and the place behind them. Raises ValueError if there is none."""


@dataclass(frozen=True)
class _JsonCalls(_Form):
    """Calls as JSON with a name and arguments, or a list of such: Hermes, Qwen, Llama 3, Mistral."""

    name: str
    """key of the name"""
    arguments: str
    """key of the arguments"""

    def find(self, text: str, start: int) -> int:
        if self.mark:
            return super().find(text, start)
        found = re.match(rf'\s*\{{\s*"{re.escape(self.name)}"', text)
        return -1 if start or found is None else 0

    def read(self, text: str, start: int, types: Types) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        while not calls or text.startswith("{", _behind_space(text, start)):
            value, start = _JSON.raw_decode(text, _behind_space(text, start))
            for given in value if isinstance(value, list) else [value]:
                one = next((one for one in _objects(given) if self.name in one), {})
                calls.append(_call(one.get(self.name), one.get(self.arguments, {})))
        return calls, start


@dataclass(frozen=True)
class _NamedCalls(_Form):
    """A name and arguments as JSON behind it: DeepSeek, gpt-oss."""

    def read(self, text: str, start: int, types: Types) -> tuple[list[ToolCall], int]:
        name, brace = _NAME.match(text, _behind_space(text, start)), text.find("{", start)
        if name is None or brace < 0:
            raise ValueError("a name and a JSON object must follow")
        arguments, stop = _JSON.raw_decode(text, brace)
        return [_call(name[0], arguments)], stop


@dataclass(frozen=True)
class _ParameterCalls(_Form):
    """A name and parameters in tags: Qwen3-Coder, Nemotron, GLM."""

    parameter: re.Pattern[str]
    """matches a parameter's name and its value"""
    close: str
    """text that ends a call"""

    def read(self, text: str, start: int, types: Types) -> tuple[list[ToolCall], int]:
        name = _NAME.match(text, _behind_space(text, start))
        if name is None:
            raise ValueError("the function's name must follow")
        arguments: dict[str, Any] = {}
        place = name.end()
        while True:
            found, close = self.parameter.search(text, place), text.find(self.close, place)
            if close < 0:
                raise ValueError(f"{self.close!r} must follow")
            if found is None or close < found.start():
                return [_call(name[0], arguments)], close + len(self.close)
            arguments[found[1]] = _typed(found[2], types.get(name[0], {}).get(found[1]))
            place = found.end()


class TurnReader:
    """Reader of what a model wrote, in one tokenizer's chat template."""

    def __init__(self, renderer: Renderer):
        self._renderer, self._tokenizer = renderer, renderer.tokenizer

    def read(self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> TurnParts:
        """Read the tokens of a turn; `tools` are schemas of functions, which say the types of arguments in tags."""
        ends = {end.token_id for end in self._ends}
        if getattr(self._tokenizer.raw, "response_template", None) is not None:
            return self._by_response_template(self._tokenizer.decode_all(ids), tools)
        reasoning, text = self._thought(self._tokenizer.decode_all(ids[:-1] if ids and ids[-1] in ends else ids))
        if not tools:
            return TurnParts(content=self._content(text), reasoning=reasoning)
        form, calls, problems = self.form, [], []
        place = first = form.find(text, 0)
        while place >= 0:
            start = place + 1
            try:
                found, start = form.read(text, place + len(form.mark), _types(tools))
                calls += found
            except (ValueError, RecursionError) as error:
                problems.append(f"The tool call {text[place : place + _NUM_SHOWN]!r} can't be read: {error}")
            place = form.find(text, start)
        content = text if first < 0 else text[:first].rstrip().removesuffix(form.outer)
        return TurnParts(
            content=self._content(content), reasoning=reasoning, calls=tuple(calls), problems=tuple(problems)
        )

    @cached_property
    def form(self) -> _Form:
        """Form of calls in the chat template. Raises ValueError if it has none that can be derived."""
        one, two = self._written(1), self._written(2)
        form = None if one is None else _json_form(one) or _form_in_text(one, two, self._ends)
        if form is None:
            raise ValueError(
                "the form of tool calls can't be derived from the chat template, which "
                + ("writes none" if one is None else f"writes {one[:_NUM_SHOWN]!r}")
                + '; describe it by "response_template" in tokenizer_config.json, which transformers reads'
            )
        return form

    @cached_property
    def _ends(self) -> list[StopToken]:
        end = self._renderer.end_of_turn
        return [*self._tokenizer.stop_tokens, *([end] if end else [])]

    @cached_property
    def _plain(self) -> str:
        """A text without calls, as the template writes it."""
        return self._turn({"content": _CONTENT})

    def _turn(self, parts: Mapping[str, Any]) -> str:
        return self._renderer.rendered([*_ASKED, {"role": "assistant", **parts}], {})

    def _written(self, num_calls: int, **more: Any) -> str | None:
        """Return the text of calls as the template writes them, through the turn's end; None if it doesn't."""
        for content in ("", None):
            for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
                calls = [
                    {"type": "function", "id": f"call{number:05d}", "function": {"name": name, "arguments": arguments}}
                    for number, name in enumerate(_NAMES[:num_calls])
                ]
                try:
                    text = self._turn({"content": content, "tool_calls": calls, **more})
                except RowNotRendered:
                    continue
                text = text[len(commonprefix([self._plain, text])) :]
                if all(word in text for word in (*_NAMES[:num_calls], *_KEYS, *_VALUES)):
                    return text
        return None

    @cached_property
    def _frame(self) -> tuple[str, str] | None:
        """Text from the conversation's beginning to a thought, and the one behind it; None if there are no thoughts."""
        text = self._turn({"content": _CONTENT, **thought(_THOUGHT)})
        before, found, behind = text.partition(_THOUGHT)
        if not found or _CONTENT not in behind:
            return ("<think>", "</think>") if "</think>" in self._renderer.tokenizer.raw.chat_template else None
        close = behind.partition(_CONTENT)[0]
        with_calls = (self._written(1, **thought(_THOUGHT)) or "").partition(_THOUGHT)[2]
        return before.rstrip(), commonprefix([close, with_calls]).strip() or close.strip()

    def _thought(self, text: str) -> tuple[str, str]:
        """Split a turn into reasoning and the rest; reasoning that isn't closed has no rest."""
        if self._frame is None:
            return "", text
        before, close = self._frame
        thought, is_closed, rest = text.partition(close)
        bare = _without_head(thought.lstrip(), before)
        is_begun = len(bare) < len(thought.lstrip()) or self._begun.rstrip() == before
        return (bare.strip(), rest) if is_closed or is_begun else ("", text)

    @cached_property
    def _begun(self) -> str:
        return self._renderer.rendered(_ASKED, {}, add_generation_prompt=True)

    def _content(self, text: str) -> str:
        return _without_head(text.strip(), self._plain.partition(_CONTENT)[0].rstrip()).strip()

    def _by_response_template(self, text: str, tools: Sequence[Mapping[str, Any]]) -> TurnParts:
        try:
            parts = self._tokenizer.raw.parse_response(text, prefix=self._begun, tools=list(tools))
            functions = [one.get("function", one) for one in parts.get("tool_calls") or []]
            calls = tuple(_call(one.get("name"), one.get("arguments") or {}) for one in functions)
        except (ValueError, RecursionError) as error:
            return TurnParts(content=text, problems=(f"The turn can't be read: {error}",))
        thoughts = (parts.get(key) for key in ("reasoning_content", "reasoning", "thinking"))
        return TurnParts(content=parts.get("content") or "", reasoning=next(filter(None, thoughts), ""), calls=calls)


def _json_form(one: str) -> _Form | None:
    """Find calls of which the arguments, or all, are a JSON object."""
    for brace in (found.start() for found in re.finditer("{", one[: one.index(_KEYS[0])])):
        try:
            value, stop = _JSON.raw_decode(one, brace)
        except ValueError:
            continue
        holder = next((each for each in _objects(value) if _NAMES[0] in each.values()), None)
        if holder is not None:
            keys = {key for key, entry in holder.items() if entry in (_ARGUMENTS, json.dumps(_ARGUMENTS))}
            name = next(key for key, entry in holder.items() if entry == _NAMES[0])
            return _JsonCalls(one[:brace].strip().removesuffix("[").strip(), "", name, keys.pop()) if keys else None
    return None


def _form_in_text(one: str, two: str | None, ends: Sequence[StopToken]) -> _Form | None:
    """Find calls with the name outside of JSON, and arguments in JSON or in tags."""
    key = one.index(_KEYS[0])
    name = one.rindex(_NAMES[0], 0, key)
    opened = one[:name]
    if two is not None:
        second = two.rindex(_NAMES[1], 0, two.rindex(_KEYS[0]))
        opened = _common_suffix(opened, two[two.index(_VALUES[1]) + len(_VALUES[1]) : second])
    mark = opened.strip().rpartition("\n")[2]
    outer = one[:name].rstrip().removesuffix(mark).strip()
    # Some templates write a name twice, and thoughts as calls.
    if not mark or _NAMES[0] in outer:
        return None
    brace = one.rfind("{", name, key)
    if brace >= 0:
        try:
            return _NamedCalls(mark, outer) if _JSON.raw_decode(one, brace)[0] == _ARGUMENTS else None
        except ValueError:
            return None
    first, between, behind, _, rest = re.split("|".join((*_KEYS, *_VALUES)), one[name + len(_NAMES[0]) :])
    before = _common_suffix(first, behind).rpartition("\n")[2]
    after = behind.removesuffix(before).rstrip()
    rest = rest.removeprefix(after)
    for end in ends:
        rest = rest.partition(end.text)[0]
    if not (before and between.strip() and after.strip() and rest.strip()):
        return None
    parameter = rf"{re.escape(before)}([^\n]+?){_pattern(between)}(.*?){_pattern(after)}"
    return _ParameterCalls(mark, outer, re.compile(parameter, re.DOTALL), rest.split()[0])


def _pattern(text: str) -> str:
    """Return a pattern of a text between values: the spaces at its ends may be absent, others be any."""
    words = text.split()
    first, last = text.index(words[0]), text.rindex(words[-1]) + len(words[-1])
    ends = [f"(?:{re.escape(space)})?" if space else "" for space in (text[:first], text[last:])]
    return r"\s*".join(map(re.escape, words)).join(ends)


def _common_suffix(*texts: str) -> str:
    return commonprefix([text[::-1] for text in texts])[::-1]


def _without_head(text: str, head: str) -> str:
    """Remove the longest end of `head` that begins with a mark's `<` and that the text begins with."""
    for found in re.finditer("<", head):
        if text.startswith(head[found.start() :]):
            return text[len(head) - found.start() :]
    return text


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSON value, outer ones first."""
    if isinstance(value, dict):
        yield value
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
        yield from _objects(entry)


def _call(name: Any, arguments: Any) -> ToolCall:
    if isinstance(arguments, str):
        arguments = _JSON.decode(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError(f"it needs the function's name and an object of arguments, not {name!r} and {arguments!r:.60}")
    return ToolCall(name, arguments)


def _types(tools: Sequence[Mapping[str, Any]]) -> Types:
    functions = [tool.get("function", tool) for tool in tools]
    return {one.get("name", ""): (one.get("parameters") or {}).get("properties") or {} for one in functions}


def _typed(value: str, schema: Any) -> Any:
    """Return the value of text in tags: a string if the function takes strings there; else JSON, if it is that."""
    if isinstance(schema, Mapping) and "string" in (schema.get("type") or ""):
        return value
    try:
        return _JSON.decode(value)
    except (ValueError, RecursionError):
        return _AS_PYTHON.get(value, value)


def _behind_space(text: str, start: int) -> int:
    found = _NO_SPACE.search(text, start)
    return found.start() if found else len(text)
