"""Look-up of the known name that a misspelt one may mean."""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST = 60


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that differs only in case, signs, an edit per four letters, or after the first half."""
    found: tuple[int, str] | None = None
    for name in known:
        distance = _distance(word, name)
        if distance <= max(1, len(word) // 4) and distance < len(word) and (found is None or distance < found[0]):
            found = distance, name
    return None if found is None else found[1]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that isn't known: the one that it may mean, or all."""
    close = nearest(name, known)
    return f"{what} '{name}'" + (f"; did you mean '{close}'?" if close else f"; known are {', '.join(known)}")


def _distance(word: str, name: str) -> int:
    if _letters(word) and _letters(word) == _letters(name):
        return 0
    return 1 if _begins_alike(word, name) else edit_distance(word, name)


def _letters(word: str) -> str:
    return "".join(letter for letter in word.casefold() if letter.isalnum())


def edit_distance(left: str, right: str) -> int:
    """Return the fewest letters to insert, remove, replace or swap with their neighbour to make the other word."""
    if abs(len(left) - len(right)) > 3 or max(len(left), len(right)) > _LONGEST:
        return max(len(left), len(right))
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, last, row = row, before, [i]
        for j, b in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and b == left[i - 2]:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _begins_alike(left: str, right: str) -> bool:
    """Return True if one is at least the first half of the other, as in optim and optimizer."""
    short, long = sorted((left, right), key=len)
    return len(short) >= 4 and 2 * len(short) >= len(long) and long.startswith(short)
