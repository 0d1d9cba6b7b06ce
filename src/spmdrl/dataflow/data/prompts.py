"""Prompts in an order that is a pure function of (seed, step): a run resumes with no state but its step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from spmdrl.dataflow.data.column_names import Messages
from spmdrl.dataflow.data.data_rows import DataConfig, Row, SourceRows
from spmdrl.dataflow.data.formats import BadRow
from spmdrl.dataflow.data.records import BadRows
from spmdrl.types import Batch, offsets_of

logger = logging.getLogger(__name__)

_TOKENIZER_BATCH = 1024


class Tokenizer(Protocol):
    """What prompts need of a Hugging Face tokenizer."""

    chat_template: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """One prompt to answer: its token ids, the text that they spell, and the row's other columns.

    `original` is the prompt as the row holds it, text or messages; reward functions get this one.
    """

    id: str
    prompt_ids: Sequence[int]
    text: str
    answer: str | None
    columns: dict[str, Any]
    original: str | Messages
    completion: str | None = None
    """the text that supervised training learns, where it isn't the answer; of a pair, the better one"""
    rejected: str | None = None
    """the worse response of a pair"""


def prompt_columns(prompts: Sequence[Prompt]) -> Batch:
    """The prompts as the dock stores them, one row each."""
    ids = [np.asarray(prompt.prompt_ids, dtype=np.int32) for prompt in prompts]
    batch = Batch.of_rows(range(len(ids)))
    values = np.concatenate([np.empty(0, dtype=np.int32), *ids])
    batch.put_ragged("prompt_ids", torch.from_numpy(values), offsets_of([part.size for part in ids]))
    return batch


@dataclass(frozen=True)
class TokenizedPrompts:
    """Texts with the token ids of each: row i holds `ids[offsets[i]:offsets[i + 1]]`."""

    texts: list[str]
    ids: np.ndarray
    offsets: np.ndarray
    uses_template: bool
    """Whether the chat template made any of the texts."""

    def prompt_ids(self, row: int) -> tuple[int, ...]:
        return tuple(self.ids[self.offsets[row] : self.offsets[row + 1]].tolist())

    def length(self, row: int) -> int:
        return int(self.offsets[row + 1] - self.offsets[row])


def tokenize_prompts(prompts: Sequence[str | Messages], tokenizer: Tokenizer, config: DataConfig) -> TokenizedPrompts:
    """Render prompts by `data.chat_template` and tokenize them.

    Rendered templates hold their own special tokens; plain text gets those that the tokenizer puts before text.
    """
    rendered = [_render(prompt, tokenizer, config) for prompt in prompts]
    ids: list[list[int]] = [[] for _ in rendered]
    for is_template in (False, True):
        rows = [row for row, (_, from_template) in enumerate(rendered) if from_template == is_template]
        for start in range(0, len(rows), _TOKENIZER_BATCH):
            batch = rows[start : start + _TOKENIZER_BATCH]
            tokens = tokenizer([rendered[row][0] for row in batch], add_special_tokens=not is_template)["input_ids"]
            for row, row_ids in zip(batch, tokens, strict=True):
                ids[row] = row_ids
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    flat = np.fromiter((token for row_ids in ids for token in row_ids), dtype=np.int32, count=int(offsets[-1]))
    uses_template = any(from_template for _, from_template in rendered)
    return TokenizedPrompts([text for text, _ in rendered], flat, offsets, uses_template)


def _render(prompt: str | Messages, tokenizer: Tokenizer, config: DataConfig) -> tuple[str, bool]:
    """The prompt's text, and whether the chat template made it."""
    is_text = isinstance(prompt, str)
    if config.chat_template == "never" or (config.chat_template == "auto" and is_text):
        return (prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)), False
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"data.chat_template is '{config.chat_template}' and a prompt is {'text' if is_text else 'messages'}, "
            "but the tokenizer has no chat template; set data.chat_template: never, or use a model that has one"
        )
    messages = [{"role": "user", "content": prompt}] if is_text else prompt
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), True


class PromptSource:
    """The prompts of one or more sources as an endless sequence of epochs, each in its own order.

    An epoch holds every row once. With weights it has as many prompts as the sources have rows, shared out by weight;
    each source then runs through its own epochs.
    """

    def __init__(
        self, rows: Sequence[SourceRows], tokenizer: Tokenizer, config: DataConfig, seed: int, *, vocab_size: int
    ):
        """`vocab_size` is the model's: tokenizers may have more tokens than it has embeddings."""
        kept = [_usable_rows(part, tokenizer, config, vocab_size) for part in rows]
        too_long = [bad for part in kept for bad in part.skipped]
        if too_long and config.on_bad_row == "error":
            raise BadRows(too_long, sum(len(part.rows) for part in rows))
        for part, source in zip(kept, rows, strict=True):
            if part.skipped:
                logger.warning(
                    "%s: %d rows skipped, the first is %s", source.source.path, len(part.skipped), part.skipped[0]
                )
            if not part.positions:
                raise ValueError(
                    f"{source.source.path} holds no prompt within data.max_prompt_length = {config.max_prompt_length}"
                )
        self.skipped: tuple[BadRow, ...] = tuple(too_long)
        self._parts = kept
        self._order = MixedOrder(
            tuple(len(part.positions) for part in kept),
            tuple(part.source.weight for part in rows),
            seed=seed,
            is_shuffled=config.shuffle,
        )
        # Ids need to be unique in a file only; with several files the path distinguishes them.
        self._prefixes = [f"{part.source.path}#" if len(rows) > 1 else "" for part in rows]

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return self._order.epoch_size

    @property
    def uses_template(self) -> bool:
        """Whether the chat template made any of the prompts."""
        return any(part.prompts.uses_template for part in self._parts)

    @property
    def mean_length(self) -> float:
        """Tokens of a prompt on average."""
        lengths = [part.prompts.length(row) for part in self._parts for row in part.positions]
        return sum(lengths) / len(lengths)

    @property
    def longest(self) -> int:
        """Tokens in the longest prompt."""
        return max(part.prompts.length(row) for part in self._parts for row in part.positions)

    def take(self, step: int, num_prompts: int) -> list[Prompt]:
        """The prompts of a step, counted from 0: positions step * num_prompts and on over the concatenated epochs."""
        start = step * num_prompts
        return [self.at(position) for position in range(start, start + num_prompts)]

    def at(self, position: int) -> Prompt:
        """The prompt at a position of the concatenated epochs."""
        return self._prompt(*self._order.at(position))

    def all(self) -> Iterator[Prompt]:
        """Every prompt once, in the order of the files."""
        for source, part in enumerate(self._parts):
            for index in range(len(part.positions)):
                yield self._prompt(source, index)

    def _prompt(self, source: int, index: int) -> Prompt:
        part = self._parts[source]
        position = part.positions[index]
        row = part.rows[position]
        ids = part.prompts.prompt_ids(position)
        return Prompt(
            self._prefixes[source] + row.id,
            ids,
            part.prompts.texts[position],
            row.answer,
            row.columns,
            row.prompt,
            row.completion,
            row.rejected,
        )


@dataclass(frozen=True)
class _UsableRows:
    rows: tuple[Row, ...]
    prompts: TokenizedPrompts
    positions: list[int]
    skipped: list[BadRow]


def _usable_rows(part: SourceRows, tokenizer: Tokenizer, config: DataConfig, vocab_size: int) -> _UsableRows:
    """Which rows have between 1 and `data.max_prompt_length` tokens, all of them in the model's vocabulary."""
    prompts = tokenize_prompts([row.prompt for row in part.rows], tokenizer, config)
    positions: list[int] = []
    skipped: list[BadRow] = []
    has_foreign = prompts.ids.size > 0 and int(prompts.ids.max()) >= vocab_size
    for position, row in enumerate(part.rows):
        length = prompts.length(position)
        highest = max(prompts.prompt_ids(position), default=0) if has_foreign else 0
        if highest >= vocab_size:
            skipped.append(BadRow(row.place, "unknown_token", foreign_token(highest, tokenizer, vocab_size)))
        elif 1 <= length <= config.max_prompt_length:
            positions.append(position)
        elif length == 0:
            skipped.append(BadRow(row.place, "empty_prompt", "the prompt has no token"))
        else:
            problem = f"the prompt has {length} tokens, but data.max_prompt_length is {config.max_prompt_length}"
            skipped.append(BadRow(row.place, "prompt_too_long", problem))
    return _UsableRows(part.rows, prompts, positions, skipped)


def foreign_token(token_id: int, tokenizer: Tokenizer, vocab_size: int) -> str:
    """What is wrong with a row that has a token without an embedding."""
    return (
        f"it has token {token_id} ({tokenizer.decode([token_id])!r}), but the model's vocabulary ends at "
        f"{vocab_size - 1}; use the tokenizer that the model was trained with"
    )


class MixedOrder:
    """Which row of which source stands at each position: a pure function of (seed, position).

    `sizes` are the sources' numbers of rows, `weights` their shares of an epoch, or None each for shares by size.
    """

    def __init__(self, sizes: tuple[int, ...], weights: tuple[float | None, ...], *, seed: int, is_shuffled: bool):
        total = sum(sizes)
        given = [weight for weight in weights if weight is not None]
        shares = given if len(given) == len(sizes) else list(sizes)
        self._sizes = sizes
        self._counts = [max(1, round(share / sum(shares) * total)) for share in shares]
        self._seed = seed
        self._is_shuffled = is_shuffled
        self._is_weighted = None not in weights
        self.epoch_size = sum(self._counts)
        # Batches run through one epoch after another, so few orders are in use at a time.
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)
        self._source_epoch = functools.lru_cache(maxsize=2 * len(sizes))(self._make_source_epoch)

    def at(self, position: int) -> tuple[int, int]:
        """The source and the row in it."""
        epoch, place = divmod(position, self.epoch_size)
        source, drawn = self._epoch(epoch)[place]
        round_, index = divmod(epoch * self._counts[source] + int(drawn), self._sizes[source])
        return int(source), int(self._source_epoch(int(source), round_)[index])

    def _make_epoch(self, epoch: int) -> np.ndarray:
        """An epoch's (source, how many of that source came before it in the epoch), [epoch_size, 2]."""
        sources = np.repeat(np.arange(len(self._counts)), self._counts)
        drawn = np.concatenate([np.arange(count) for count in self._counts])
        if self._is_shuffled:
            order = random_order(self.epoch_size, (self._seed, epoch))
        elif self._is_weighted:
            # The sources are interleaved evenly.
            order = np.argsort((drawn + 0.5) / np.repeat(self._counts, self._counts), kind="stable")
        else:
            order = np.arange(self.epoch_size)
        entries: np.ndarray = np.stack([sources, drawn], axis=1)
        return entries[order]

    def _make_source_epoch(self, source: int, round_: int) -> np.ndarray:
        if not self._is_shuffled:
            return np.arange(self._sizes[source])
        return random_order(self._sizes[source], (self._seed, round_, source))


def random_order(size: int, key: tuple[int, ...]) -> np.ndarray:
    """A permutation that depends on the key alone.

    Sorted raw bits: NumPy promises the bits of Philox to stay the same over its versions, but not `permutation`.
    """
    return np.argsort(np.random.Philox(np.random.SeedSequence(key)).random_raw(size), kind="stable")
