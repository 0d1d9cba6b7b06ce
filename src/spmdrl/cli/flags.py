"""Words of the command line beside keys: flags such as `--nodes 2`, and a verb's argument verb."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from spmdrl.config.reader import ConfigError

MEMORY = "--device-memory"


def take_verb(arguments: Sequence[str], verbs: Collection[str]) -> tuple[str, list[str]]:
    """Split a leading verb from the other arguments; train if there is none."""
    has_verb = bool(arguments) and arguments[0] in verbs
    return arguments[0] if has_verb else "train", list(arguments[has_verb:])


def take_numbers(arguments: Sequence[str], flags: Collection[str]) -> tuple[dict[str, int], list[str]]:
    """Split flags and their whole numbers from the other arguments; the last one of each wins."""
    texts, others = _split(arguments, flags)
    numbers: dict[str, int] = {}
    for flag, written in texts.items():
        text = written.removesuffix("GiB") if flag == MEMORY else written
        if not text.isdecimal() or len(text) > 6 or int(text) < 1:
            example = "80GiB" if flag == MEMORY else "8"
            raise ConfigError(f"{flag} is {text!r}, but must be a whole number, as in {flag} {example}")
        numbers[flag] = int(text)
    return numbers, others


def take_texts(arguments: Sequence[str], flags: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Split flags and their texts from the other arguments; the last one of each wins."""
    texts, others = _split(arguments, flags)
    if empty := [flag for flag, text in texts.items() if not text]:
        raise ConfigError(f"{empty[0]} has no value; write {empty[0]} VALUE")
    return texts, others


def take_planned_device(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split `--plan DEVICE` of `train` from the other arguments. Raises ConfigError for a device that isn't there."""
    texts, others = take_texts(arguments, ("--plan",))
    if "--plan" in texts:
        # Runs without the flag import nothing of the plan.
        from spmdrl.plan.device_profile import read_profile

        read_profile(texts["--plan"], "--plan")
    return texts.get("--plan"), others


def _split(arguments: Sequence[str], flags: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Split flags from the other arguments; the text of one at the end is empty."""
    texts: dict[str, str] = {}
    others: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        flag, equals, text = argument.partition("=")
        if flag not in flags:
            others.append(argument)
            continue
        texts[flag] = text if equals else (rest.popleft() if rest else "")
    return texts, others
