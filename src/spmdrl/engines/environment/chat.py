"""Requests for turns of the model, as messages or as tokens, and turns as their answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, Field, NonNegativeInt, ValidationError

from spmdrl.engines.environment.episode import Opening, Reply, Tokens, Turn
from spmdrl.nouns.settings.data_config import thought

if TYPE_CHECKING:
    from typing_extensions import Self

Message = dict[str, Any]


class Refused(Exception):
    """A request that gets no turn."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


class Forked(Refused):
    """A request that doesn't continue the row's conversation."""


Answer: TypeAlias = "asyncio.Future[tuple[Message, Turn]]"
"""A turn to come: its message, and all of it."""


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
    reasoning_content: str | None = None
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


class _Request(BaseModel):
    """Fields that are read of a request; sampling is the run's."""

    model: str = ""

    @classmethod
    def of(cls, body: bytes) -> Self:
        """Read a body. Raises Refused for anything else."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise Refused(f"{where}: {first['msg']}; a turn answers text, one request at a time") from None


class TokenRequest(_Request):
    """A conversation as tokens, in the form of vLLM's `/inference/v1/generate`."""

    token_ids: list[NonNegativeInt] = Field(min_length=1)
    features: None = None
    content_parts: None = None
    stream: Literal[False] | None = None
    tools: ClassVar[None] = None

    def items(self) -> list[int]:
        """Return the conversation."""
        return self.token_ids

    def reading(self, new: Sequence[int], *, opens: bool) -> Tokens:
        """Return what the model reads before its turn."""
        return Tokens(new, opens)

    def answered(self, turn: Turn, num_calls: int) -> tuple[Message, list[int]]:
        """Return a turn as the API gives it, and as later requests repeat it."""
        return {}, list(turn.token_ids)

    def body(self, message: Message, turn: Turn, number: int, created: int) -> dict[str, Any]:
        """Return the answer's object."""
        choice = {"index": 0, "token_ids": turn.token_ids, "logprobs": _logprobs(turn), "finish_reason": "stop"}
        return {"request_id": f"generate-{number}", "choices": [choice], "usage": _usage(turn)}


class ChatRequest(_Request):
    """A conversation as messages, in the form of OpenAI's `/v1/chat/completions`."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[Annotated[dict[str, Any], AfterValidator(_checked)]] | None = None
    n: Literal[1] | None = None
    logprobs: bool | None = None
    stream: bool | None = None

    def items(self) -> list[Message]:
        """Return the messages as chat templates take them, tools' results with `name`. Raises Refused."""
        names: dict[str | None, str] = {}
        found: list[Message] = []
        for one in self.messages:
            text = one.content if isinstance(one.content, str) else "".join(part.text for part in one.content or ())
            message: Message = {"role": "system" if one.role == "developer" else one.role, "content": text}
            if one.reasoning_content:
                message |= thought(one.reasoning_content)
            if one.tool_calls:
                names |= {call.id: call.function.name for call in one.tool_calls}
                message["tool_calls"] = [_call(call.id, call.function) for call in one.tool_calls]
            if one.role == "tool":
                if one.tool_call_id not in names:
                    raise Refused(f"the tool_call_id {one.tool_call_id!r} isn't the id of an earlier tool call")
                message |= {"tool_call_id": one.tool_call_id, "name": names[one.tool_call_id]}
            found.append(message)
        return found

    def reading(self, new: Sequence[Message], *, opens: bool) -> Opening | Reply:
        """Return what the model reads before its turn."""
        return Opening(new, tools=self.tools) if opens else Reply(new)

    def answered(self, turn: Turn, num_calls: int) -> tuple[Message, list[Message]]:
        """Return a turn as the API gives it, and as later requests repeat it; `num_calls` were made before."""
        calls: list[dict[str, Any]] = []
        for number, call in enumerate(turn.calls, num_calls + 1):
            # Mistral's templates demand nine letters.
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            calls.append({"id": f"call{number:05d}", "type": "function", "function": function})
        is_read = bool(turn.content or turn.reasoning or calls) and not turn.problems
        message: Message = {"role": "assistant", "content": turn.content if is_read else turn.response}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": turn.reasoning} if turn.reasoning else {}
        kept = [_call(call["id"], _Function(**call["function"])) for call in calls]
        return message, [{**message, "tool_calls": kept} if kept else message]

    def body(self, message: Message, turn: Turn, number: int, created: int) -> dict[str, Any]:
        """Return the answer's object: whole, or as the only chunk of a stream."""
        finish, kind = "tool_calls" if message.get("tool_calls") else "stop", "chat.completion"
        if self.stream:
            kind += ".chunk"
            calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls", ()))]
            message = {**message, "tool_calls": calls} if calls else message
        choice = {"index": 0, "delta" if self.stream else "message": message, "finish_reason": finish}
        choice |= {"logprobs": _logprobs(turn)} if self.logprobs else {}
        return {
            "id": f"chatcmpl-{number}", "object": kind, "created": created, "model": self.model, "choices": [choice],
            "usage": _usage(turn),
        }  # fmt: skip


FORMS: Mapping[str, type[ChatRequest] | type[TokenRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/inference/v1/generate": TokenRequest,
}
"""requests by their paths"""


def _logprobs(turn: Turn) -> dict[str, Any]:
    """Return log-probs in OpenAI's form, with tokens named as vLLM does: not each has a text of its own."""
    both = zip(turn.token_ids, turn.logprobs, strict=True)
    named = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in both]
    return {"content": [{**one, "bytes": None, "top_logprobs": []} for one in named]}


def _usage(turn: Turn) -> dict[str, int]:
    before, new = turn.num_tokens_before, len(turn.token_ids)
    return {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}


def _call(call_id: str, function: _Function) -> dict[str, Any]:
    try:
        arguments = json.loads(function.arguments)
    except (ValueError, RecursionError):
        arguments = function.arguments
    return {"id": call_id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


class Dialogue:
    """A row's conversation: each request repeats it and adds to it, and a turn of the model answers it.

    With `splits`, one that doesn't repeat it begins another conversation of the row.
    """

    def __init__(self, *, splits: bool = False) -> None:
        self._splits = splits
        self.items: list[Any] = []
        """messages or tokens so far, the model's among them"""
        self._answers: dict[bytes, Answer] = {}
        self._last: tuple[ChatRequest | TokenRequest, Answer] | None = None
        self._num_calls = 0

    @property
    def is_waited_for(self) -> bool:
        """True while a request waits for a turn."""
        return self._last is not None and not self._last[1].done()

    def take(self, request: ChatRequest | TokenRequest) -> tuple[Answer, Tokens | Opening | Reply | None]:
        """Return a request's answer to come, and what it adds: nothing if it repeats an earlier one, all if it begins.

        Raises Forked if it doesn't continue the conversation, Refused if another one waits for its turn.
        """
        items: list[Any] = [*request.items()]
        digest = hashlib.blake2b(json.dumps([items, request.tools], sort_keys=True).encode()).digest()
        if digest in self._answers:
            return self._answers[digest], None
        if self.is_waited_for:
            raise Refused("another request of this row waits for its turn; send one at a time", 409, "several_requests")
        num_known = 0
        if self._last is not None:
            try:
                self._check(self._last[0], request, items)
                num_known = len(self.items)
            except Forked:
                if not self._splits:
                    raise
        reading = request.reading(items[num_known:], opens=not num_known)
        self.items, self._last = items, (request, asyncio.get_running_loop().create_future())
        self._answers[digest] = self._last[1]
        return self._last[1], reading

    def answer(self, turn: Turn) -> None:
        """Answer the last request by a turn of the model."""
        assert self._last is not None and self.is_waited_for, "no request waits"
        request, answer = self._last
        message, kept = request.answered(turn, self._num_calls)
        self._num_calls += len(turn.calls)
        self.items = [*self.items, *kept]
        answer.set_result((message, turn))

    def close(self) -> None:
        """Leave the last request without an answer."""
        if self._last is not None:
            self._last[1].cancel()

    def _check(self, last: ChatRequest | TokenRequest, request: ChatRequest | TokenRequest, items: list[Any]) -> None:
        if type(request) is not type(last):
            raise Forked("a row's requests are all of one form, messages or tokens", code="fork")
        kind = "token" if isinstance(request, TokenRequest) else "message"
        shorter = zip(self.items, items, strict=False)
        same = next((at for at, (old, new) in enumerate(shorter) if not _repeats(new, old)), len(items))
        if same < len(self.items):
            changed = f"{kind} {same + 1} is another one" if same < len(items) else f"it has {same} {kind}s"
            raise Forked(
                f"a request must repeat the row's {len(self.items)} {kind}s and add to them, but {changed}: a "
                f"rewritten history would be another row; keep all {kind}s in their order, or set environment.on_fork: "
                "split", code="fork",
            )  # fmt: skip
        if len(items) == len(self.items):
            raise Forked(f"a request must add {kind}s behind the model's last turn", code="fork")
        if request.tools != last.tools:
            raise Forked("a row's tools are those of its first request, but this one has others", code="fork")


def _repeats(new: Any, old: Any) -> bool:
    """Return True if a token or message is an earlier one; space around messages may differ, and text beside calls."""
    if isinstance(new, int):
        return bool(new == old)
    calls, others = ([call["function"] for call in one.get("tool_calls", ())] for one in (new, old))
    text, other = new["content"].strip(), old["content"].strip()
    return new["role"] == old["role"] and calls == others and (text == other or bool(calls and not text))
