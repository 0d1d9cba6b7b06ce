"""Requests to a generation engine, its responses, and the engine's interface.

    asleep --wake_weights--> weights to be filled --wake_cache--> awake --sleep--> asleep

An engine starts asleep. Awake, it takes groups of rows by `submit`, and each `step` returns the rows that ended in it.
Where several ranks are one engine, all of them call it alike, with the same requests, and get the same responses.
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

Decode = Callable[[Sequence[int]], str]
"""The text of tokens."""

# Room for tokens without text, and for text that differs where it is cut off.
_SPARE_TOKENS = 8


@dataclass(frozen=True)
class PartialResponse:
    """What a row has already, so that its answer continues where it was aborted; empty for a row that starts."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the tokens, as in `Response`."""
    versions: tuple[int, ...]
    """The policy version that each token was drawn with."""
    choices: Tensor | None = field(default=None, compare=False)
    """As in `Response`; where the engine records them and these are None, it records those of its own weights."""
    turns: tuple[int, ...] | None = None
    """As in `Response`; engines answer single turns, and get none."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"a partial response has {len(self.token_ids)} tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions; give one of each per token"
            )


@dataclass(frozen=True)
class Request:
    """One prompt and the rows (one per sample) that answer it: a group, whose prompt is computed once."""

    rows: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One 63-bit integer per row: with the position it fixes the row's random numbers."""
    sampling: SamplingParams
    partial: tuple[PartialResponse, ...] | None = None
    """What each row has already. It counts towards max_tokens and comes back as the head of the response; with the
    same seeds and weights, the row goes on as if it had never stopped."""

    @property
    def given(self) -> tuple[PartialResponse, ...]:
        """What each row has already, nothing included."""
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
    """The answer of one row."""

    row: int
    token_ids: tuple[int, ...]
    """The stop token included."""
    logprobs: tuple[float, ...]
    """Of the tokens, under the distribution scaled by the temperature (1 where it is 0) and not filtered."""
    finish: Finish
    versions: tuple[int, ...]
    """The policy version that each token was drawn with."""
    choices: Tensor | None = field(default=None, compare=False)
    """int16, flat: of each token fed (the prompt's and all of `token_ids` but the last), its experts in each sparse
    layer; None where they aren't recorded."""
    turns: tuple[int, ...] | None = None
    """The turn in which the model wrote each token, from 1, or 0 where an environment did; None: all in one turn."""
    outcome: Outcome | None = None
    """What the environment made of the row; None leaves it to the reward functions."""

    @property
    def num_own_tokens(self) -> int:
        """Tokens that the model wrote."""
        return len(self.token_ids) if self.turns is None else sum(turn > 0 for turn in self.turns)

    @property
    def last_turn(self) -> tuple[int, ...]:
        """The tokens that the model wrote after the last ones of an environment."""
        if self.turns is None:
            return self.token_ids
        last = max(self.turns, default=0)
        return tuple(token for token, turn in zip(self.token_ids, self.turns, strict=True) if turn == last)


def completes_stop_string(token_ids: Sequence[int], stop_strings: Sequence[str], decode: Decode) -> bool:
    """Whether the text of the tokens contains one of the strings, given that it didn't before the last token.

    `decode` must keep special tokens, which may be stop strings.
    """
    # A token may be no more than one byte of a character.
    num_tokens = max(len(text.encode()) for text in stop_strings) + _SPARE_TOKENS
    window = token_ids[-num_tokens:]
    for start in range(4):
        text = decode(window[start:])
        if any(string in text for string in stop_strings):
            return True
        # A window that begins amid a character: some decoders then lose all characters that are written as bytes.
        if len(window) == len(token_ids) or not text.startswith("\ufffd"):
            break
    return False


def all_weights(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights as they come. Raises ValueError for one that isn't the model's, and at the end for one not given."""
    missing = set(shapes)
    for name, weight in weights:
        if tuple(weight.shape) != shapes.get(name):
            raise ValueError(f"weight {name} of shape {tuple(weight.shape)} isn't one of this model's")
        missing.discard(name)
        yield name, weight
    if missing:
        raise ValueError(f"{len(missing)} of {len(shapes)} weights weren't given, such as {min(missing)}")


class AnsweringEngine(Protocol):
    """The part of an engine that answers requests, whether with weights or from a record."""

    version: int
    """Policy version of the weights held; the resharding flow sets it."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the requests, all or none. Raises ValueError if a row can never fit or has ended already."""
        ...

    def step(self) -> list[Response]:
        """Run one engine iteration and return the rows that finished in it.

        Where it raises, `abort` is what can be called next: it returns all tokens up to the failed step.
        """
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` must be called again: rows are unfinished here, or on ranks that this engine computes with."""
        ...

    def abort(self) -> list[Response]:
        """Return everything unfinished with its tokens so far, and forget it."""
        ...


class GenerationEngine(AnsweringEngine, Protocol):
    """An engine in this process that gives its memory back when it sleeps; used asleep, it raises RuntimeError."""

    wants_iterator: ClassVar[bool]
    """True: it takes new weights by `load_weights`; False: by filling what `wake_weights` returns."""

    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probs, float32, of each row's tokens but the first, at temperature 1, computed anew with these weights.

        Rows have at least 2 tokens, and fewer than the model has positions. Nothing may be unfinished.
        """
        ...

    @property
    def num_unfinished(self) -> int:
        """Rows submitted and not yet returned."""
        ...

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each whole weight that it holds all or part of, by the decoder's name."""
        ...

    def weight_slices(self) -> dict[str, WeightSlice]:
        """Which box of each of them it holds on this rank."""
        ...

    def wake_weights(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Allocate these weights, or all, uninitialised, and return all slices by name; empty if `wants_iterator`.

        Those that weren't named and are still asleep have no storage.
        """
        ...

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Read these slices where they lie, until it sleeps, instead of taking memory; not if `wants_iterator`."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole weights one after another; none is kept by reference."""
        ...

    def keep_weights(self, names: Iterable[str]) -> None:
        """Keep these slices, which are filled and stay as they are, from now on while asleep; not if `wants_iterator`.

        Waking names none of them any more.
        """
        ...

    def wake_cache(self) -> None:
        """Allocate the KV cache; the weights must be awake."""
        ...

    def sleep(self) -> None:
        """Free weights and KV cache. Raises RuntimeError while rows are unfinished."""
        ...

    def cache_bytes_for(self, num_rows: int, num_tokens: int) -> int:
        """What this rank's KV cache takes where so many rows of so many tokens are answered, asleep or awake."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Bytes on the device now: `generation_weights`, `kv_cache` and, where there are any, `decode_graphs`."""
        ...
