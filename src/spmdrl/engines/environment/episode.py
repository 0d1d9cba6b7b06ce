"""What an environment is given when a model's turn has ended, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Turn:
    """One turn that the model took, and what the environment answered."""

    response: str
    observation: str


@dataclass(frozen=True)
class Episode:
    """A row so far. All that a step may depend on is here, so that any process can serve any row at any time."""

    prompt: Any
    """the prompt as the data has it, a text or a list of messages"""
    columns: Mapping[str, Any]
    """the row's columns of the data, the answer as `answer`"""
    seed: int
    """of this row's random numbers: the same whenever the row is generated again"""
    turns: tuple[Turn, ...]
    """those before this one"""
    response: str
    """what the model wrote in the turn that just ended, with the stop string that ended it, if one did"""


@dataclass(frozen=True)
class Observation:
    """The row goes on: the model reads these texts, which may be empty, and takes another turn."""

    text: str
    """read as plain letters: special tokens, and others that the chat template writes, are none in it"""
    before: str = ""
    """what stands before it, such as the template's end of one turn and beginning of the next, whose tokens are read
    as such; nothing that others wrote belongs here"""
    after: str = ""
    """what stands behind it, read likewise"""


@dataclass(frozen=True)
class End:
    """The row is finished."""

    reward: float | None = None
    """the row's reward; None leaves it to `reward.functions`"""


class Environment(Protocol):
    """Built once in each process, and kept: what it remembers of a row may be in another process by the next step."""

    def step(self, episode: Episode) -> Observation | End:
        """Answer a turn that a stop token or a stop string ended."""
        ...
