"""Environments in the form of SkyRL-gym: `init`, and `step` with a turn's text, which gives messages and a reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmdrl.engines.environment.episode import End, Reply, Row, Turn


class SkyrlEnvironment:
    """Environment with an object of SkyRL-gym's per row."""

    tools: tuple[()] = ()

    def __init__(self, make: Callable[..., Any]):
        self._make = make

    def open(self, row: Row) -> SkyrlSession:
        answer = row.columns.get("answer")
        known = {} if answer is None else {"reward_spec": {"ground_truth": answer}}
        one = self._make(env_config={}, extras={**known, **row.columns})
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        prompt, _ = one.init([dict(message) for message in messages])
        if list(prompt) != list(messages):
            raise ValueError(
                f"init gave the prompt {prompt!r:.200} in place of the row's, which has been read already; write it "
                "into the data"
            )
        return SkyrlSession(one)


class SkyrlSession:
    """Session of a row with an object of SkyRL-gym's."""

    def __init__(self, one: Any):
        self._one = one

    def step(self, turn: Turn) -> Reply | End:
        """Take a step with the turn's text; rewards of turns add up."""
        out = self._one.step(turn.response)
        reward = out.get("reward") or 0.0
        return End(reward) if out["done"] else Reply(out["observations"], reward)

    def close(self) -> None:
        self._one.close()
