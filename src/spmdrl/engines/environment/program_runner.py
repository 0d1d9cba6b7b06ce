"""A worker process's side of programs: holds a session per row, its program and its conversation with the model."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from spmdrl.engines.environment.chat import Answer, ChatRequest, Dialogue, Forked, TokenRequest
from spmdrl.engines.environment.endpoint import Endpoint
from spmdrl.engines.environment.environment_runner import OPENS, SESSION, EnvironmentFacts, StepResult, result_of
from spmdrl.engines.environment.episode import End, Row, Turn
from spmdrl.engines.environment.row_program import Entry, Program
from spmdrl.runtime.workers.loading import Loaded, explain, load_attribute, load_optional
from spmdrl.runtime.workers.verdict import Verdict

KEY = "environment.program"


def load(specs: Sequence[str], settings: Mapping[str, Any]) -> Loaded:
    """Load the function of `specs`, or take them as a command; returns the handler of messages. Raises ValueError."""
    load_optional("aiohttp", "aiohttp>=3.14", KEY, instead="")
    if not settings["is_command"] and ":" not in specs[0]:
        raise ValueError(
            f"{KEY}: '{specs[0]}' isn't file.py:function; write a command as a list, such as [python, agent.py]"
        )
    entry: Entry = specs if settings["is_command"] else load_attribute(specs[0], KEY, (), kind="function")
    # A row takes three pipes and a connection.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sessions = ProgramSessions(entry, settings, kept=[int(fd) for fd in os.listdir("/dev/fd")])

    async def answer(message: dict[str, Any]) -> dict[str, Any]:
        try:
            return asdict(await sessions.answer(message))
        except Exception as error:
            return asdict(StepResult(verdict=Verdict.CRASHED, error=f"{KEY}: {explain(error)}"))

    return Loaded(answer, asdict(EnvironmentFacts(True, [], has_openings=True, has_own_prompts=True)))


class ProgramSessions:
    """Sessions of this process's rows."""

    def __init__(self, entry: Entry, settings: Mapping[str, Any], kept: Sequence[int]):
        self._entry, self._settings, self._kept = entry, settings, kept
        self._sessions: dict[Hashable, ProgramSession] = {}
        self._endpoint: asyncio.Task[Endpoint] | None = None

    async def answer(self, message: dict[str, Any]) -> StepResult:
        """Open a row's session, give its opening, take a step or close it."""
        row = message[SESSION]
        if OPENS not in message and "response" not in message:
            before = self._sessions.pop(row, None)
            session = ProgramSession(self._settings)
            if "turns" in message:
                self._sessions[row] = session
            async with session.lock:
                if before is not None:
                    await before.close()
                return await self._open(session, message) if "turns" in message else StepResult()
        session = self._sessions[row]
        async with session.lock:
            if OPENS in message:
                return session.opening
            return await session.step(Turn.of({name: value for name, value in message.items() if name != SESSION}))

    async def _open(self, session: ProgramSession, message: Mapping[str, Any]) -> StepResult:
        self._endpoint = self._endpoint or asyncio.create_task(Endpoint.started())
        row = Row(message["prompt"], message["columns"], message["seed"])
        await session.open(await self._endpoint, self._entry, row, self._kept)
        return await session.replay([Turn.of(turn) for turn in message["turns"]])


class ProgramSession:
    """A row's program, and the events between the model's turns: requests that add messages, and the end."""

    def __init__(self, settings: Mapping[str, Any]):
        self.lock = asyncio.Lock()
        """held while a call is answered"""
        self.opening = StepResult(verdict=Verdict.CRASHED, error=f"{KEY}: the program wasn't started")
        self._settings, self._dialogue = settings, Dialogue(splits=settings["on_fork"] == "split")
        self._events: asyncio.Queue[StepResult] = asyncio.Queue()
        self._failure: StepResult | None = None
        self._ending: asyncio.Task[None] | None = None

    async def open(self, endpoint: Endpoint, entry: Entry, row: Row, kept: Sequence[int]) -> None:
        """Start the program and wait for its first request."""
        self._endpoint, self._door = endpoint, endpoint.open(self._take)
        variables, limit_gib = endpoint.variables(self._door), self._settings["memory_limit_gib"]
        memory_limit = None if limit_gib is None else int(limit_gib * 2**30)
        self._program = await Program.start(entry, row, variables, memory_limit, kept)
        self._ending = asyncio.create_task(self._end())
        result = await self._next("open_timeout_seconds")
        if result.verdict is None and result.observation is None:
            result = StepResult(verdict=Verdict.CRASHED, error=f"{KEY}: the program ended without a request")
        self.opening = result

    async def replay(self, turns: Sequence[Turn]) -> StepResult:
        """Answer the program's requests by the recorded turns; what it asks then is dropped."""
        result = self.opening
        for number, turn in enumerate(turns):
            if result.verdict is None and result.observation is None:
                error = f"started again, the program ended after {number} of {len(turns)} turns; it must repeat itself"
                result = StepResult(verdict=Verdict.CRASHED, error=f"{KEY}: {error}")
            if result.verdict is None:
                result = await self._answered(turn)
        self._failure = result if result.verdict is not None else None
        return result

    async def step(self, turn: Turn) -> StepResult:
        """Answer the program's request, and wait for its next one or its end."""
        return self._failure or await self._answered(turn)

    async def close(self) -> None:
        """End the program, and all that it started."""
        if self._ending is not None:
            self._endpoint.close(self._door)
            self._dialogue.close()
            self._program.kill()
            await self._ending

    async def _answered(self, turn: Turn) -> StepResult:
        self._dialogue.answer(turn)
        return await self._next("timeout_seconds")

    async def _next(self, limit: str) -> StepResult:
        try:
            return await asyncio.wait_for(self._events.get(), self._settings[limit])
        except asyncio.TimeoutError:
            error = f"the program sent no request within environment.{limit} = {self._settings[limit]:g}"
            return StepResult(verdict=Verdict.TIMED_OUT, error=f"{KEY}: {error}")

    def _take(self, request: ChatRequest | TokenRequest) -> Answer:
        try:
            answer, reading = self._dialogue.take(request)
        except Forked as fork:
            self._events.put_nowait(StepResult(verdict=Verdict.MALFORMED, error=f"{KEY}: {fork}"))
            raise
        if reading is not None:
            self._events.put_nowait(result_of(lambda: reading, KEY))
        return answer

    async def _end(self) -> None:
        end = await self._program.end()
        if end.error is None:
            self._events.put_nowait(result_of(lambda: End(end.value), KEY))
        else:
            self._events.put_nowait(StepResult(verdict=Verdict.CRASHED, error=f"{KEY}: {end.error}"))
