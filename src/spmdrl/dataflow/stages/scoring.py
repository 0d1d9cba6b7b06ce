"""Rewards asked for while responses still come, and given back a group at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.model_tokens import turn_texts
from spmdrl.engines.generation.protocol import Response
from spmdrl.engines.reward.calls import RewardResult, joined
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.engines.workers.verdict import Outcome

DecodeTokens = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class EndedResponses:
    """Responses to one prompt that have come to their end, by their places in its group."""

    group: Hashable
    """the same whenever this group is spoken of, and no other group's"""
    prompt: Prompt
    group_size: int
    by_member: Mapping[int, Response]


@dataclass
class _Asked:
    """What became of one group: its responses wait for a call, or are in one."""

    waiting: dict[int, Response] = field(default_factory=dict)
    calls: list[tuple[int, ...]] = field(default_factory=list)
    """the members that each call scores"""
    judged: dict[int, RewardResult] = field(default_factory=dict)
    """what the environment made of those that it judged itself"""


class StreamedRewards:
    """Submits each response for its reward once: as it ends, or as the last of its group does.

    A group may be carried from step to step: repeated responses are ignored, and results are kept until `collect`.
    """

    def __init__(self, pool: RewardPool, decode: DecodeTokens):
        self._pool = pool
        self._decode = decode
        self._groups: dict[Hashable, _Asked] = {}

    def begin(self, ended: EndedResponses) -> None:
        """Start on the rewards of these responses as far as `reward.call_level` lets it, and return at once."""
        asked = self._groups.setdefault(ended.group, _Asked())
        known = {member for members in asked.calls for member in members}
        for member, response in ended.by_member.items():
            if response.outcome is not None:
                asked.judged[member] = self._judged(ended.group, response.outcome)
            elif member not in known:
                asked.waiting[member] = response
        is_whole = len(asked.waiting) + len(asked.judged) == ended.group_size
        if asked.waiting and (self._pool.call_level == "response" or is_whole):
            members = tuple(sorted(asked.waiting))
            self._submit((ended.group, members[0]), ended.prompt, [asked.waiting[member] for member in members])
            asked.calls.append(members)
            asked.waiting.clear()

    def collect(self, groups: Sequence[Hashable]) -> list[RewardResult]:
        """Wait for the rewards of these groups, all of whose responses were begun, and forget them."""
        asked = {group: self._groups.pop(group) for group in groups}
        keys = [(group, members[0]) for group, one in asked.items() for members in one.calls]
        results = dict(zip(keys, self._pool.collect(keys), strict=True))
        return [
            joined(
                group,
                [
                    *((members, results[group, members[0]]) for members in one.calls),
                    *(((member,), result) for member, result in one.judged.items()),
                ],
            )
            for group, one in asked.items()
        ]

    def _judged(self, key: Hashable, outcome: Outcome) -> RewardResult:
        """The result of a row that no function judges."""
        parts: dict[str, list[float | None]] = {name: [None] for name in self._pool.names}
        return RewardResult(key, [outcome.reward], parts, [outcome.verdict], outcome.error)

    def _submit(self, key: Hashable, prompt: Prompt, responses: Sequence[Response]) -> None:
        """Completions are what the model wrote last: what an environment gave it isn't its answer."""
        token_ids, size = [list(response.last_turn) for response in responses], len(responses)
        columns = {name: [value] * size for name, value in prompt.columns.items()}
        if any(response.turns is not None for response in responses):
            columns["turns"] = [turns_record(response, self._decode)["turns"] for response in responses]
        self._pool.submit(key, [prompt.original] * size, [self._decode(ids) for ids in token_ids], token_ids, columns)


def turns_record(response: Response, decode: DecodeTokens) -> dict[str, Any]:
    """`turns`, what the model and the environment wrote in each; nothing where there is no environment."""
    if response.turns is None:
        return {}
    texts = turn_texts(response.token_ids, response.turns, decode)
    return {"turns": [{"response": text, "observation": observation} for text, observation in texts]}
