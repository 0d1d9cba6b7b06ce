"""Settings of the data: sources of prompts, and their rendering as text."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge

FormatName = Literal["auto", "gsm8k", "math500", "aime", "gpqa"]


@dataclass(frozen=True)
class DataSource:
    """One data path; `weight` is its share of the prompts relative to the other sources', None = by its size.

    `format` overrides `data.format` for its rows.
    """

    path: str
    weight: float | None = None
    format: str | None = None


def data_sources(value: Any, key: str = "data.train") -> tuple[DataSource, ...]:
    """Return the sources that `data.train` or `data.eval` names. Raises ValueError for anything else."""
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
    if not isinstance(item, Mapping) or not {"path"} <= set(item) <= {"path", "weight", "format"}:
        raise ValueError(
            f"{key} holds {item!r}, but must be a path, a list of paths, or of {{path: ..., weight: ..., format: ...}}"
        )
    weight, form = item.get("weight"), item.get("format")
    if form is not None and form not in get_args(FormatName):
        names = ", ".join(get_args(FormatName))
        raise ValueError(f"{key}: the format of {item['path']} is {form!r}, but must be one of {names}")
    if weight is None:
        return DataSource(str(item["path"]), None, form)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise ValueError(f"{key}: the weight of {item['path']} is {weight!r}, but must be a number > 0")
    return DataSource(str(item["path"]), float(weight), form)


# Set by the renderer itself, for the template or for transformers' function around it.
_RESERVED = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation max_length messages padding "
    "return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs tools truncation".split()
)


class RowNotRendered(ValueError):
    """A row that the chat template, or the renderer, can't take."""


@dataclass(frozen=True)
class TemplateOptions:
    """Use of the chat template, and its inputs beside the messages; the keys are those of `data`."""

    use: Literal["auto", "always", "never"] = "auto"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        check_kwargs(self.kwargs, "data.chat_template_kwargs")
        if self.use == "never" and self.named:
            raise ValueError(
                f"data.chat_template is never, but {self.named[0]} is set, which only a chat template reads; set "
                "data.chat_template to auto or always, or leave it out"
            )

    @property
    def named(self) -> list[str]:
        """Keys that are set and that only the template reads."""
        given = {"chat_template_kwargs": self.kwargs, "chat_template_file": self.file}
        return [f"data.{key}" for key, value in (given | {"system_prompt": self.system_prompt}).items() if value]

    @property
    def described(self) -> str:
        """The options in one line, a file by its text."""
        own = self.own_template()
        file = None if own is None else hashlib.sha256(own.encode()).hexdigest()[:16]
        kwargs = json.dumps(self.kwargs, sort_keys=True)
        return f"{self.use}, kwargs {kwargs}, file {file}, system prompt {self.system_prompt!r}"

    def own_template(self) -> str | None:
        """Return the text of the file that replaces the tokenizer's template; None without one."""
        if self.file is None:
            return None
        try:
            return Path(self.file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"data.chat_template_file {self.file} can't be read: {error}") from None


def thought(text: str) -> dict[str, str]:
    """Return a message's thought, under each of the names that templates have for it."""
    return dict.fromkeys(("reasoning_content", "reasoning", "thinking"), text)


def check_kwargs(kwargs: object, name: str) -> None:
    if not isinstance(kwargs, Mapping):
        raise RowNotRendered(f"'{name}' is a {type(kwargs).__name__}, but must be a mapping")
    if reserved := sorted(_RESERVED & kwargs.keys()):
        raise RowNotRendered(
            f"{name} has {', '.join(reserved)}, which the renderer itself sets; leave it out (tools are a column)"
        )


@dataclass(frozen=True)
class DataConfig:
    """Sources of prompts, and how they are read."""

    train: Any = None
    """training data: a file, a folder, a pattern such as data/*.jsonl, a data set of the hub such as
    hub://openai/gsm8k?config=main, or a synthetic:// or reasoning_gym:// URL; or a list of these, or of {path, weight,
    format}, where weight is the source's share of the prompts, and format stands for data.format"""
    eval: Any = None
    """held-out data, in the same forms"""
    split: str | None = None
    """split of folders and hub:// URLs in data.train, by the data set's README or the files' names; null: train of the
    hub's, and folders hold only one; a URL's own (?split=...) wins"""
    eval_split: str | None = None
    """the same for data.eval; null: test of the hub's"""
    max_rows: Annotated[int, Ge(1)] | None = None
    """number of first rows to use of each source of data.train; null: all"""
    max_prompt_length: Annotated[int, Ge(1)] = 512
    """longest prompt in tokens; a longer one is a bad row"""
    on_bad_row: Literal["error", "skip"] = "error"
    """treatment of bad rows; error: stop before the start and list them all; skip: leave them out and print their
    number"""
    shuffle: bool = True
    """shuffle rows anew in each epoch; false: the order of the files"""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """use of the chat template; auto: for lists of messages, with strings as they are; always: for strings too; never:
    not at all"""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """extra inputs of the chat template, such as enable_thinking: false; a row's column of this name wins"""
    chat_template_file: str | None = None
    """Jinja file that replaces the tokenizer's chat template, in saved models too; null: the tokenizer's"""
    system_prompt: str | None = None
    """system message of conversations in the chat template that have none; a row's column of this name wins"""
    format: FormatName = "auto"
    """format of the rows; auto: prompts as they are, under the names that prompt_key and answer_key list; gsm8k,
    math500, aime, gpqa: the benchmark's columns, and a prompt that asks for an answer that rewards can read"""
    prompt_key: str | None = None
    """column with the prompt, with dots for nested ones; null: the first of prompt, question, problem, messages,
    instruction (with input) and input"""
    answer_key: str | None = None
    """column with the answer, with dots for nested ones; null: the first known name, such as answer"""

    def __post_init__(self) -> None:
        named = next((key for key in ("prompt_key", "answer_key") if getattr(self, key) is not None), None)
        if named is not None and self.format != "auto":
            raise ValueError(
                f"data.{named} is {getattr(self, named)!r}, but data.format {self.format} has columns of its own; "
                "leave one of them out"
            )
        for key in ("train", "eval"):
            data_sources(getattr(self, key), f"data.{key}")
        # Raises ValueError if the template's options conflict.
        assert self.template

    @property
    def template(self) -> TemplateOptions:
        """Options of the chat template."""
        return TemplateOptions(
            self.chat_template, self.chat_template_kwargs, self.chat_template_file, self.system_prompt
        )
