"""Requests in the form of OpenAI's chat completions, and the model's turns as their answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from spmdrl.engines.environment.episode import Turn

Message = dict[str, Any]


class Refused(Exception):
    """A request that gets no turn."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


class Forked(Refused):
    """A request that doesn't continue the row's conversation."""


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Named(BaseModel):
    name: str


class _Function(_Named):
    arguments: str


class _ToolCall(BaseModel):
    id: str
    function: _Function


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _Property(BaseModel):
    type: str | list[str] | None = None


class _Parameters(BaseModel):
    properties: dict[str, _Property] | None = None


class _Schema(_Named):
    parameters: _Parameters | None = None


class _Tool(BaseModel):
    function: _Schema


def _checked(tool: dict[str, Any]) -> dict[str, Any]:
    _Tool.model_validate(tool)
    return tool


class ChatRequest(BaseModel):
    """The fields that are read; sampling is the run's."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[Annotated[dict[str, Any], AfterValidator(_checked)]] | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    stream: bool | None = None
    model: str = ""

    @classmethod
    def of(cls, body: bytes) -> ChatRequest:
        """Read a body. Raises Refused for anything else."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            way_out = "a turn answers messages of text, one at a time and without logprobs"
            raise Refused(f"{where}: {first['msg']}; {way_out}") from None

    def rendered_messages(self) -> list[Message]:
        """Return the messages as chat templates take them, tools' results with `name`. Raises Refused."""
        names: dict[str | None, str] = {}
        found: list[Message] = []
        for one in self.messages:
            text = one.content if isinstance(one.content, str) else "".join(part.text for part in one.content or ())
            message: Message = {"role": "system" if one.role == "developer" else one.role, "content": text}
            if one.tool_calls:
                names |= {call.id: call.function.name for call in one.tool_calls}
                message["tool_calls"] = [_call(call.id, call.function) for call in one.tool_calls]
            if one.role == "tool":
                if one.tool_call_id not in names:
                    raise Refused(f"the tool_call_id {one.tool_call_id!r} isn't the id of an earlier tool call")
                message |= {"tool_call_id": one.tool_call_id, "name": names[one.tool_call_id]}
            found.append(message)
        return found


def _call(call_id: str, function: _Function) -> dict[str, Any]:
    try:
        arguments = json.loads(function.arguments)
    except (ValueError, RecursionError):
        arguments = function.arguments
    return {"id": call_id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


class Dialogue:
    """A row's conversation: each request repeats it and adds messages, and a turn of the model answers it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        """messages so far, the model's among them"""
        self.tools: list[dict[str, Any]] | None = None
        self._answers: dict[bytes, asyncio.Future[dict[str, Any]]] = {}
        self._last: asyncio.Future[dict[str, Any]] | None = None
        self._num_calls = 0

    def take(self, request: ChatRequest) -> tuple[asyncio.Future[dict[str, Any]], Sequence[Message]]:
        """Return a request's answer to come, and what it adds: nothing if it repeats an earlier one.

        Raises Forked if it doesn't continue the conversation, Refused if another one waits for its turn.
        """
        messages = request.rendered_messages()
        read = json.dumps([messages, request.tools], sort_keys=True).encode()
        digest = hashlib.blake2b(read).digest()
        if digest in self._answers:
            return self._answers[digest], ()
        if self._last is not None and not self._last.done():
            raise Refused("another request of this row waits for its turn; send one at a time", 409, "several_requests")
        num_known = len(self.messages)
        self._check(messages, request.tools)
        self.messages, self.tools = messages, request.tools
        self._last = self._answers[digest] = asyncio.get_running_loop().create_future()
        return self._last, messages[num_known:]

    def answer(self, turn: Turn) -> None:
        """Answer the last request by a turn of the model."""
        assert self._last is not None and not self._last.done(), "no request waits"
        calls: list[dict[str, Any]] = []
        for call in turn.calls:
            self._num_calls += 1
            # Mistral's templates demand nine letters.
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            calls.append({"id": f"call{self._num_calls:05d}", "type": "function", "function": function})
        is_read = bool(turn.content or turn.reasoning or calls) and not turn.problems
        message: Message = {"role": "assistant", "content": turn.content if is_read else turn.response}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": turn.reasoning} if turn.reasoning else {}
        self._last.set_result(message)
        kept = [_call(call["id"], _Function(**call["function"])) for call in calls]
        self.messages = [*self.messages, {**message, "tool_calls": kept} if kept else message]

    def close(self) -> None:
        """Leave the last request without an answer."""
        if self._last is not None:
            self._last.cancel()

    def _check(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> None:
        if not self.messages:
            return
        shorter = zip(self.messages, messages, strict=False)
        same = next((at for at, (old, new) in enumerate(shorter) if not _repeats(new, old)), len(messages))
        if same < len(self.messages):
            changed = f"message {same + 1} is another one" if same < len(messages) else f"it has {same} messages"
            raise Forked(
                f"a request must repeat the row's {len(self.messages)} messages and add to them, but {changed}: a "
                "rewritten history would be another row; keep all messages in their order", code="fork",
            )  # fmt: skip
        if len(messages) == len(self.messages):
            raise Forked("a request must add messages behind the model's last turn", code="fork")
        if tools != self.tools:
            raise Forked("a row's tools are those of its first request, but this one has others", code="fork")


def _repeats(new: Message, old: Message) -> bool:
    """Return True if a message is an earlier one; space around it may differ, and text beside calls may be missing."""
    calls, others = ([call["function"] for call in one.get("tool_calls", ())] for one in (new, old))
    text, other = new["content"].strip(), old["content"].strip()
    return new["role"] == old["role"] and calls == others and (text == other or bool(calls and not text))


def completion(message: Mapping[str, Any], request: ChatRequest, number: int, created: int) -> dict[str, Any]:
    """Return an answer as an object of OpenAI's API: whole, or as the only chunk of a stream."""
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    kind = "chat.completion"
    if request.stream:
        kind += ".chunk"
        calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls", ()))]
        message = {**message, "tool_calls": calls} if calls else message
    choice = {"index": 0, "delta" if request.stream else "message": message, "finish_reason": finish}
    return {
        "id": f"chatcmpl-{number}", "object": kind, "created": created, "model": request.model, "choices": [choice],
    }  # fmt: skip
