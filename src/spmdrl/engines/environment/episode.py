"""Environments as their authors see them: sessions with a row each, or steps of whole episodes; inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolCall:
    """A call of a function by the model."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TurnParts:
    """Parts of what a model wrote in a turn; texts and calls are empty if the environment has no attribute `tools`.

    With `environment.on_fork: split` turns are read for any environment.
    """

    content: str = ""
    """text before the first call"""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    """of calls that can't be read, as messages to the model"""
    token_ids: tuple[int, ...] = ()
    """tokens of the turn, with their log-probs; for programs alone, as is the number of tokens before them"""
    logprobs: tuple[float, ...] = ()
    num_tokens_before: int = 0


@dataclass(frozen=True)
class Turn(TurnParts):
    """One turn of the model, and the environment's reply."""

    response: str
    """text of the turn, with its stop string, if any"""
    observation: str = ""
    """empty in the turn that just ended"""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Turn:
        """Build from JSON of `asdict`'s result."""
        return cls(**fields_of(fields))


def fields_of(read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a turn or episode from JSON of `asdict`'s result."""
    tuples = {name: tuple(read[name]) for name in ("problems", "token_ids", "logprobs")}
    return {**read, **tuples, "calls": tuple(ToolCall(**call) for call in read["calls"])}


@dataclass(frozen=True)
class Row:
    """A row that begins, as `open(row)` of an environment with sessions gets it, to return a `Session`."""

    prompt: Any
    """the prompt as the data has it, a text or a list of messages"""
    columns: Mapping[str, Any]
    """the row's columns of the data, the answer as `answer`"""
    seed: int
    """seed of this row's random numbers: the same whenever the row is generated again"""


@dataclass(frozen=True)
class Episode(Row, TurnParts):
    """A row so far. A step may depend on nothing else, so that any process can serve any row at any time."""

    turns: tuple[Turn, ...]
    """earlier turns"""
    response: str
    """text of the turn that just ended, with its stop string, if any"""


@dataclass(frozen=True)
class Observation:
    """Answer that continues the row: the model reads these texts, which may be empty, and takes another turn."""

    text: str
    """read as plain text: no special tokens nor others that the chat template writes are recognised"""
    before: str = ""
    """text before it, such as the template's end of one turn and start of the next, in which special tokens are
    recognised; must not hold text by others"""
    after: str = ""
    """text after it, read likewise"""
    reward: float = 0.0
    """reward of the turn, a part of the row's"""


@dataclass(frozen=True)
class Reply:
    """Answer that continues the row by messages, which the model reads as its chat template writes them."""

    messages: Sequence[Mapping[str, Any]]
    """the user's, and tools' results with `name`, the function's; special tokens in their texts aren't recognised"""
    reward: float = 0.0
    """reward of the turn, a part of the row's"""
    errors: Sequence[str] = ()
    """names of the functions that failed, for metrics"""


@dataclass(frozen=True)
class Opening(Reply):
    """Messages that begin a conversation, in place of the data's prompt or, behind a turn, of all before."""

    tools: Sequence[Mapping[str, Any]] | None = None
    """schemas of functions that the model may call"""


@dataclass(frozen=True)
class Tokens:
    """Answer that continues the row by tokens, or begins it in place of the data's prompt."""

    token_ids: Sequence[int]
    opens: bool
    reward: float = 0.0


@dataclass(frozen=True)
class End:
    """Answer that finishes the row."""

    reward: float | None = None
    """the row's reward, to which its turns' are added; None leaves it to `reward.functions`"""


class Session(Protocol):
    """An object that lives in one process for the turns of one row, and may keep anything of it.

    It may also have `close()`, called once its row has ended, and `restore(turns)`. If its process was lost, or the run
    resumes, the row is opened again; the turns so far are given to `restore`, or stepped through without it. If its
    environment has `has_openings`, its attribute `opening` is text that the prompt's last message ends with.
    """

    def step(self, turn: Turn) -> Observation | Reply | End:
        """Reply to a turn that a stop token or a stop string ended."""
        ...


class Environment(Protocol):
    """Environment without state of rows, built once per process: a row's next step may run in another process."""

    def step(self, episode: Episode) -> Observation | Reply | End:
        """Reply to a turn that a stop token or a stop string ended."""
        ...
