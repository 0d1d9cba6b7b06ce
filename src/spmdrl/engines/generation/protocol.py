"""Requests to a generation engine, its responses, and the engine's interface.

    asleep --wake_weights--> weights to be filled --wake_cache--> awake --sleep--> asleep

An engine starts asleep. Awake, it takes groups of rows by `submit`, and each `step` returns the rows that ended in it.
Ranks that form one engine make the same calls with the same requests, and get the same responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.runtime.workers.verdict import Outcome

if TYPE_CHECKING:
    from torch import Tensor

    from spmdrl.nouns.batch import WeightSlice

Finish = Literal["stop", "length", "aborted"]

ENDS = ("ended", "length", "malformed", "timed_out", "crashed", "quarantined")
"""Reasons for the end of a row with an environment: the environment, no room for more tokens, or a step's verdict."""

Decode = Callable[[Sequence[int]], str]
"""The text of tokens."""

# Room for tokens without text, and for text that differs where it is cut off.
_SPARE_TOKENS = 8


@dataclass(frozen=True)
class PartialResponse:
    """A row's tokens so far, from which generation continues after an abort; empty for a new row."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs of the tokens, as in `Response`."""
    versions: tuple[int, ...]
    """Policy version that drew each token."""
    choices: Tensor | None = field(default=None, compare=False)
    """As in `Response`; if None, an engine that records choices computes them with its own weights."""
    turns: tuple[int, ...] | None = None
    """As in `Response`; engines generate single turns, and get none."""
    turn_rewards: tuple[float, ...] = ()
    """As in `Response`."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"a partial response has {len(self.token_ids)} tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions; give one of each per token"
            )


@dataclass(frozen=True)
class Request:
    """One prompt and its rows (one per sample): a group, whose prompt is computed once."""

    rows: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One 63-bit integer per row: with the position it fixes the row's random numbers."""
    sampling: SamplingParams
    partial: tuple[PartialResponse, ...] | None = None
    """Tokens that each row already has. They count towards max_tokens and come back as the head of the response; with
    the same seeds and weights, the row continues as if it had never stopped."""

    @property
    def given(self) -> tuple[PartialResponse, ...]:
        """Partial response of each row, perhaps empty."""
        return self.partial or (PartialResponse((), (), ()),) * len(self.rows)

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seeds):
            raise ValueError(f"a request has {len(self.rows)} rows and {len(self.seeds)} seeds; give a seed per row")
        if self.partial is not None and len(self.partial) != len(self.rows):
            raise ValueError(
                f"a request has {len(self.rows)} rows and {len(self.partial)} partial responses; give one per row"
            )
        if not self.prompt_ids:
            raise ValueError(f"rows {list(self.rows)} have an empty prompt; give it a token, such as a start token")


@dataclass(frozen=True)
class Response:
    """Generated response of one row."""

    row: int
    token_ids: tuple[int, ...]
    """Generated tokens, including the stop token."""
    logprobs: tuple[float, ...]
    """Log-probs of the tokens, under the distribution scaled by the temperature (1 for 0) and not filtered."""
    finish: Finish
    versions: tuple[int, ...]
    """Policy version that drew each token."""
    choices: Tensor | None = field(default=None, compare=False)
    """int16, flat: for each fed token (the prompt's and all of `token_ids` but the last), its experts in each sparse
    layer; None if not recorded."""
    turns: tuple[int, ...] | None = None
    """Turn of each token, from 1, or 0 for an environment's, -1 for its first of a piece; None: all in one turn."""
    turn_rewards: tuple[float, ...] = ()
    """With turns, per token: the environment's reward of a turn at its last one, else 0."""
    outcome: Outcome | None = None
    """Outcome from the environment; None leaves it to the reward functions."""

    @property
    def num_own_tokens(self) -> int:
        """Number of tokens that the model wrote."""
        return len(self.token_ids) if self.turns is None else sum(turn > 0 for turn in self.turns)

    @property
    def end(self) -> str:
        """Reason for the end of a row with an environment, one of `ENDS`."""
        if self.finish == "length":
            return "length"
        if self.outcome is None or self.outcome.verdict.has_reward:
            return "ended"
        return self.outcome.verdict.name.lower()

    @property
    def last_turn(self) -> tuple[int, ...]:
        """Tokens that the model wrote after the last ones of an environment."""
        if self.turns is None:
            return self.token_ids
        last = max(self.turns, default=0)
        return tuple(token for token, turn in zip(self.token_ids, self.turns, strict=True) if turn == last)


def completes_stop_string(token_ids: Sequence[int], stop_strings: Sequence[str], decode: Decode) -> bool:
    """Return True if the text of the tokens contains one of the strings; it didn't before the last token.

    `decode` must keep special tokens, which may be stop strings.
    """
    # A token may be no more than one byte of a character.
    num_tokens = max(len(text.encode()) for text in stop_strings) + _SPARE_TOKENS
    window = token_ids[-num_tokens:]
    for start in range(4):
        text = decode(window[start:])
        if any(string in text for string in stop_strings):
            return True
        # The window begins within a character: some decoders then lose all characters that are written as bytes.
        if len(window) == len(token_ids) or not text.startswith("\ufffd"):
            break
    return False


def all_weights(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights as they come. Raises ValueError for an unknown weight, and at the end for a missing one."""
    missing = set(shapes)
    for name, weight in weights:
        if tuple(weight.shape) != shapes.get(name):
            raise ValueError(f"weight {name} of shape {tuple(weight.shape)} isn't one of this model's")
        missing.discard(name)
        yield name, weight
    if missing:
        raise ValueError(f"{len(missing)} of {len(shapes)} weights are missing, such as {min(missing)}")


class AnsweringEngine(Protocol):
    """The part of an engine that serves requests, from weights or from a record."""

    version: int
    """Policy version of the weights held; the resharding flow sets it."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the requests, all or none. Raises ValueError if a row can never fit or has ended already."""
        ...

    def step(self) -> list[Response]:
        """Run one engine iteration and return the rows that finished in it.

        After an exception, call `abort`, which returns all tokens up to the failed step.
        """
        ...

    @property
    def has_work(self) -> bool:
        """True if `step` must be called again: rows are unfinished here, or on ranks that this engine computes with."""
        ...

    def abort(self) -> list[Response]:
        """Forget all unfinished rows; returns them with their tokens so far."""
        ...


class GenerationEngine(AnsweringEngine, Protocol):
    """An engine in this process that frees its memory when it sleeps; used asleep, it raises RuntimeError."""

    wants_iterator: ClassVar[bool]
    """True: takes new weights by `load_weights`; False: by filling the result of `wake_weights`."""

    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return log-probs, float32, of each row's tokens but the first, at temperature 1, with the current weights.

        Rows have at least 2 tokens, and fewer than the model has positions. No row may be unfinished.
        """
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of rows submitted and not yet returned."""
        ...

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of each weight that it holds all or part of, by the decoder's name."""
        ...

    def weight_slices(self) -> dict[str, WeightSlice]:
        """Return this rank's box of each weight."""
        ...

    def wake_weights(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Allocate these weights, or all, uninitialised, and return all slices by name; empty if `wants_iterator`.

        Unnamed weights that are still asleep have no storage.
        """
        ...

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Read these slices in place until it sleeps, instead of allocating; not if `wants_iterator`."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole weights one after another; none is kept by reference."""
        ...

    def keep_weights(self, names: Iterable[str]) -> None:
        """Keep these slices, which are filled and final, from now on while asleep; not if `wants_iterator`.

        Waking then leaves them alone.
        """
        ...

    def wake_cache(self) -> None:
        """Allocate the KV cache; the weights must be awake."""
        ...

    def sleep(self) -> None:
        """Free weights and KV cache. Raises RuntimeError while rows are unfinished."""
        ...

    def cache_bytes_for(self, *, num_groups: int, group_size: int, num_tokens: int) -> int:
        """Return the bytes of this rank's KV cache for groups of rows of this many tokens, asleep or awake."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Return bytes on the device now: `generation_weights`, `kv_cache` and, if there are any, `decode_graphs`."""
        ...


class IdleEngine:
    """Engine of a rank that only trains: it holds no weights, gets no requests and is always asleep.

    The weights' shapes are those of the ranks that generate.
    """

    wants_iterator: ClassVar[bool] = False

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.version = 0
        self._shapes = shapes

    def submit(self, requests: Sequence[Request]) -> None:
        assert not requests, f"{len(requests)} requests came to a rank that doesn't generate"

    def step(self) -> list[Response]:
        return []

    @property
    def has_work(self) -> bool:
        return False

    def abort(self) -> list[Response]:
        return []

    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        return []

    @property
    def num_unfinished(self) -> int:
        return 0

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def weight_slices(self) -> dict[str, WeightSlice]:
        return {}

    def wake_weights(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        return {}

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        assert not weights, "a rank that doesn't generate has no weights to borrow"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError("a rank that doesn't generate takes no weights")

    def keep_weights(self, names: Iterable[str]) -> None:
        pass

    def wake_cache(self) -> None:
        pass

    def sleep(self) -> None:
        pass

    def cache_bytes_for(self, *, num_groups: int, group_size: int, num_tokens: int) -> int:
        return 0

    def memory_bytes(self) -> dict[str, int]:
        return {"generation_weights": 0, "kv_cache": 0}
