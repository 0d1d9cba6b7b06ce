from __future__ import annotations

import io

from spmdrl.observability.terminal.progress import GenerationProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(stream: io.StringIO, seconds_each: float, num_groups: int) -> str:
    """What is printed of groups of 2 rows and 100 tokens, one after each of these numbers of seconds."""
    now = [5.0]
    progress = GenerationProgress(2 * num_groups, stream=stream, clock=lambda: now[0])
    for _ in range(num_groups):
        now[0] += seconds_each
        progress.add(2, 100)
    return stream.getvalue()


def test_a_terminal_is_told_once_a_second_at_most_and_of_the_end():
    lines = told(Terminal(), 0.4, 7).split("\r")[1:]
    assert [line.partition(" |")[0] for line in lines] == [
        "generated 6/14 rows", "generated 12/14 rows", "generated 14/14 rows"
    ]  # fmt: skip
    assert "250 tok/s" in lines[0] and "eta" in lines[0] and lines[-1].endswith("\n")


def test_a_log_gets_fewer_lines():
    assert told(io.StringIO(), 1.0, 25).splitlines() == [
        "generated 20/50 rows | 100 tok/s | eta 15s",
        "generated 40/50 rows | 100 tok/s | eta 5.0s",
        "generated 50/50 rows | 100 tok/s | 25s",
    ]
