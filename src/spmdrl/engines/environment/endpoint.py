"""A server of turns of the model for the programs of this process's rows, on the loopback interface."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmdrl.engines.environment.chat import FORMS, Answer, ChatRequest, Refused, TokenRequest

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY_BYTES = 16 << 20
_MAX_CONNECTIONS = 512
"""connections that wait for no turn"""
_MAX_REPEATED = 8
"""connections of a row that wait for one turn: requests of clients that gave up and asked again"""
_READ_BYTES = 1 << 16
_PATHS = {**dict.fromkeys(FORMS, "POST"), "/v1/models": "GET"}

Take = Callable[[ChatRequest | TokenRequest], Answer]
"""Hands a request to its row, and returns the answer to come; raises Refused."""


class Door:
    """The way of one row's program to its row: requests with its key."""

    def __init__(self, take: Take):
        self.key = secrets.token_urlsafe(32)
        self.take = take
        self.is_busy = False
        """true while a body is read"""
        self.waiting = set[Any]()
        """connections that wait for a turn"""


class Endpoint:
    """Server of all rows: open -> closed with its process."""

    def __init__(self) -> None:
        self._doors: dict[bytes, Door] = {}
        self._started, self._num_answers = int(time.time()), 0

    @classmethod
    async def started(cls) -> Endpoint:
        """Return a server that listens on a free port."""
        endpoint = cls()
        await endpoint._start()
        return endpoint

    async def _start(self) -> None:
        from aiohttp import web  # Optional, for programs alone.

        quiet = logging.Logger("endpoint", logging.CRITICAL + 1)
        self._web = web
        self._server = web.Server(
            self._handle, handler_cancellation=True, logger=quiet, access_log=None,
            lingering_time=0.0, read_bufsize=_READ_BYTES,
        )  # fmt: skip
        listening = await asyncio.get_running_loop().create_server(self._connection, "127.0.0.1", 0, backlog=1024)
        self._port = listening.sockets[0].getsockname()[1]
        self._hosts = {f"{name}:{self._port}" for name in ("127.0.0.1", "localhost")}

    def open(self, take: Take) -> Door:
        """Let in requests with the key of the door that is returned."""
        door = Door(take)
        self._doors[_digest(door.key)] = door
        return door

    def close(self, door: Door) -> None:
        """Let none in any more."""
        self._doors.pop(_digest(door.key), None)

    def variables(self, door: Door) -> dict[str, str]:
        """Return the environment variables that OpenAI's clients read."""
        return {"OPENAI_BASE_URL": f"http://127.0.0.1:{self._port}/v1", "OPENAI_API_KEY": door.key}

    def _connection(self) -> asyncio.Protocol:
        # A flood closes connections of its own, or idle ones, which clients open again.
        waiting = set[Any]().union(*(door.waiting for door in self._doors.values()))
        idle = [one for one in self._server.connections if one not in waiting]
        for one in idle[: max(0, len(idle) - _MAX_CONNECTIONS + 1)]:
            one.force_close()
        return self._server()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except Refused as refused:
            return self._error(str(refused), refused.status, refused.code)
        except self._web.HTTPException as error:
            return self._error(f"{error.reason}; a body has at most {MAX_BODY_BYTES} bytes", error.status)
        except Exception as error:
            return self._error(f"{type(error).__name__}: {error}", 500)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        # A name that resolves to this address doesn't make a page in a browser a program of ours.
        if request.headers.get("Host") not in self._hosts:
            raise Refused("the Host isn't this server's address", 403)
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        door = self._doors.get(_digest(key))
        if door is None or scheme.lower() != "bearer":
            raise Refused("the key isn't OPENAI_API_KEY of a row that goes on", 401, "invalid_api_key")
        if request.path not in _PATHS:
            raise Refused(f"there is no {request.path}; ask for one of {', '.join(_PATHS)}", 404)
        if request.method != _PATHS[request.path]:
            raise Refused(f"{request.path} takes {_PATHS[request.path]}", 405)
        if request.path == "/v1/models":
            model = {"id": "policy", "object": "model", "created": self._started, "owned_by": "spmdrl"}
            return self._json({"object": "list", "data": [model]})
        if door.is_busy:
            raise Refused("another request of this row is being read; send one at a time", 409, "several_requests")
        door.is_busy = True
        try:
            asked = FORMS[request.path].of(await request.clone(client_max_size=MAX_BODY_BYTES).read())
        finally:
            door.is_busy = False
        answer = door.take(asked)
        if len(door.waiting) == _MAX_REPEATED:
            raise Refused("the same request waits in other connections; send one at a time", 409, "several_requests")
        door.waiting.add(request.protocol)
        try:
            await asyncio.wait([answer])
        finally:
            door.waiting.discard(request.protocol)
        if answer.cancelled():
            raise Refused("the row has ended", 410)
        self._num_answers += 1
        body = asked.body(*answer.result(), self._num_answers, int(time.time()))
        if not asked.stream:
            return self._json(body)
        text = f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n"
        return self._web.Response(text=text, content_type="text/event-stream")

    def _json(self, body: dict[str, Any], status: int = 200) -> web.Response:
        response = self._web.json_response(body, status=status)
        if status != 200:
            # OpenAI's client asks again after a 409 otherwise; what wasn't read isn't waited for.
            response.headers["x-should-retry"] = "false"
            response.force_close()
        return response

    def _error(self, message: str, status: int, code: str | None = None) -> web.Response:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return self._json({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


def _digest(key: str) -> bytes:
    """Return what a key is looked up by, so that the time of that says nothing of it."""
    return hashlib.sha256(key.encode(errors="replace")).digest()
