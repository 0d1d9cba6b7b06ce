"""The paths that `data.train` and `data.eval` name, each with its share of the prompts and its format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from spmdrl.dataflow.data.published import FormatName


@dataclass(frozen=True)
class DataSource:
    """One data path; `weight` is its share of the prompts relative to the other sources', None = by its size.

    `format` is that of its rows, where it isn't `data.format`.
    """

    path: str
    weight: float | None = None
    format: str | None = None


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
