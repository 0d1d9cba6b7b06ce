"""Each row's program runs in processes of its own, and leaves nothing behind however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.engines.environment import programs

from spmdrl.engines.environment.episode import Row
from spmdrl.engines.environment.row_program import Program, ProgramEnd
from spmdrl.runtime.workers.descent import ProcessTree

ROW = Row("p", {"number": 0.5, "text": "x" * 300_000}, 3)


def ends_of(*entries: Any, num_hanging: int = 0, memory_limit_bytes: int | None = None) -> list[ProgramEnd]:
    """The ends of programs that run at once; the first ones are killed when the others have ended."""

    async def main() -> list[ProgramEnd]:
        programs = [await Program.start(one, ROW, {"NUMBER": "2.5"}, memory_limit_bytes, ()) for one in entries]
        ends = [asyncio.ensure_future(one.end()) for one in programs]
        await asyncio.wait_for(asyncio.gather(*ends[num_hanging:]), 60.0)
        for one in programs[:num_hanging]:
            while not one._output.last:
                await asyncio.sleep(0.01)
            one.kill()
        return await asyncio.gather(*ends)

    before = descendants()
    found = asyncio.run(main())
    deadline = time.monotonic() + 5.0
    while (left := descendants() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    return found


def descendants() -> set[int]:
    return {one.pid for one in ProcessTree(os.getpid()).members()}


def script(text: str) -> Sequence[str]:
    return [sys.executable, "-c", text]


def test_a_function_ends_with_its_value_and_a_command_with_none_having_read_its_row():
    check = "import json, os, sys; row = json.load(sys.stdin); "
    check += "assert len(row['columns']['text']) == 300_000 and row['seed'] == 3 and os.environ['NUMBER'] == '2.5'"
    assert ends_of(programs.number, programs.waiting, script(check)) == [
        ProgramEnd(0.5), ProgramEnd(2.5), ProgramEnd()
    ]  # fmt: skip


def test_an_error_has_the_exception_or_exit_code_with_the_last_output_alone():
    raised, exited, killed, missing, talkative = ends_of(
        programs.failing, script("print('said'); raise SystemExit(7)"), script("import os; os.abort()"),
        ["./no-such-program"], programs.talkative,
    )  # fmt: skip
    assert raised.error.startswith("KeyError: 'nothing' (") and raised.error.endswith("last output: before the end")
    assert exited.error == "it ended with exit code 7; its last output: said"
    assert killed.error.startswith("it ended with killed by SIGABRT")
    assert missing.error.startswith("FileNotFoundError: ")
    assert talkative.error.startswith("RuntimeError: the end") and len(talkative.error) < 5000


def test_a_killed_program_leaves_none_of_its_processes_and_costs_no_other():
    *hanging, ended = ends_of(programs.hanging, programs.hanging, programs.number, num_hanging=2)
    assert ended == ProgramEnd(0.5) and all("killed by SIGKILL" in one.error for one in hanging)


def test_a_program_over_its_memory_is_ended_alone():
    greedy, other = ends_of(programs.greedy, programs.number, memory_limit_bytes=200 << 20)
    assert "environment.memory_limit_gib" in greedy.error
    assert other == ProgramEnd(0.5)


def test_a_program_inherits_no_files_of_the_server_and_of_other_programs():
    read, write = os.pipe()
    server = os.path.realpath(f"/dev/fd/{write}")
    alone, beside = (
        ends_of(programs.files)[0],
        ends_of(programs.hanging, programs.hanging, programs.files, num_hanging=2),
    )
    os.close(read), os.close(write)
    assert "pipe:" in server and server not in [*alone.value, *beside[2].value]
    assert len(beside[2].value) == len(alone.value), "those of programs before it"


def test_a_program_that_kills_its_guard_ends_though_what_it_started_lives_on():
    async def main() -> ProgramEnd:
        program = await Program.start(programs.killing_its_guard, ROW, {}, None, ())
        return await asyncio.wait_for(program.end(), 10.0)

    end = asyncio.run(main())
    child = int(end.error.split()[-1])
    os.kill(child, signal.SIGKILL)
    assert end.error == f"it ended with killed by SIGKILL; its last output: {child}"
