"""Conversion of an environment's messages to tokens that follow what a model wrote; nothing is tokenized twice.

A turn of the model is never rendered: its tokens stay as they were sampled. The template renders the prompt, a probe
in the turn's place and the new messages; what follows the probe's end of turn is appended. Special tokens in the new
messages are read as letters, the template's own as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from spmdrl.engines.models.renderer import Message, Messages, Renderer, lengthened, unused_word
from spmdrl.nouns.settings.data_config import RowNotRendered, thought

Exchange = tuple[Message, Messages]
"""A model's turn and its reply."""
_ROLES = ("user", "tool")
_NUM_BEFORE, _NUM_SHOWN = 24, 80


@dataclass(frozen=True)
class _Form:
    """Form of a model's turn behind which the template writes messages of some roles."""

    num_calls: int
    content: str | None
    """beside tool calls"""
    has_text_arguments: bool
    end: str = ""
    """token that ends the turn there; empty without one"""
    skipped: int = 0
    """letters of the turn behind the probe, where no token ends it"""

    def turn(self, results: Messages, probe: str) -> dict[str, Any]:
        """Return a turn with the probe last in it: that calls the functions of these results, or has no call."""
        if not self.num_calls:
            return {"role": "assistant", "content": probe}
        arguments = {"argument": probe}
        calls = [
            {"type": "function", "id": result["tool_call_id"], "function": {
                "name": result["name"], "arguments": json.dumps(arguments) if self.has_text_arguments else arguments,
            }}
            for result in results[: self.num_calls]
        ]  # fmt: skip
        return {"role": "assistant", "content": self.content, "tool_calls": calls}


class Conversation:
    """Tokens of conversations in one tokenizer's chat template."""

    def __init__(self, renderer: Renderer):
        self._renderer, self._tokenizer = renderer, renderer.tokenizer
        self._forms: dict[tuple[str, ...], _Form] = {}

    def begun(self, messages: Messages, columns: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation's first messages, through the start of the model's turn.

        Texts of messages, and of the functions in the column `tools`, have no special tokens. Raises ValueError for
        messages that the template doesn't write.
        """
        if messages[-1].get("role") not in _ROLES:
            raise ValueError(
                f"the last message has the role {messages[-1].get('role')!r}, but the model answers one of "
                f"{' or '.join(_ROLES)}"
            )
        cut = _unused_letter([*messages, *(columns.get("tools") or ())])
        columns = {**columns, "tools": self._cut(columns.get("tools"), cut)}
        asked = [self._cut(message, cut) for message in self._renderer.messages(messages, columns)]
        return self._tokens(self._written(asked, columns), cut)

    def anew(
        self, prompt: str | Messages, columns: Mapping[str, Any], exchanges: Sequence[Exchange], *, opening: str = ""
    ) -> list[int]:
        """Return the tokens of a whole conversation, as the template writes it, through the start of the next turn.

        Special tokens are those of the prompt, behind which the `opening` stands, and of the template: turns and
        replies have none. Raises ValueError for messages that the template doesn't write.
        """
        *before, last = self._renderer.messages(prompt, columns)
        said = self.messages_of(exchanges)
        cut = _unused_letter([*before, last, *said, {"content": opening}])
        said = [self._cut(message, cut) for message in said]
        if last["role"] == "assistant":
            # The first turn continues this message.
            said[0]["content"] = f"{last.get('content') or ''}{said[0]['content']}"
        else:
            before.append(lengthened(last, self._cut(opening, cut)) if opening else last)
        return self._tokens(self._written([*before, *said], columns), cut, self._tokenizer.encode)

    def messages_of(self, exchanges: Sequence[Exchange]) -> list[dict[str, Any]]:
        """Return turns and replies one after another, a turn's calls with the ids of their results."""
        found: list[dict[str, Any]] = []
        for turn, reply in exchanges:
            checked = [self._checked(number, message) for number, message in enumerate(reply)]
            ids = [message["tool_call_id"] for message in checked if message["role"] == "tool"]
            calls = [
                {**call, "id": ids[number] if number < len(ids) else _call_id(number)}
                for number, call in enumerate(turn.get("tool_calls", ()))
            ]
            found += [{**turn, **({"tool_calls": calls} if calls else {})}, *checked]
        return found

    def _written(self, messages: Messages, columns: Mapping[str, Any]) -> str:
        """Return the text of a conversation; some templates take the arguments of calls as text alone."""
        try:
            return self._renderer.rendered(messages, columns, add_generation_prompt=True)
        except RowNotRendered:
            texts = _with_text_arguments(messages)
            if texts == messages:
                raise
            return self._renderer.rendered(texts, columns, add_generation_prompt=True)

    def after_turn(self, prompt: str | Messages, columns: Mapping[str, Any], last_id: int, new: Messages) -> list[int]:
        """Return the tokens that follow a model's turn: its end, unless `last_id` is that, and the new messages.

        A turn that a stop string or another token ended gets the template's end of turn. `new` are the user's messages
        and tools' results, these with `name`; their texts have no special tokens. Raises ValueError for messages that
        the template doesn't write there.
        """
        if not self._renderer.uses_template(prompt):
            raise ValueError(
                "an environment's messages need the chat template, but the prompt is plain text; answer with "
                "Observation(text), or set data.chat_template: always"
            )
        new = [self._checked(number, message) for number, message in enumerate(new)]
        prompt = self._renderer.messages(prompt, columns)
        if prompt[-1]["role"] == "assistant":
            # The model's turn continues this message.
            prompt.pop()
        cut = _unused_letter([*prompt, *new])
        new = [self._cut(message, cut) for message in new]
        roles = tuple(message["role"] for message in new)
        if roles not in self._forms:
            self._forms[roles] = self._form(prompt, columns, new)
        form, end_of_turn = self._forms[roles], self._renderer.end_of_turn
        tail = self._tail(form, prompt, columns, new, alone=False)
        tail = tail[tail.index(form.end) if form.end else form.skipped :]
        ids = self._tokens(tail, cut)
        ends = self._tokenizer.encode(form.end)
        is_ended = form.end and (last_id == ends[-1] or (end_of_turn is not None and last_id == end_of_turn.token_id))
        return ids[len(ends) :] if is_ended else ids

    def _tokens(self, text: str, cut: str, encode_first: Callable[[str], list[int]] | None = None) -> list[int]:
        """Return the tokens of a text without the letters that cut special tokens; in mid-text by default."""
        # JSON in ASCII escapes the letter.
        first, *parts = re.split(rf"{cut}|\\u{ord(cut):04x}", text)
        encode = self._tokenizer.encode_behind
        return [*(encode_first or encode)(first), *(token_id for part in parts if part for token_id in encode(part))]

    def forks(self, prompt: str | Messages, columns: Mapping[str, Any], role: str) -> list[str]:
        """Describe where the template writes turns otherwise once messages of a role follow: at most one line per case.

        A row has its turns as they were sampled; a server that renders conversations anew shows others to the model.
        """
        if not self._renderer.uses_template(prompt):
            return []
        begun = self._renderer.messages(prompt, columns)
        if begun[-1]["role"] == "assistant":
            begun.pop()
        reply = self._checked(0, {"role": role, "name": "function", "content": "Well."})
        probe = unused_word([*begun, reply])
        cases: dict[str, dict[str, str]] = {"without a thought": {}, "with a thought": thought(f"Hm, {probe}.")}
        try:
            turn = self._form(begun, columns, [reply]).turn([reply], probe)
            found = [self._fork(begun, columns, {**turn, **more}, reply, probe) for more in cases.values()]
        except RowNotRendered:
            # Such messages end their rows.
            return []
        return [
            f"the chat template of {self._renderer.place} writes a turn {case} otherwise once a {role}'s message "
            f"follows: {fork}; rows keep what the model wrote, so a server that renders conversations anew shows it "
            "others; name a template that keeps turns in data.chat_template_file, or set data.chat_template_kwargs"
            for case, fork in zip(cases, found, strict=True)
            if fork is not None
        ]

    def _fork(
        self, begun: Messages, columns: Mapping[str, Any], turn: Mapping[str, Any], reply: Mapping[str, Any], probe: str
    ) -> str | None:
        """Compare conversations that end with a turn with the one in which two such turns have replies."""
        whole = self._renderer.rendered([*begun, turn, reply, turn, reply], columns, add_generation_prompt=True)
        ends = [*self._tokenizer.stop_tokens, *filter(None, [self._renderer.end_of_turn])]
        for later in ([], [reply, turn]):
            written, _, tail = self._renderer.rendered([*begun, turn, *later], columns).rpartition(probe)
            # What a template writes behind the end isn't the model's.
            stop = min((tail.index(end.text) + len(end.text) for end in ends if end.text in tail), default=None)
            written += probe + (tail.rstrip() if stop is None else tail[:stop])
            if not whole.startswith(written):
                start = max(0, len(commonprefix([written, whole])) - _NUM_BEFORE)
                shown = (text[start : start + _NUM_SHOWN] for text in (written, whole))
                return "{!r} becomes {!r}".format(*shown)
        # Templates such as DeepSeek-R1's take thoughts out of contents, in the last turn too.
        said, takes_out = turn.get("thinking", ""), "</think>" in str(self._tokenizer.raw.chat_template)
        return f"{said!r} is left out" if takes_out and said not in whole else None

    def _checked(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        role = message.get("role")
        if role not in _ROLES:
            raise ValueError(
                f"an environment's message has the role {role!r}, but only {' and '.join(_ROLES)} follow a model's turn"
            )
        if role == "tool" and not isinstance(message.get("name"), str):
            raise ValueError(f"a tool's result lacks 'name', the function's, which templates write: {message!r:.80}")
        return {"tool_call_id": _call_id(number), **message} if role == "tool" else dict(message)

    def _cut(self, value: Any, cut: str) -> Any:
        """Put a letter into each special token of a message's texts, so that it is none."""
        if isinstance(value, Mapping):
            return {key: self._cut(entry, cut) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._cut(entry, cut) for entry in value]
        return cut.join(self._tokenizer.without_marks(value)) if isinstance(value, str) else value

    def _tail(self, form: _Form, prompt: Messages, columns: Mapping[str, Any], new: Messages, *, alone: bool) -> str:
        """Return the text behind the probe: of the turn alone, or through the start of the next one."""
        probe = unused_word([*prompt, *new])
        turn = form.turn([message for message in new if message["role"] == "tool"], probe)
        messages = [*prompt, turn] if alone else [*prompt, turn, *new]
        _, found, tail = self._renderer.rendered(messages, columns, add_generation_prompt=not alone).rpartition(probe)
        if not found:
            raise RowNotRendered("it leaves out the turn")
        return tail

    def _form(self, prompt: Messages, columns: Mapping[str, Any], new: Messages) -> _Form:
        """Find a form of the model's turn behind which the template writes all new messages, and the turn's end."""
        word = unused_word(prompt)
        new = [{**message, "content": f"{word}x{number}x"} for number, message in enumerate(new)]
        num_results = sum(message["role"] == "tool" for message in new)
        forms = [
            _Form(num_calls, content, has_text_arguments)
            for num_calls in dict.fromkeys((num_results, min(num_results, 1)))
            for content in ("", None)
            for has_text_arguments in (False, True)
        ]
        problem = ""
        for form in [*forms, _Form(0, None, False)]:
            try:
                tail, alone = (self._tail(form, prompt, columns, new, alone=alone) for alone in (False, True))
            except RowNotRendered as error:
                problem = problem or f" ({error})"
                continue
            if all(message["content"] in tail for message in new):
                return replace(form, **self._end(tail.partition(f"{word}x0x")[0], alone))
        raise RowNotRendered(
            f"the chat template doesn't write messages of the roles {', '.join(m['role'] for m in new)} behind the "
            f"model's turn{problem}; answer with messages that it writes, or give data.chat_template_file"
        )

    def _end(self, tail: str, alone: str) -> dict[str, Any]:
        """Return the end of a turn from the text between it and a next message, and the text behind it alone."""
        own, stops = self._renderer.end_of_turn, [stop.text for stop in self._tokenizer.stop_tokens]
        found = {tail.index(text): text for text in [*stops, *([own.text] if own else [])] if text in tail}
        if found:
            return {"end": found[min(found)]}
        if own is not None and alone.startswith(own.text) and (other := self._tokenizer.first_special(tail)):
            # Templates may end the last turn by another token, such as gpt-oss's <|return|>.
            return {"end": other.text}
        return {"skipped": len(commonprefix([tail, alone]).rstrip())}


def _with_text_arguments(value: Any) -> Any:
    """Replace the arguments of calls by JSON."""
    if isinstance(value, Mapping):
        return {
            key: json.dumps(entry, ensure_ascii=False) if key == "arguments" and isinstance(entry, Mapping)
            else _with_text_arguments(entry)
            for key, entry in value.items()
        }  # fmt: skip
    return [*map(_with_text_arguments, value)] if isinstance(value, list) else value


def _call_id(number: int) -> str:
    # Mistral's templates demand nine letters.
    return f"call{number:05d}"


def _unused_letter(messages: Messages) -> str:
    """Return a letter without a meaning that these messages lack."""
    text = json.dumps(list(messages), ensure_ascii=False, default=str)
    return next(letter for letter in map(chr, range(0xE000, 0xF900)) if letter not in text)
