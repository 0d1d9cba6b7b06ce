"""Environments in the forms of SkyRL-gym and of gymnasium.

SkyRL-gym's have `init`, and `step` with a turn's text, which gives messages and a reward. Gymnasium's have `reset` and
`step`; their actions are numbers or text, and their observations are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from spmdrl.engines.environment.episode import End, Reply, Row, Turn

# Text on screens marks the place of the agent by a colour.
_COLOURED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m")


class GymnasiumEnvironment:
    """Environment with an object of gymnasium's per row."""

    tools: tuple[()] = ()
    has_openings = True

    def __init__(self, make: Callable[..., Any]):
        one = make()
        space = one.action_space
        if not (hasattr(space, "n") or hasattr(space, "max_length")):
            raise ValueError(f"its actions are of {space}, but the model writes Discrete and Text ones; wrap it")
        self._make = partial(make, render_mode="ansi") if "ansi" in one.metadata.get("render_modes", ()) else make
        one.close()

    def open(self, row: Row) -> GymnasiumSession:
        return GymnasiumSession(self._make(), row.seed)


class GymnasiumSession:
    """Session of a row with an object of gymnasium's."""

    def __init__(self, one: Any, seed: int):
        self._one = one
        observation, _ = one.reset(seed=seed)
        self.opening = f"\n{self._written(observation)}"

    def step(self, turn: Turn) -> Reply | End:
        """Take the action in the turn's content; rewards of turns add up."""
        action: Any = turn.content
        space = self._one.action_space
        if hasattr(space, "n"):
            first, last = int(getattr(space, "start", 0)), int(getattr(space, "start", 0) + space.n) - 1
            numbers = [int(found) for found in re.findall(r"-?\d+", action)[-1:]]
            if not numbers or not first <= numbers[0] <= last:
                return _user(f"No action was taken: end with its number, from {first} to {last}.")
            action = numbers[0]
        observation, reward, terminated, truncated, _ = self._one.step(action)
        return End(reward) if terminated or truncated else _user(self._written(observation), float(reward))

    def _written(self, observation: Any) -> str:
        text = self._one.render() if getattr(self._one, "render_mode", None) == "ansi" else observation
        return _COLOURED.sub(r"[\1]", str(text)).strip("\n")

    def close(self) -> None:
        self._one.close()


def _user(text: str, reward: float = 0.0) -> Reply:
    return Reply([{"role": "user", "content": text}], reward)


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
