"""Flags that count something, such as `--nodes 2`."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from spmdrl.config.reader import ConfigError


def take_numbers(arguments: Sequence[str], flags: Collection[str]) -> tuple[dict[str, int], list[str]]:
    """Part flags and their whole numbers from the other arguments; the last one of each wins."""
    numbers: dict[str, int] = {}
    others: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        flag, equals, text = argument.partition("=")
        if flag not in flags:
            others.append(argument)
            continue
        text = text if equals else (rest.popleft() if rest else "")
        if not text.isdecimal() or len(text) > 6 or int(text) < 1:
            raise ConfigError(f"{flag} is {text!r}, but must be a whole number of them, as in {flag} 8")
        numbers[flag] = int(text)
    return numbers, others
