"""Prompts in an order that is a pure function of (seed, step): a run resumes with no state but its step.

For training on data, also the answers to learn: one, every one of a conversation, or a pair of responses.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from spmdrl.dataflow.data.column_names import Messages
from spmdrl.dataflow.data.data_rows import Row, SourceRows
from spmdrl.dataflow.data.formats import BadRow, Flaw
from spmdrl.dataflow.data.records import BadRows
from spmdrl.engines.models.renderer import COLUMNS_OF_TEMPLATES, Answer, MarkedTokens, Renderer, TokenizedPrompts
from spmdrl.nouns.batch import Batch, offsets_of
from spmdrl.nouns.settings.data_config import DataConfig, RowNotRendered

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A prompt: its token ids, their text, and the row's other columns.

    `original` is the row's prompt, text or messages; reward functions get this one.
    """

    id: str
    prompt_ids: Sequence[int]
    text: str
    answer: str | None
    columns: dict[str, Any]
    original: str | Messages
    completion: Answer | None = None
    """answer for supervised training if it isn't `answer`; of a pair, the better one"""
    rejected: Answer | None = None
    """worse response of a pair"""


def prompt_columns(prompts: Sequence[Prompt]) -> Batch:
    """Return the prompts as the dock stores them, one row each."""
    ids = [np.asarray(prompt.prompt_ids, dtype=np.int32) for prompt in prompts]
    batch = Batch.of_rows(range(len(ids)))
    values = np.concatenate([np.empty(0, dtype=np.int32), *ids])
    batch.put_ragged("prompt_ids", torch.from_numpy(values), offsets_of([part.size for part in ids]))
    return batch


class PromptSource:
    """The prompts of one or more sources as an endless sequence of epochs, each in its own order.

    An epoch holds every row once. With weights it has as many prompts as the sources have rows, shared out by weight;
    each source then runs through its own epochs.
    """

    def __init__(
        self, rows: Sequence[SourceRows], renderer: Renderer, config: DataConfig, seed: int, *, vocab_size: int,
        check: Callable[[Prompt], None] | None = None,
    ):  # fmt: skip
        """`vocab_size` is the model's: tokenizers may have more tokens than it has embeddings.

        `check` raises Flaw for a row that can't be used though its prompt can.
        """
        # Ids are unique only within a file; with several files the path distinguishes them.
        prefixes = [f"{part.source.path}#" if len(rows) > 1 else "" for part in rows]
        kept = [
            _usable_rows(part, prefix, renderer, config, vocab_size, check)
            for part, prefix in zip(rows, prefixes, strict=True)
        ]
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
                    f"{source.source.path} holds no row that can be used, with data.max_prompt_length = "
                    f"{config.max_prompt_length}; the first is {part.skipped[0]}"
                )
        self.skipped: tuple[BadRow, ...] = tuple(too_long)
        self._parts = kept
        self._renderer = renderer
        self._order = MixedOrder(
            tuple(len(part.positions) for part in kept),
            tuple(part.source.weight for part in rows),
            seed=seed,
            is_shuffled=config.shuffle,
        )

    def __len__(self) -> int:
        """Return the number of prompts in one epoch."""
        return self._order.epoch_size

    @property
    def warnings(self) -> list[str]:
        """Warnings about unused columns and template options."""
        num_in_template = sum(part.prompts.num_in_template for part in self._parts)
        num_texts = sum(len(part.rows) for part in self._parts) - num_in_template
        rows = [row.columns for part in self._parts for row in part.rows]
        has_tools = any(map(self._renderer.tools_of, rows))
        columns = [name for name in COLUMNS_OF_TEMPLATES[1:] if any(row.get(name) for row in rows)]
        return self._renderer.warnings(num_texts, num_in_template, [*["tools"] * has_tools, *columns])

    @property
    def digest(self) -> str:
        """A short digest of all prompts' tokens."""
        whole = hashlib.sha256()
        for part in self._parts:
            whole.update(part.prompts.offsets.tobytes() + part.prompts.ids.tobytes())
        return whole.hexdigest()[:16]

    @property
    def mean_length(self) -> float:
        """Tokens of a prompt on average."""
        lengths = [part.prompts.length(row) for part in self._parts for row in part.positions]
        return sum(lengths) / len(lengths)

    def longer_than(self, num_tokens: int) -> list[tuple[int, str]]:
        """Return length and place of each prompt with more tokens, in the order of the files."""
        prompts = ((part.prompts.length(row), part.rows[row].place) for part in self._parts for row in part.positions)
        return [(length, place) for length, place in prompts if length > num_tokens]

    def take(self, step: int, num_prompts: int) -> list[Prompt]:
        """Return a step's prompts: positions step * num_prompts (steps from 0) and on over the concatenated epochs."""
        start = step * num_prompts
        return [self.at(position) for position in range(start, start + num_prompts)]

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position of the concatenated epochs."""
        return self._prompt(*self._order.at(position))

    def all(self) -> Iterator[Prompt]:
        """Yield every prompt once, in the order of the files."""
        for source, part in enumerate(self._parts):
            for index in range(len(part.positions)):
                yield self._prompt(source, index)

    def texts(self) -> Iterator[str]:
        """Yield every prompt's text once, in the order of the files."""
        return (part.prompts.texts[row] for part in self._parts for row in part.positions)

    def _prompt(self, source: int, index: int) -> Prompt:
        part = self._parts[source]
        return part.prompt(part.positions[index])


@dataclass(frozen=True)
class _UsableRows:
    rows: tuple[Row, ...]
    prefix: str
    """prefix of the rows' ids"""
    prompts: TokenizedPrompts
    positions: list[int] = field(default_factory=list)
    skipped: list[BadRow] = field(default_factory=list)

    def prompt(self, position: int) -> Prompt:
        row, ids, text = self.rows[position], self.prompts.prompt_ids(position), self.prompts.texts[position]
        row_id = self.prefix + row.id
        return Prompt(row_id, ids, text, row.answer, row.columns, row.prompt, row.completion, row.rejected)


def _usable_rows(
    part: SourceRows, prefix: str, renderer: Renderer, config: DataConfig, vocab_size: int,
    check: Callable[[Prompt], None] | None,
) -> _UsableRows:  # fmt: skip
    """Select rows with 1 to `data.max_prompt_length` tokens, all in the model's vocabulary."""
    prompts = renderer.prompts([row.prompt for row in part.rows], [row.columns for row in part.rows])
    usable = _UsableRows(part.rows, prefix, prompts)
    has_foreign = prompts.ids.size > 0 and int(prompts.ids.max()) >= vocab_size
    for position, row in enumerate(part.rows):
        length = prompts.length(position)
        highest = max(prompts.prompt_ids(position), default=0) if has_foreign else 0
        try:
            if position in prompts.problems:
                raise Flaw("not_rendered", prompts.problems[position])
            if highest >= vocab_size:
                raise Flaw("unknown_token", renderer.tokenizer.unknown_token(highest, vocab_size))
            if length == 0:
                raise Flaw("empty_prompt", "the prompt has no token")
            if length > config.max_prompt_length:
                problem = f"the prompt has {length} tokens, but data.max_prompt_length is {config.max_prompt_length}"
                raise Flaw("prompt_too_long", problem)
            if check is not None:
                check(usable.prompt(position))
            usable.positions.append(position)
        except Flaw as flaw:
            usable.skipped.append(BadRow(row.place, flaw.kind, str(flaw)))
    return usable


class MixedOrder:
    """Order of rows over sources and epochs: a pure function of (seed, position).

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
        # Batches pass through epochs in turn, so few orders are in use at a time.
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)
        self._source_epoch = functools.lru_cache(maxsize=2 * len(sizes))(self._make_source_epoch)

    def at(self, position: int) -> tuple[int, int]:
        """Return the source and row at a position."""
        epoch, place = divmod(position, self.epoch_size)
        source, drawn = self._epoch(epoch)[place]
        round_, index = divmod(epoch * self._counts[source] + int(drawn), self._sizes[source])
        return int(source), int(self._source_epoch(int(source), round_)[index])

    def _make_epoch(self, epoch: int) -> np.ndarray:
        """Return an epoch's (source, how many of that source came before it in the epoch), [epoch_size, 2]."""
        sources = np.repeat(np.arange(len(self._counts)), self._counts)
        drawn = np.concatenate([np.arange(count) for count in self._counts])
        if self._is_shuffled:
            order = random_order(self.epoch_size, (self._seed, epoch))
        elif self._is_weighted:
            # Interleave the sources evenly.
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
    """Return a permutation that depends on the key alone.

    Sorted raw bits: NumPy promises the bits of Philox to stay the same over its versions, but not `permutation`.
    """
    return np.argsort(np.random.Philox(np.random.SeedSequence(key)).random_raw(size), kind="stable")


# Tokens that a template may add around an answer.
_MOST_AROUND = 256


@dataclass(frozen=True)
class LearntRows:
    """Rows as a model learns them."""

    renderer: Renderer
    turns: Literal["last", "all"] = "last"

    def of(self, prompt: Prompt) -> list[MarkedTokens]:
        """Return the row's tokens with its answer, or with either one of a pair. Raises ValueError, naming the row."""
        try:
            return self._of(prompt)
        except RowNotRendered as problem:
            raise RowNotRendered(f"row {prompt.id} can't be learnt: {problem}") from None

    def _of(self, prompt: Prompt) -> list[MarkedTokens]:
        answers, messages = answers_of(prompt), prompt.original
        if self.turns == "last" or isinstance(messages, str) or not self.renderer.uses_template(messages):
            return [self.renderer.answer(messages, answer, prompt.columns) for answer in answers]
        (answer,), before = answers, list(messages)
        if isinstance(answer, str):
            # A text continues the assistant's message that ends the prompt.
            begun = before.pop().get("content") or "" if before[-1]["role"] == "assistant" else ""
            answer = {"role": "assistant", "content": begun + answer}
        return [self.renderer.conversation([*before, answer], prompt.columns)]

    def check(self, vocab_size: int, max_positions: int, rule: str = "") -> Callable[[Prompt], None]:
        """Return a function that raises Flaw for a row that such a model can't learn; `rule` sets the positions."""
        # Other tokenizers have no such token, and tokenizing all answers of a large file takes minutes.
        may_be_foreign = self.renderer.tokenizer.highest_id >= vocab_size
        is_first = True

        def check_row(prompt: Prompt) -> None:
            nonlocal is_first
            # A token has at least one byte, so few answers must be rendered.
            sizes = [len(str(answer).encode()) for answer in answers_of(prompt)]
            is_short = len(prompt.prompt_ids) + 2 * max(sizes) + _MOST_AROUND <= max_positions
            if is_short and not (is_first or may_be_foreign or self.turns == "all"):
                return
            is_first = False
            try:
                rows = self._of(prompt)
            except RowNotRendered as problem:
                raise Flaw("not_rendered", f"it can't be learnt: {problem}") from None
            if (length := max(len(row.ids) for row in rows)) > max_positions:
                limit = f"{max_positions} positions{rule}"
                raise Flaw("row_too_long", f"it has {length} tokens, but the model has {limit}")
            if (highest := max(max(row.ids) for row in rows)) >= vocab_size:
                problem_of_token = self.renderer.tokenizer.unknown_token(highest, vocab_size)
                raise Flaw("unknown_token", f"its answer can't be learnt: {problem_of_token}")

        return check_row


def answers_of(prompt: Prompt) -> tuple[Answer, ...]:
    """Answer to learn of a row: its completion or answer; of a pair, the preferred response and the other one."""
    answer = prompt.answer if prompt.completion is None else prompt.completion
    assert answer is not None, f"row {prompt.id} has no answer, which reading it should have refused"
    return (answer,) if prompt.rejected is None else (answer, prompt.rejected)
