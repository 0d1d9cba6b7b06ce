"""YAML text to values that remember where they were written, and values back to YAML text.

Numbers are those of YAML 1.2: `1e-6` is a float, `1_000` an int, and `010` or `1:30` are no numbers but text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from spmdrl.observability.terminal.spelling import nearest

COMMAND_LINE = "command line"

_INT_TAG, _FLOAT_TAG, _BOOL_TAG, _NULL_TAG, _MERGE_TAG = (
    f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null", "merge")
)
_TEXT_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "timestamp", "value", "merge")}
_WHOLE = r"(?:0|[1-9][0-9]*(?:_[0-9]+)*)"
_INT = re.compile(rf"^[-+]?{_WHOLE}$")
_FLOAT = re.compile(
    rf"^(?:[-+]?(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_NUMBER_STARTS = list("-+.0123456789")

# A file of a run has a few hundred short lines. Beyond these limits it is something else, or an attempt to exhaust the
# reader: a few lines of anchors can stand for billions of values.
_MOST_BYTES = 256 << 10
_MOST_LEVELS = 50
_MOST_VALUES = 50_000
_MOST_DIGITS = 4000
_MOST_SHOWN = 200

Value: TypeAlias = "None | bool | int | float | str | list[Given] | dict[str, Given]"


@dataclass(frozen=True)
class Given:
    """A value that somebody wrote: what YAML makes of it, its own text, and where it stands."""

    value: Value
    text: str
    origin: str
    quoted: bool = False

    @property
    def plain(self) -> Any:
        """The value without its origins."""
        if isinstance(self.value, dict):
            return {name: given.plain for name, given in self.value.items()}
        if isinstance(self.value, list):
            return [given.plain for given in self.value]
        return self.value


class _LimitError(yaml.MarkedYAMLError):
    """The text is valid, but larger than a configuration is."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {
        start: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT_TAG, _FLOAT_TAG)]
        for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node and those below it, within the levels that are allowed."""
        self._level += 1
        if self._level > _MOST_LEVELS:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _LimitError(problem=f"more than {_MOST_LEVELS} levels inside each other", problem_mark=mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._level -= 1


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader above would take for a number, and keeps every string on one line."""


_Loader.add_implicit_resolver(_INT_TAG, _INT, _NUMBER_STARTS)
_Loader.add_implicit_resolver(_FLOAT_TAG, _FLOAT, _NUMBER_STARTS)
_Dumper.add_implicit_resolver(_FLOAT_TAG, _FLOAT, _NUMBER_STARTS)
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


def _file_meant(path: Path) -> str:
    """A way out for a file that isn't there."""
    beside = {str(found.name) for found in path.parent.glob("*.yaml")} if path.parent.is_dir() else set()
    near = nearest(path.name, beside - {path.name})
    return f"did you mean {path.parent / near}?" if near else f"the working directory is {Path.cwd()}"


def read_file(path: Path, problems: list[str]) -> Given | None:
    """The mapping that a YAML file holds, or None where it can't be read as one; what is wrong goes to `problems`."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode("utf-8", errors="strict" if len(content) <= _MOST_BYTES else "replace")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        problems.append(f"{path}: the file can't be read: {reason}; {_file_meant(path)}")
        return None
    num_problems = len(problems)
    given = _Composer(str(path), problems).read(text.replace("\r\n", "\n").replace("\r", "\n"))
    if given is None:
        return Given({}, "", str(path)) if len(problems) == num_problems else None
    if given.value is None and not given.text:
        return Given({}, "", str(path))
    if not isinstance(given.value, dict):
        problems.append(f"{given.origin}: the file holds {show(given)}, but must hold a mapping such as 'seed: 0'")
        return None
    return given


def read_override(key: str, text: str, problems: list[str]) -> Given | None:
    """The value of `key` on the command line, read as YAML; None where it is no YAML, which goes to `problems`."""
    faults: list[str] = []
    given = _Composer(None, faults).read(text)
    problems.extend(
        f"{fault} (in {key}={shortened(text)}; quote text for YAML too: {key}=\"'...'\")" for fault in faults
    )
    if faults:
        return None
    return given or Given(None, "", COMMAND_LINE)


class _Composer:
    """Turns the text of one source into a tree of Given."""

    def __init__(self, file: str | None, problems: list[str]) -> None:
        self._file = file
        self._problems = problems
        self._open: list[yaml.Node] = []
        self._num_values = 0

    def read(self, text: str) -> Given | None:
        if len(text) > _MOST_BYTES:
            where = self._file or COMMAND_LINE
            self._problems.append(f"{where}: more than {_MOST_BYTES >> 10} KiB, which no configuration needs")
            return None
        try:
            loader = _Loader(text)
            node = loader.get_single_node()
            return None if node is None else self._given(node, "")
        except _LimitError as error:
            self._problems.append(f"{self._origin(error.problem_mark)}: {error.problem}, which no configuration needs")
        except yaml.MarkedYAMLError as error:
            context = f" ({error.context} at {self._origin(error.context_mark)})" if error.context_mark else ""
            self._problems.append(f"{self._origin(error.problem_mark)}: not valid YAML: {error.problem}{context}")
        except yaml.YAMLError as error:
            self._problems.append(f"{self._file or COMMAND_LINE}: not valid YAML: {' '.join(str(error).split())}")
        return None

    def _origin(self, mark: yaml.Mark | None) -> str:
        if self._file is None:
            return COMMAND_LINE
        return self._file if mark is None else f"{self._file}:{mark.line + 1}"

    def _given(self, node: yaml.Node, key: str) -> Given:
        origin = self._origin(node.start_mark)
        if any(node is opened for opened in self._open):
            raise yaml.MarkedYAMLError(problem="an anchor holds itself", problem_mark=node.start_mark)
        self._num_values += 1
        if self._num_values > _MOST_VALUES:
            problem = f"more than {_MOST_VALUES:,} values once aliases (*name) are expanded"
            raise _LimitError(problem=problem, problem_mark=node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return Given(self._scalar(node), node.value, origin, quoted=node.style in ("'", '"'))
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return Given(self._entries(node, key), "", origin)
            items = enumerate(node.value)
            return Given([self._given(item, f"{key}[{index}]") for index, item in items], "", origin)
        finally:
            self._open.pop()

    def _entries(self, node: yaml.MappingNode, key: str) -> dict[str, Given]:
        self._check_names(node, key)
        merged: dict[str, Given] = {}
        own: dict[str, Given] = {}
        for name, value in node.value:
            given = self._given(value, key if name.tag == _MERGE_TAG else _join(key, name.value))
            if name.tag == _MERGE_TAG:
                # Of several mappings under `<<`, the first that has a name wins.
                merged = self._mapping_to_merge(given, value) | merged
            else:
                own[name.value] = Given(given.value, given.text, self._origin(name.start_mark), given.quoted)
        return merged | own

    @staticmethod
    def _mapping_to_merge(given: Given, node: yaml.Node) -> dict[str, Given]:
        merged: dict[str, Given] = {}
        for source in given.value if isinstance(given.value, list) else [given]:
            if not isinstance(source.value, dict):
                problem = "<< takes a mapping or a list of mappings, such as *name"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            merged = source.value | merged
        return merged

    def _check_names(self, node: yaml.MappingNode, key: str) -> None:
        first: dict[str, str] = {}
        for name, _ in node.value:
            where = self._origin(name.start_mark)
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=name.start_mark)
            if name.value in first and name.tag != _MERGE_TAG:
                path = _join(key, name.value)
                self._problems.append(
                    f"{where}: {path} is given a second time (first at {first[name.value]}); keep one"
                )
            first.setdefault(name.value, where)

    def _scalar(self, node: yaml.ScalarNode) -> None | bool | int | float | str:
        text: str = node.value
        if node.tag in _TEXT_TAGS:
            return text
        if node.tag == _NULL_TAG:
            return None
        if node.tag == _BOOL_TAG and text.lower() in _Loader.bool_values:
            return _Loader.bool_values[text.lower()]
        if node.tag == _INT_TAG and _INT.match(text):
            if len(text) > _MOST_DIGITS:
                problem = f"a whole number of more than {_MOST_DIGITS} digits"
                raise _LimitError(problem=problem, problem_mark=node.start_mark)
            return int(text)
        if node.tag == _FLOAT_TAG and (_FLOAT.match(text) or _INT.match(text)):
            return float(re.sub(r"\.(?=[a-zA-Z])(?![eE])", "", text))
        raise yaml.MarkedYAMLError(
            problem=f"{node.tag} {shortened(repr(text))} is no tag for a plain value", problem_mark=node.start_mark
        )


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def leaves(given: Given, parts: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Given]]:
    """Every value below the mappings, with the names that lead to it; an empty mapping counts as a value."""
    if not isinstance(given.value, dict) or (parts and not given.value):
        yield parts, given
        return
    for name, entry in given.value.items():
        yield from leaves(entry, (*parts, name))


def plant(tree: dict[str, Given], parts: tuple[str, ...], given: Given) -> None:
    """Set one value in a tree of mappings; mappings on the way are made, other values in the way give way."""
    *sections, name = parts
    for section in sections:
        entry = tree.get(section)
        if entry is None or not isinstance(entry.value, dict):
            entry = tree[section] = Given({}, "", given.origin)
        assert isinstance(entry.value, dict)
        tree = entry.value
    there = tree.get(name)
    if not (there is not None and isinstance(there.value, dict) and given.value == {}):
        tree[name] = given


def find(tree: dict[str, Given], parts: tuple[str, ...]) -> Given | None:
    """What stands at the end of these names, or None."""
    given = None
    for name in parts:
        given = tree.get(name)
        if given is None:
            return None
        tree = given.value if isinstance(given.value, dict) else {}
    return given


def unplant(tree: dict[str, Given], parts: tuple[str, ...]) -> None:
    """Remove what stands at the end of these names."""
    *sections, name = parts
    section = find(tree, tuple(sections)) if sections else None
    entries = section.value if section is not None else tree
    if isinstance(entries, dict):
        entries.pop(name, None)


def given_of(value: Any, origin: str) -> Given:
    """A value that code made, as if it had been written at `origin`."""
    if isinstance(value, list):
        return Given([given_of(item, origin) for item in value], "", origin)
    return Given(value, value if isinstance(value, str) else inline(value), origin)


def show(given: Given) -> str:
    """A value as a message names it."""
    if isinstance(given.value, dict):
        return shortened("a mapping (" + ", ".join(given.value) + ")") if given.value else "an empty mapping"
    if isinstance(given.value, list):
        return f"a list of {len(given.value)}" if given.value else "an empty list"
    if isinstance(given.value, str):
        return shortened(repr(given.text))
    return shortened(given.text) or "empty"


def shortened(text: str) -> str:
    """The text, or its beginning where it is too long for a message."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def inline(value: object) -> str:
    """YAML of a value on one line: scalars as they are, lists and mappings in brackets."""
    text: str = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.strip()[1:-1]
