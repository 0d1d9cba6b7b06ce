"""Data rows: found, checked and named by file and line before any model is loaded."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spmdrl.dataflow.samples.records import BadRow, BadRows, Record, read_records

logger = logging.getLogger(__name__)

PROMPT_KEYS = ("prompt", "question", "problem", "input")
ANSWER_KEYS = ("answer", "ground_truth", "solution", "label", "reward_model.ground_truth", "reward_spec.ground_truth")

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class DataConfig:
    """Where prompts come from and how they are read."""

    train: Any = None
    """Training data: a path or synthetic:// URL, a list of them, or of {path, weight} with the share of the prompts."""
    eval: Any = None
    """Held-out data, named in the same way."""
    max_prompt_length: int = 512
    """Longest prompt in tokens; a longer one is a bad row."""
    on_bad_row: Literal["error", "skip"] = "error"
    """error = stop before the start and name all bad rows; skip = leave them out and say how many."""
    shuffle: bool = True
    """Whether each epoch has its own random order; otherwise rows come in the order of the files."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """auto = the tokenizer's template for lists of messages, strings as they are; always = for strings too; never."""
    prompt_key: str | None = None
    """The column that holds the prompt; null = the first of prompt, question, problem, input."""
    answer_key: str | None = None
    """The column that holds the answer, dots for nested ones; null = the first known name."""

    def __post_init__(self) -> None:
        for key in ("train", "eval"):
            data_sources(getattr(self, key), f"data.{key}")
        if self.max_prompt_length < 1:
            raise ValueError(f"data.max_prompt_length is {self.max_prompt_length}, but must be >= 1 token")
        if self.on_bad_row not in ("error", "skip"):
            raise ValueError(f"data.on_bad_row is '{self.on_bad_row}', but must be error or skip")
        if self.chat_template not in ("auto", "always", "never"):
            raise ValueError(f"data.chat_template is '{self.chat_template}', but must be auto, always or never")


@dataclass(frozen=True)
class DataSource:
    """One data path; `weight` is its share of the prompts relative to the other sources', None = by its size."""

    path: str
    weight: float | None = None


def data_sources(value: Any, key: str = "data.train") -> tuple[DataSource, ...]:
    """The sources that `data.train` or `data.eval` names; raises ValueError under that key for what isn't one."""
    if value is None:
        return ()
    items = value if isinstance(value, (list, tuple)) else [value]
    sources = tuple(_data_source(item, key) for item in items)
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        bare = [source.path for source in sources if source.weight is None]
        raise ValueError(f"{key} gives weights to some paths, but not to {bare}; give every path a weight, or none")
    twice = [path for path, count in Counter(source.path for source in sources).items() if count > 1]
    if twice:
        raise ValueError(f"{key} names {twice} twice; name it once, with a weight where it should come more often")
    return sources


def _data_source(item: Any, key: str) -> DataSource:
    if isinstance(item, DataSource):
        return item
    if isinstance(item, str):
        return DataSource(item)
    if not isinstance(item, Mapping) or not {"path"} <= set(item) <= {"path", "weight"}:
        raise ValueError(f"{key} holds {item!r}, but must be a path, a list of paths, or of {{path: ..., weight: ...}}")
    weight = item.get("weight")
    if weight is None:
        return DataSource(str(item["path"]))
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise ValueError(f"{key}: the weight of {item['path']} is {weight!r}, but must be a number > 0")
    return DataSource(str(item["path"]), float(weight))


@dataclass(frozen=True)
class Row:
    """One checked data row.

    `columns` holds everything of the row but its prompt and id, under the row's own names, and `answer` besides.
    """

    id: str
    place: str
    prompt: str | Messages
    answer: str | None
    columns: dict[str, Any]


@dataclass(frozen=True)
class SourceRows:
    """The usable rows of one source, the bad ones that were skipped, and the columns in which things were found."""

    source: DataSource
    rows: tuple[Row, ...]
    skipped: tuple[BadRow, ...]
    found: dict[str, int]

    @property
    def summary(self) -> str:
        """One line for the screen, as in `a.jsonl: 7473 rows, prompt in 'question', answer in 'answer'`."""
        found = ", ".join(f"{name} ({count})" if count < len(self.rows) else name for name, count in self.found.items())
        skipped = f", {len(self.skipped)} bad rows skipped" if self.skipped else ""
        return f"{self.source.path}: {len(self.rows)} rows, {found}{skipped}"


def read_rows(paths: Any, config: DataConfig, *, needs_answer: bool, key: str = "data.train") -> list[SourceRows]:
    """Read and check all rows of some paths, one entry a source.

    Raises BadRows with every bad row of every source, or, with `data.on_bad_row: skip`, leaves them out.
    """
    sources = data_sources(paths, key)
    if not sources:
        raise ValueError(f"{key} is not set; name a .jsonl or .parquet file, or a synthetic:// URL")
    checked = [_read_source(source, config, needs_answer) for source in sources]
    bad = [row for part in checked for row in part.skipped]
    num_rows = len(bad) + sum(len(part.rows) for part in checked)
    if bad and config.on_bad_row == "error":
        raise BadRows(bad, num_rows)
    for part in checked:
        if part.skipped:
            logger.warning("%s; the first is %s", part.summary, part.skipped[0])
        if not part.rows:
            raise ValueError(f"{key}: {part.source.path} holds no usable row; {len(part.skipped)} were skipped as bad")
    return checked


def _read_source(source: DataSource, config: DataConfig, needs_answer: bool) -> SourceRows:
    rows: list[Row] = []
    bad: list[BadRow] = []
    found: Counter[str] = Counter()
    places: dict[str, str] = {}
    for record in read_records(source.path):
        if isinstance(record, BadRow):
            bad.append(record)
            continue
        check = _RowCheck(record, config, needs_answer)
        if (problem := check.problem(places)) is not None:
            bad.append(problem)
            continue
        row = check.row()
        places[row.id] = row.place
        rows.append(row)
        found.update(check.found())
    return SourceRows(source, tuple(rows), tuple(bad), dict(found))


class _RowCheck:
    """One record against what a row needs."""

    def __init__(self, record: Record, config: DataConfig, needs_answer: bool):
        self._record = record
        self._needs_answer = needs_answer
        self._prompt_keys = (config.prompt_key,) if config.prompt_key else PROMPT_KEYS
        self._answer_keys = (config.answer_key,) if config.answer_key else ANSWER_KEYS
        self._prompt_key, self._prompt = _look_up(record.values, self._prompt_keys)
        self._answer_key, self._answer = _look_up(record.values, self._answer_keys)
        given = record.values.get("id")
        self._id = record.place if given is None else str(given)

    def problem(self, places: Mapping[str, str]) -> BadRow | None:
        """The first thing wrong with the row; `places` says where each id stands already."""
        for kind, problem in self._problems(places):
            return BadRow(self._record.place, kind, problem)
        return None

    def row(self) -> Row:
        columns = {name: value for name, value in self._record.values.items() if name not in ("id", self._prompt_key)}
        columns["answer"] = self._answer
        answer = None if self._answer is None else str(self._answer)
        return Row(self._id, self._record.place, self._prompt, answer, columns)

    def found(self) -> list[str]:
        names = [f"prompt in '{self._prompt_key}'"]
        return names + ([f"answer in '{self._answer_key}'"] if self._answer_key else [])

    def _problems(self, places: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        yield from _flaws(self._record.values)
        if self._prompt_key is None:
            columns = ", ".join(self._record.values) or "none"
            yield (
                "no_prompt",
                f"no prompt in {' or '.join(self._prompt_keys)}; its columns are {columns}: set data.prompt_key",
            )
        yield from _prompt_problems(self._prompt_key, self._prompt)
        if self._needs_answer and self._answer is None:
            yield (
                "no_answer",
                (
                    f"no answer in {', '.join(self._answer_keys)}, but the reward functions exact and math need one: "
                    "add it, set data.answer_key, or name another reward function"
                ),
            )
        if self._needs_answer and (isinstance(self._answer, bool) or not isinstance(self._answer, (str, int, float))):
            yield (
                "answer_type",
                f"'{self._answer_key}' is a {type(self._answer).__name__}, but must be text or a number",
            )
        if self._needs_answer and not str(self._answer).strip():
            yield "empty_answer", f"'{self._answer_key}' is empty"
        given = self._record.values.get("id")
        if isinstance(given, bool) or not isinstance(given, (str, int, type(None))):
            yield "id_type", f"'id' is a {type(given).__name__}, but must be text or a whole number"
        if self._id in places:
            yield (
                "duplicate_id",
                f"id '{self._id}' stands at {places[self._id]} already; leave ids out to number the rows",
            )


def _look_up(values: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str | None, Any]:
    """The first of the dotted keys that holds something, and what it holds."""
    for key in keys:
        value: Any = values
        if key in values:
            value = values[key]
        else:
            for name in key.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            return key, value
    return None, None


def _prompt_problems(key: str | None, prompt: Any) -> Iterator[tuple[str, str]]:
    if isinstance(prompt, str):
        if not prompt.strip():
            yield "empty_prompt", f"'{key}' is empty"
    elif not isinstance(prompt, list):
        yield "prompt_type", f"'{key}' is a {type(prompt).__name__}, but must be text or a list of messages"
    elif not prompt:
        yield "empty_prompt", f"'{key}' is an empty list of messages"
    else:
        for number, message in enumerate(prompt):
            fields = message if isinstance(message, Mapping) else {}
            if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
                yield "bad_message", f"'{key}[{number}]' must be an object with the texts 'role' and 'content'"


def _flaws(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Numbers that aren't finite and text that can't be encoded, anywhere in the row."""
    if isinstance(value, float) and not math.isfinite(value):
        yield "not_finite", f"'{name}' is {value}, but must be finite; leave it out or write null"
    elif isinstance(value, str) and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        yield "broken_text", f"'{name}' holds half of a UTF-16 surrogate pair, which no tokenizer can read"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flaws(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _flaws(inner, f"{name}[{number}]")
