"""Data rows: read, checked and named by file and line before any model is loaded."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from spmdrl.dataflow.data.column_names import (
    ANSWER_KEYS,
    COMPLETION_KEYS,
    PROMPT_KEYS,
    Column,
    FoundColumns,
    Messages,
    check_prompt,
    find_columns,
    find_pair,
    is_empty,
)
from spmdrl.dataflow.data.formats import BadRow, Flaw, Record
from spmdrl.dataflow.data.hub_data import HUB_SCHEME
from spmdrl.dataflow.data.published import published_columns
from spmdrl.dataflow.data.records import BadRows, data_files, has_splits, is_made, read_records
from spmdrl.engines.models.renderer import Answer
from spmdrl.nouns.settings.data_config import DataConfig, DataSource, data_sources

logger = logging.getLogger(__name__)

_MOST_LEVELS = 64
_OF_ANOTHER_FORMAT = {"not_json", "not_object", "invalid_utf8"}


@dataclass(frozen=True)
class Row:
    """One checked data row.

    `columns` holds the row without prompt and id, under the row's own names, and `answer`.
    """

    id: str
    place: str
    prompt: str | Messages
    answer: str | None
    columns: dict[str, Any]
    completion: Answer | None = None
    """answer for supervised training if the row has one beside `answer`; of a pair, the better one"""
    rejected: Answer | None = None
    """worse response of a pair"""


@dataclass(frozen=True)
class SourceRows:
    """Rows of one source: usable ones, skipped bad ones, and the columns of their parts."""

    source: DataSource
    rows: tuple[Row, ...]
    skipped: tuple[BadRow, ...]
    found: dict[str, int]

    @property
    def is_of_wrong_kind(self) -> bool:
        """True if all rows are bad for one reason: then it is the wrong file."""
        kinds = {bad.kind for bad in self.skipped}
        return not self.rows and len(self.skipped) > 2 and (len(kinds) == 1 or kinds <= _OF_ANOTHER_FORMAT)

    @property
    def summary(self) -> str:
        """Summary for the screen, as in `a.jsonl: 7473 rows, prompt in 'question', answer in 'answer'`."""
        found = ", ".join(f"{name} ({count})" if count < len(self.rows) else name for name, count in self.found.items())
        skipped = f", {len(self.skipped)} bad rows skipped" if self.skipped else ""
        return f"{self.source.path}: {len(self.rows)} rows, {found}{skipped}"


@dataclass(frozen=True)
class RowNeeds:
    """Parts that every row needs beside its prompt."""

    answer: bool = False
    """needed by the built-in reward functions"""
    completion: bool = False
    """needed by supervised training; an answer will do"""
    pair: bool = False
    """a better and a worse response, for preferences and reward models"""
    margin_key: str | None = None
    """column with the margin between them"""


def read_rows(
    paths: Any, config: DataConfig, *, needs: RowNeeds | None = None, key: str = "data.train"
) -> list[SourceRows]:
    """Read and check all rows of some paths, one entry per source.

    Raises BadRows with every bad row of every source, or, with `data.on_bad_row: skip`, leaves them out.
    """
    sources = data_sources(paths, key)
    if not sources:
        raise ValueError(f"{key} is not set; name a data file, such as one of JSON lines, or a hub:// URL")
    splits = _splits_of(sources, config, key)
    _refuse_files_named_twice(sources, splits, key)
    most_rows = config.max_rows if key == "data.train" else None
    checked = [
        _read_source(source, islice(read_records(source.path, split), most_rows), config, needs or RowNeeds())
        for source, split in zip(sources, splits, strict=True)
    ]
    bad = [row for part in checked for row in part.skipped]
    if bad and config.on_bad_row == "error":
        alike = {part.source.path: list(part.skipped) for part in checked if part.is_of_wrong_kind}
        raise BadRows(bad, len(bad) + sum(len(part.rows) for part in checked), alike)
    for part in checked:
        if part.skipped:
            logger.warning("%s; the first is %s", part.summary, part.skipped[0])
        if not part.rows:
            first = f", the first for this: {part.skipped[0]}" if part.skipped else ""
            raise ValueError(
                f"{key}: {part.source.path} holds no usable row; {len(part.skipped)} were skipped as bad{first}"
            )
    return checked


def rows_of_prompts(prompts: Sequence[str]) -> SourceRows:
    """Return rows for prompts from the command line."""
    places = [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    rows = tuple(Row(place, place, prompt, None, {}) for place, prompt in zip(places, prompts, strict=True))
    return SourceRows(DataSource("the command line"), rows, (), {})


def _splits_of(sources: Sequence[DataSource], config: DataConfig, key: str) -> list[str | None]:
    """Return the split to read of each source; None for its only one. Raises ValueError if none has the one named."""
    name, given, other = (
        ("split", config.split, "train") if key == "data.train" else ("eval_split", config.eval_split, "test")
    )
    having = [has_splits(source.path) for source in sources]
    if given is not None and not any(having):
        raise ValueError(
            f"data.{name} is {given}, but {key} names neither a data set of the hub nor a folder, which alone have "
            "splits; leave it out, or name one"
        )
    of_hub = given or other
    return [
        of_hub if source.path.startswith(HUB_SCHEME) else given if is_folder else None
        for source, is_folder in zip(sources, having, strict=True)
    ]


def _refuse_files_named_twice(sources: Sequence[DataSource], splits: Sequence[str | None], key: str) -> None:
    files = [
        file
        for source, split in zip(sources, splits, strict=True)
        if not is_made(source.path)
        for file in data_files(source.path, split).values()
    ]
    twice = [str(file) for file, count in Counter(file.resolve() for file in files).items() if count > 1]
    if twice:
        raise ValueError(f"{key} names {twice[0]} twice, by itself and in a folder or pattern; name it once")


def _read_source(
    source: DataSource, records: Iterable[Record | BadRow], config: DataConfig, needs: RowNeeds
) -> SourceRows:
    rows: list[Row] = []
    bad: list[BadRow] = []
    names: Counter[str] = Counter()
    places: dict[str, str] = {}
    for record in records:
        if isinstance(record, BadRow):
            bad.append(record)
            continue
        # Ids are unique only within a file; in a folder or pattern the file's name distinguishes equal ids.
        given = record.values.get("id")
        prefix = "" if record.file == source.path else f"{record.file}#"
        row_id = record.place if given is None else f"{prefix}{given}"
        try:
            found = _checked_columns(record.values, source.format or config.format, config, needs)
            _check_id(given, row_id, places)
        except Flaw as flaw:
            bad.append(BadRow(record.place, flaw.kind, str(flaw)))
            continue
        places[row_id] = record.place
        rows.append(_row(record, row_id, found))
        parts = {"prompt": found.prompt, "answer": found.answer, "completion": found.completion}
        parts |= {"rejected": found.rejected}
        names.update(f"{part} in '{column.key}'" for part, column in parts.items() if column.key)
    return SourceRows(source, tuple(rows), tuple(bad), dict(names))


def _row(record: Record, row_id: str, found: FoundColumns) -> Row:
    columns = {name: value for name, value in record.values.items() if name not in ("id", found.prompt.key)}
    columns["answer"] = found.answer.value
    answer = None if found.answer.value is None else str(found.answer.value)
    completion = found.completion.value if isinstance(found.completion.value, (str, dict)) else None
    return Row(row_id, record.place, found.prompt.value, answer, columns, completion, found.rejected.value)


def _checked_columns(values: dict[str, Any], form: str, config: DataConfig, needs: RowNeeds) -> FoundColumns:
    """Return the parts of a row that has what is needed. Raises Flaw."""
    _check_values(values)
    if form == "auto":
        found = find_columns(values, config.prompt_key, config.answer_key)
    else:
        found = published_columns(form, values)
    if needs.pair:
        found = find_pair(values, found, needs.margin_key, is_prompt_named=config.prompt_key is not None)
    if found.prompt.key is None:
        keys = config.prompt_key or " or ".join(PROMPT_KEYS)
        columns = ", ".join(values) or "none"
        raise Flaw("no_prompt", f"no prompt in {keys}; its columns are {columns}: set data.prompt_key")
    check_prompt(found.prompt)
    if needs.answer:
        _check_answer(found.answer, config)
    if needs.completion:
        _check_completion(found)
    return found


def _check_answer(answer: Column, config: DataConfig) -> None:
    if answer.value is None:
        raise Flaw(
            "no_answer",
            f"no answer in {config.answer_key or ', '.join(ANSWER_KEYS)}, but the built-in reward functions need one: "
            "add it, set data.answer_key, or name another reward function",
        )
    if not _is_text_or_number(answer.value):
        kind = type(answer.value).__name__
        raise Flaw("answer_type", f"'{answer.key}' is a {kind}, but must be text or a number")
    if not str(answer.value).strip():
        raise Flaw("empty_answer", f"'{answer.key}' is empty")


def _check_completion(found: FoundColumns) -> None:
    column = found.completion if found.completion.key else found.answer
    if column.key is None:
        raise Flaw(
            "no_completion",
            f"nothing to learn: no {', '.join((*COMPLETION_KEYS, 'answer'))} and no messages that end with the "
            "assistant's, one of which supervised training needs",
        )
    if not (_is_text_or_number(column.value) or (isinstance(column.value, dict) and found.completion.key)):
        kind = type(column.value).__name__
        raise Flaw("completion_type", f"'{column.key}' is a {kind}, but must be text or one message of the assistant")
    if is_empty(column.value):
        raise Flaw("empty_completion", f"'{column.key}' is empty, so there is nothing to learn")


def _is_text_or_number(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _check_id(given: Any, row_id: str, places: Mapping[str, str]) -> None:
    """Check an id against `places`, the place of each earlier id."""
    if isinstance(given, bool) or not isinstance(given, (str, int, type(None))):
        raise Flaw("id_type", f"'id' is a {type(given).__name__}, but must be text or a whole number")
    if row_id in places:
        raise Flaw(
            "duplicate_id", f"id '{row_id}' stands at {places[row_id]} already; leave ids out to number the rows"
        )


def _check_values(values: dict[str, Any]) -> None:
    """Refuse infinite numbers, text that can't be encoded and too many levels anywhere; NaN becomes None in place."""
    pending: list[tuple[str, Any, int]] = [("", values, 0)]
    while pending:
        name, value, level = pending.pop()
        if level > _MOST_LEVELS:
            raise Flaw("too_deep", f"'{name[:40]}...' has more than {_MOST_LEVELS} levels inside each other")
        if isinstance(value, float) and not math.isfinite(value):
            raise Flaw("not_finite", f"'{name}' is {value}, but must be finite; leave it out or write null")
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise Flaw("broken_text", f"'{name}' holds half of a UTF-16 surrogate pair, which no tokenizer can read")
        if isinstance(value, dict | list):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(inner, float) and math.isnan(inner):
                    value[key] = None  # pandas' mark of a missing value
                named = f"{name}[{key}]" if isinstance(value, list) else f"{name}.{key}" if name else str(key)
                pending.append((named, value[key], level + 1))
