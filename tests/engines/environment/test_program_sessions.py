"""A program asks for the model's turns, and its row has the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tests.engines.environment import asking_programs as programs

from spmdrl.engines.environment import program_runner
from spmdrl.engines.environment.environment_runner import OPENS, SESSION, StepResult, read_step
from spmdrl.engines.environment.episode import Opening, Reply
from spmdrl.engines.environment.program_runner import ProgramSessions
from spmdrl.runtime.workers.call_pool import CallPool
from spmdrl.runtime.workers.call_queue import Call
from spmdrl.runtime.workers.process import PendingCall, WorkerSetup
from spmdrl.runtime.workers.verdict import Verdict

SETTINGS = {
    "timeout_seconds": 30.0, "open_timeout_seconds": 30.0, "memory_limit_gib": None, "is_command": False,
    "on_fork": "keep",
}  # fmt: skip
FILE = Path(__file__).with_name("asking_programs.py")


def turn(response: str, calls: Sequence[Any] = (), content: str = "") -> dict[str, Any]:
    return {
        "response": response, "observation": "", "content": content, "reasoning": "", "calls": calls, "problems": (),
        "token_ids": (), "logprobs": (), "num_tokens_before": 0,
    }  # fmt: skip


def opening(row: int, prompt: Any, turns: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {SESSION: row, "prompt": prompt, "columns": {}, "seed": row, "turns": turns}


def with_sessions(
    program: Callable[[Any], Any], use: Callable[[ProgramSessions], Awaitable[Any]], **settings: Any
) -> Any:
    """What `use` gives, with sessions that are closed behind it."""

    async def main() -> Any:
        sessions = ProgramSessions(program, {**SETTINGS, **settings}, ())
        try:
            return await use(sessions)
        finally:
            await asyncio.gather(*(sessions.answer({SESSION: row}) for row in range(20)))

    return asyncio.run(main())


def results_of(
    program: Callable[[Any], Any], prompt: Any, *turns: dict[str, Any], recorded: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> list[StepResult]:  # fmt: skip
    """The opening of a row and the results of its steps."""

    async def use(sessions: ProgramSessions) -> list[StepResult]:
        opened = asyncio.ensure_future(sessions.answer(opening(0, prompt, recorded)))
        results = [await asyncio.ensure_future(sessions.answer({SESSION: 0, OPENS: True}))]
        assert opened.done(), "the opening is answered first"
        return results + [await sessions.answer({SESSION: 0, **one}) for one in turns]

    return with_sessions(program, use, **settings)


def said(result: StepResult) -> list[tuple[str, str]]:
    assert isinstance(result.observation, Reply), result
    return [(message["role"], message["content"]) for message in result.observation.messages]


def test_the_first_request_opens_a_row_further_ones_reply_and_the_value_is_the_reward():
    opened, second, end = results_of(programs.counting, "2", turn("20"), turn("22"))
    assert said(opened) == [("system", "Count."), ("user", "number 0")]
    assert said(second) == [("user", "number 1")]
    assert end == StepResult(reward=42.0)


def test_tool_calls_go_out_and_results_come_back_with_the_functions_name():
    call = {"name": "add", "arguments": {"of": [2, 3]}}
    opened, second, end = results_of(programs.calling, "", turn("<add>", [call], "I add."), turn("5"))
    assert said(opened) == [("system", "Add."), ("user", "2 + 3?")]
    (result,) = second.observation.messages
    assert (result["role"], result["name"], result["content"]) == ("tool", "add", "5")
    assert end.reward == 5.0


def test_a_repeated_request_gets_the_same_answer_without_a_turn():
    _, second, end = results_of(programs.repeating, "", turn("first"), turn("3"))
    assert said(second) == [("user", "b")] and end.reward == 3.0


@pytest.mark.parametrize(
    ("how", "error"),
    [("rewrites", "message 1 is another one"), ("compacts", "message 1 is another one"),
     ("adds nothing", "must add messages"), ("tools", "tools are those of its first request")],
)  # fmt: skip
def test_a_request_that_forks_the_conversation_is_refused_by_name(how, error):
    _, forked = results_of(programs.forking, how, turn("x"))
    assert forked.verdict is Verdict.MALFORMED and error in forked.error


@pytest.mark.parametrize("how", ["rewrites", "compacts", "adds nothing", "tools"])
def test_a_request_that_forks_begins_a_conversation_where_rows_are_split(how):
    opened, forked, continued, end = results_of(
        programs.going_on, how, turn("x"), turn("y"), turn("z"), on_fork="split"
    )
    assert isinstance(opened.observation, Opening) and said(opened) == [("user", "a")]
    whole = {"rewrites": ["another", "x", "b"], "compacts": ["b"], "adds nothing": ["a", "x"], "tools": ["a", "x", "b"]}
    assert isinstance(forked.observation, Opening) and [text for _, text in said(forked)] == whole[how]
    tools = [{"type": "function", "function": {"name": "new"}}] if how == "tools" else None
    assert forked.observation.tools == tools
    assert not isinstance(continued.observation, Opening) and said(continued) == [("user", "c")]
    assert end.reward == 1.0, "a repeated request got the first answer"


def test_each_way_that_a_program_fails_ends_its_row_by_name():
    assert "ended without a request" in results_of(programs.silent, "")[0].error
    (late,) = results_of(programs.hanging, "at once", open_timeout_seconds=0.3)
    assert late.verdict is Verdict.TIMED_OUT and "environment.open_timeout_seconds = 0.3" in late.error
    _, late = results_of(programs.hanging, "", turn("x"), timeout_seconds=0.3)
    assert late.verdict is Verdict.TIMED_OUT and "environment.timeout_seconds = 0.3" in late.error
    _, crashed = results_of(programs.failing, "why", turn("x"))
    assert crashed.verdict is Verdict.CRASHED
    assert "RuntimeError: why" in crashed.error and crashed.error.endswith("last output: about to fail")


def test_a_program_that_is_started_again_gets_the_recorded_turns(tmp_path):
    opened, end = results_of(programs.counting, "3", turn("30"), recorded=[turn("5"), turn("7")])
    assert said(opened)[-1] == ("user", "number 0") and end.reward == 42.0
    results_of(programs.changing, str(tmp_path / "mark"), turn("x"))
    _, lost = results_of(programs.changing, str(tmp_path / "mark"), turn("x"), recorded=[turn("a"), turn("b")])
    assert lost.verdict is Verdict.CRASHED and "ended after 1 of 2 turns" in lost.error


def test_rows_wait_for_their_turns_at_the_same_time_whatever_another_one_does():
    async def use(sessions: ProgramSessions) -> list[float | None]:
        await asyncio.gather(*(sessions.answer(opening(row, "2")) for row in range(10)))
        await asyncio.gather(*(sessions.answer({SESSION: row, **turn(str(row))}) for row in reversed(range(10))))
        await sessions.answer({SESSION: 3})
        rows = [row for row in range(10) if row != 3]
        ends = await asyncio.gather(*(sessions.answer({SESSION: row, **turn("1")}) for row in rows))
        return [end.reward for end in ends]

    assert with_sessions(programs.counting, use) == [row + 1.0 for row in range(10) if row != 3]


class Results:
    def read(self, answer: Any, call: PendingCall, seconds: float) -> StepResult | None:
        return read_step(answer)

    def failed(self, call: PendingCall, verdict: Verdict, error: str) -> StepResult:
        return StepResult(verdict=verdict, error=error)


def test_rows_of_a_killed_server_that_wait_for_the_model_are_replayed_in_a_new_one():
    setup = WorkerSetup(
        "environment", program_runner.KEY, "environment.variables", program_runner.__name__,
        [f"{FILE}:counting_or_killing"], [], None, SETTINGS,
    )  # fmt: skip
    pool = CallPool(setup, Results(), num_workers=1, timeout_seconds=30.0)

    def answered(row: int, prompt: str, step: dict[str, Any], turns: Sequence[dict[str, Any]] = ()) -> StepResult:
        begin = Call(None, opening(row, prompt, turns))
        pool.submit([Call(row, {SESSION: row, **step}, affinity=row, opening=begin)])
        return pool.collect([row])[0]

    try:
        assert said(answered(0, "2", {OPENS: True}))[-1] == ("user", "number 0")
        assert said(answered(0, "2", turn("20")))[-1] == ("user", "number 1")
        answered(1, "kill", {OPENS: True})
        lost = answered(1, "kill", turn("x"))
        assert lost.verdict is Verdict.CRASHED and "process was lost in this call" in lost.error
        assert answered(0, "2", turn("22"), [turn("20")]) == StepResult(reward=42.0)
    finally:
        pool.close()
