"""Strangers and programs attack the server of programs' requests: each costs its own row at most."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp

from spmdrl.engines.environment import endpoint as endpoint_module
from spmdrl.engines.environment.chat import ChatRequest, Dialogue, TokenRequest
from spmdrl.engines.environment.endpoint import MAX_BODY_BYTES, Door, Endpoint
from spmdrl.engines.environment.episode import Tokens, Turn
from spmdrl.nouns.settings.data_config import thought

PATH = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
HUGE = b'{"messages": [{"role": "user", "content": "' + b"x" * MAX_BODY_BYTES + b'"}]}'


@dataclass
class Rows:
    """A server with rows, whose turns the test answers."""

    endpoint: Endpoint
    client: aiohttp.ClientSession
    dialogues: list[Dialogue] = field(default_factory=list)
    doors: list[Door] = field(default_factory=list)

    def open(self) -> int:
        dialogue = Dialogue()
        self.dialogues.append(dialogue)
        self.doors.append(self.endpoint.open(lambda request: dialogue.take(request)[0]))
        return len(self.doors) - 1

    @property
    def port(self) -> int:
        return int(self.endpoint.variables(self.doors[0])["OPENAI_BASE_URL"].split(":")[2].split("/")[0])

    def key(self, row: int) -> str:
        return self.endpoint.variables(self.doors[row])["OPENAI_API_KEY"]

    def head(self, row: int | None, length: int, *more: str, target: str = f"POST {PATH}") -> bytes:
        """The head of a request, with the row's key or a stranger's."""
        key = "guessed" if row is None else self.key(row)
        lines = [f"{target} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", f"Authorization: Bearer {key}"]
        return "\r\n".join([*lines, f"Content-Length: {length}", *more, "", ""]).encode()

    async def raw(self, *payloads: bytes, wait: bool = True) -> bytes:
        """All that comes back for bytes on a connection, up to its end or a second."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        came = b""
        try:
            for payload in payloads:
                writer.write(payload)
                await writer.drain()
            while wait and (part := await asyncio.wait_for(reader.read(1 << 16), 1.0)):
                came += part
        except (OSError, asyncio.TimeoutError):
            pass
        writer.close()
        return came

    async def ask(self, row: int, body: Any = None, path: str = PATH, **headers: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.key(row)}", **headers}
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self.client.post(url, data=json.dumps(body) if body else BODY, headers=headers) as answer:
            return answer.status, await answer.json()

    async def answered(self, row: int, text: str) -> str:
        """A new row's first turn from its request to its answer."""
        asking = asyncio.ensure_future(self.ask(row))
        while not self.dialogues[row].items:
            await asyncio.sleep(0.005)
        self.dialogues[row].answer(turn(text))
        status, got = await asking
        assert status == 200, got
        return got["choices"][0]["message"]["content"]


def turn(text: str) -> Turn:
    """A turn of a token per letter, behind three tokens."""
    ids = tuple(map(ord, text))
    return Turn(text, token_ids=ids, logprobs=tuple(-one / 128 for one in ids), num_tokens_before=3)


def with_rows(use: Callable[[Rows], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        endpoint = await Endpoint.started()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as client:
            rows = Rows(endpoint, client)
            rows.open()
            return await use(rows)

    return asyncio.run(main())


def test_a_request_gets_the_models_turn_whole_or_as_the_only_chunk_of_a_stream():
    async def use(rows: Rows) -> None:
        assert await rows.answered(0, "hello") == "hello"
        url, headers = f"http://127.0.0.1:{rows.port}/v1", {"Authorization": f"Bearer {rows.key(0)}"}
        async with rows.client.get(f"{url}/models", headers=headers) as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["policy"]
        body = {**json.loads(BODY), "stream": True}
        async with rows.client.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
            chunk, done, _ = (await answer.text()).split("\n\n")
        choice = json.loads(chunk.removeprefix("data: "))["choices"][0]
        assert choice["delta"]["content"] == "hello" and choice["finish_reason"] == "stop"
        assert done == "data: [DONE]"

    with_rows(use)


def test_answers_count_tokens_and_give_log_probs_to_those_who_ask():
    async def use(rows: Rows) -> None:
        await rows.answered(0, "ab")
        status, got = await rows.ask(0, {**json.loads(BODY), "logprobs": True})
        assert status == 200 and got["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        told = got["choices"][0]["logprobs"]["content"]
        told = [(one["token"], one["logprob"]) for one in told]
        assert told == [("token_id:97", -97 / 128), ("token_id:98", -98 / 128)]
        assert "logprobs" not in (await rows.ask(0))[1]["choices"][0]

    with_rows(use)


TOKENS = "/inference/v1/generate"


def test_tokens_are_answered_by_tokens_and_a_request_must_repeat_them():
    async def use(rows: Rows) -> None:
        dialogue = rows.dialogues[0]

        async def said(ids: Sequence[int], text: str) -> Any:
            asking = asyncio.ensure_future(rows.ask(0, {"token_ids": ids, "sampling_params": {"logprobs": 1}}, TOKENS))
            while not dialogue.is_waited_for and not asking.done():
                await asyncio.sleep(0.005)
            if dialogue.is_waited_for:
                dialogue.answer(turn(text))
            return await asking

        status, got = await said([1, 2], "ab")
        (choice,) = got["choices"]
        assert status == 200 and choice["token_ids"] == [97, 98] and choice["finish_reason"] == "stop"
        assert [one["token"] for one in choice["logprobs"]["content"]] == ["token_id:97", "token_id:98"]
        assert (await said([1, 2], "unread"))[1]["choices"] == got["choices"]
        assert (await said([1, 2, 97, 98, 3], "c"))[1]["choices"][0]["token_ids"] == [99]
        assert dialogue.items == [1, 2, 97, 98, 3, 99]
        for ids, error in (([1, 2, 97, 98, 4], "token 5 is another one"), ([1, 2, 97, 98, 3, 99], "must add tokens")):
            status, got = await said(ids, "")
            assert status == 400 and error in got["error"]["message"] and got["error"]["code"] == "fork"
        status, got = await rows.ask(0)
        assert status == 400 and "all of one form" in got["error"]["message"]
        for body in ({"token_ids": []}, {"token_ids": [-1]}, {"token_ids": [1], "features": {"image": 1}}):
            assert (await rows.ask(0, body, TOKENS))[0] == 400

    with_rows(use)


def test_tokens_that_fork_begin_a_piece_where_rows_are_split():
    async def use() -> None:
        dialogue = Dialogue(splits=True)
        for ids, reading in (
            ([1, 2], Tokens([1, 2], True)), ([1, 2, 97, 5], Tokens([5], False)), ([1, 9], Tokens([1, 9], True)),
            ([1, 9, 97, 6], Tokens([6], False)),
        ):  # fmt: skip
            assert dialogue.take(TokenRequest(token_ids=ids))[1] == reading
            dialogue.answer(turn("a"))
        assert dialogue.take(TokenRequest(token_ids=[1, 2]))[1] is None, "answered before"

    asyncio.run(use())


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("body", "error"),
    [({"messages": []}, "messages"), ({"messages": [{"role": "king", "content": ""}]}, "messages.0.role"),
     ({"messages": [IMAGE]}, "messages.0.content"), ({"messages": [{"role": "user", "content": "a"}], "n": 2}, "n: "),
     ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}]}, "tool_call_id 'x'"),
     ({**json.loads(BODY), "tools": [{"function": {}}]}, "tools.0"),
     ({**json.loads(BODY), "tools": [{"function": {"name": "f", "parameters": {"properties": [1]}}}]}, "tools.0"),
     ({"messages": "a"}, "messages"), ([1], "body"), ({"messages": [{"role": "user", "content": "\ud800"}]}, "body")],
)  # fmt: skip
def test_a_request_that_no_turn_can_answer_is_refused_by_name_and_the_row_goes_on(body, error):
    async def use(rows: Rows) -> None:
        status, got = await rows.ask(0, body)
        assert status == 400 and error in got["error"]["message"], got
        assert set(got["error"]) == {"message", "type", "param", "code"}
        assert (await rows.ask(0, path="/v1/embeddings"))[0] == 404
        assert await rows.answered(0, "on") == "on"

    with_rows(use)


def test_strangers_get_nothing_of_any_row():
    async def use(rows: Rows) -> None:
        ended = rows.open()
        key = rows.key(ended)
        rows.endpoint.close(rows.doors[ended])
        own, host = rows.key(0), f"127.0.0.1:{rows.port}"
        for authorization, named, status in [
            ("", host, 401), (own, host, 401), (f"Basic {own}", host, 401), (f"Bearer {own[:-1]}", host, 401),
            (f"Bearer {key}", host, 401), ("Bearer \u00e9\udcff", host, 401),
            (f"Bearer {own}", "attacker.example", 403), (f"Bearer {own}", "127.0.0.1", 403),
        ]:  # fmt: skip
            lines = [f"POST {PATH} HTTP/1.1", f"Host: {named}", f"Authorization: {authorization}"]
            head = "\r\n".join([*lines, f"Content-Length: {len(BODY)}", "", ""]).encode(errors="surrogateescape")
            answer = await rows.raw(head + BODY)
            assert answer.startswith(f"HTTP/1.1 {status}".encode()), (authorization, named, answer)
        assert not rows.dialogues[0].items
        assert await rows.answered(0, "mine") == "mine"

    with_rows(use)


def noises(rows: Rows) -> Sequence[Sequence[bytes]]:
    """Bytes that no program sends, with and without a row's key."""
    draw = random.Random(0)
    own = [rows.head(1, len(BODY)), rows.head(None, len(BODY))]
    return [
        [b""], [bytes(4096)], [b"\xff" * 65536],
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(505)],
        *([draw.randbytes(draw.randrange(1, 9000))] for _ in range(3)),
        *([head[:cut]] for head in own for cut in (3, 40, len(head) - 1)),
        [rows.head(1, len(BODY), "X: " + "x" * 100_000)], [rows.head(1, len(BODY), *["X: x"] * 10_000)],
        [rows.head(1, 10, "Transfer-Encoding: chunked") + b"ffffffffffffffff\r\n"],
        [rows.head(1, 10, target="CONNECT a:1")],
        [rows.head(1, 0, "Upgrade: websocket", "Connection: Upgrade", target=f"POST {PATH}")],
        [rows.head(1, -5)], [rows.head(1, 1 << 70)], [rows.head(1, len(BODY), "Content-Length: 3") + BODY],
        [rows.head(1, 0, target="GET /../../etc/passwd")], [rows.head(1, 1_000_000) + b"[" * 1_000_000],
    ]  # fmt: skip


def test_bytes_that_no_program_sends_cost_no_row():
    async def use(rows: Rows) -> None:
        rows.open()
        answered = await asyncio.gather(*(rows.raw(*payloads) for payloads in noises(rows)))
        assert not [came for came in answered if came.startswith(b"HTTP/1.1 200")]
        assert not rows.dialogues[1].items
        assert [await rows.answered(row, "on") for row in (0, 1)] == ["on", "on"]

    with_rows(use)


def test_bodies_that_are_too_large_are_refused_whether_they_come_whole_in_chunks_or_compressed():
    async def use(rows: Rows) -> None:
        packed = gzip.compress(b" " * (8 * MAX_BODY_BYTES))
        chunk = f"{1 << 20:x}\r\n".encode() + b" " * (1 << 20) + b"\r\n"
        chunked = rows.head(0, 0, "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
        before = held_bytes()
        for payloads in (
            [rows.head(0, len(HUGE)), HUGE], [chunked, *[chunk] * 20],
            [rows.head(0, len(packed), "Content-Encoding: gzip"), packed], [rows.head(None, len(HUGE)), HUGE],
        ):  # fmt: skip
            assert b" 200 " not in (await rows.raw(*payloads))[:20]
        assert held_bytes() - before < 4 * MAX_BODY_BYTES
        assert await rows.answered(0, "on") == "on"

    with_rows(use)


def held_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_flood_of_half_requests_closes_its_own_connections_and_rows_are_answered(monkeypatch):
    monkeypatch.setattr(endpoint_module, "_MAX_CONNECTIONS", 20)

    async def use(rows: Rows) -> None:
        asking = asyncio.ensure_future(rows.ask(0))
        while not rows.dialogues[0].items:
            await asyncio.sleep(0.005)
        rows.open()
        held = []
        for number in range(200):
            _, writer = await asyncio.open_connection("127.0.0.1", rows.port)
            writer.write([rows.head(None, 9)[:-2], rows.head(1, len(BODY)), b""][number % 3])
            held.append(writer)
        await asyncio.sleep(0.2)
        assert len(rows.endpoint._server.connections) <= 22
        rows.open()
        assert await rows.answered(2, "another") == "another"
        rows.dialogues[0].answer(turn("waited"))
        assert (await asking)[1]["choices"][0]["message"]["content"] == "waited"
        for writer in held:
            writer.close()

    with_rows(use)


def test_a_row_has_one_request_at_a_time_and_a_repeated_one_gets_its_turn_too():
    async def use(rows: Rows) -> None:
        first = asyncio.ensure_future(rows.ask(0))
        while not rows.dialogues[0].items:
            await asyncio.sleep(0.005)
        other = {"messages": [{"role": "user", "content": "b"}]}
        status, got = await rows.ask(0, other)
        assert status == 409 and got["error"]["code"] == "several_requests"
        # Its client gave up, and asks again, more often than any does.
        again = [asyncio.ensure_future(rows.ask(0)) for _ in range(30)]
        while sum(one.done() for one in again) + (num_waiting := len(rows.doors[0].waiting)) < 31:
            await asyncio.sleep(0.005)
        rows.dialogues[0].answer(turn("once"))
        first, *others = [status for status, _ in await asyncio.gather(first, *again)]
        assert first == 200 and sorted(others) == [200] * (num_waiting - 1) + [409] * (31 - num_waiting)
        assert 1 < num_waiting <= 8

    with_rows(use)


def test_connections_that_break_off_or_are_pipelined_leave_the_turn_to_a_repeated_request():
    async def use(rows: Rows) -> None:
        whole = rows.head(0, len(BODY)) + BODY
        for payloads in ([rows.head(0, len(BODY)), BODY[:5]], [whole], [whole * 2000]):
            await rows.raw(*payloads, wait=False)
            with socket.create_connection(("127.0.0.1", rows.port)) as reset:
                reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                reset.sendall(payloads[0])
        await asyncio.sleep(0.2)
        asking = asyncio.ensure_future(rows.ask(0))
        await asyncio.sleep(0.2)
        rows.dialogues[0].answer(turn("late"))
        assert (await asking)[1]["choices"][0]["message"]["content"] == "late"

    with_rows(use)


def test_a_row_that_ends_refuses_the_request_that_waits():
    async def use(rows: Rows) -> None:
        asking = asyncio.ensure_future(rows.ask(0))
        while not rows.dialogues[0].items:
            await asyncio.sleep(0.005)
        rows.endpoint.close(rows.doors[0])
        rows.dialogues[0].close()
        assert (await asking)[0] == 410 and (await rows.ask(0))[0] == 401

    with_rows(use)


def test_messages_are_read_as_templates_take_them():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    body = {"messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "good."}]},
        {"role": "assistant", "tool_calls": [call], "refusal": None, "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]}  # fmt: skip
    assert ChatRequest.of(json.dumps(body).encode()).items() == [
        {"role": "system", "content": "Be good."},
        {
            "role": "assistant",
            "content": "",
            **thought("Hm."),
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "c", "name": "f"},
    ]
