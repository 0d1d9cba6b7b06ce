"""A reward function that notes its calls, for pools that run it in the test's own process."""

from __future__ import annotations

CALLS: list[list[str]] = []
"""the completions of each call"""


def checksum(completions, completion_ids, **columns):
    CALLS.append(list(completions))
    return [float(sum((place + 1) * token for place, token in enumerate(ids)) % 1009) for ids in completion_ids]
