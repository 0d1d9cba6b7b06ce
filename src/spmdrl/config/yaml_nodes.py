"""YAML text to values that remember where they were written."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from spmdrl.config.given import (
    BOOL_TAG,
    FLOAT,
    FLOAT_TAG,
    INT,
    INT_TAG,
    MERGE_TAG,
    NULL_TAG,
    Given,
    LimitError,
    YamlLoader,
    joined,
    shortened,
    show,
)
from spmdrl.observability.terminal.spelling import nearest

COMMAND_LINE = "command line"

_TEXT_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "timestamp", "value", "merge")}

# A file of a run has a few hundred short lines. Beyond these limits it is something else, or an attempt to exhaust the
# reader: a few lines of anchors can stand for billions of values. Whole numbers of so many digits fit a float.
_MOST_BYTES = 256 << 10
_MOST_VALUES = 50_000
_MOST_DIGITS = 300


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
            loader = YamlLoader(text)
            node = loader.get_single_node()
            return None if node is None else self._given(node, "")
        except LimitError as error:
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
            raise LimitError(problem=problem, problem_mark=node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            _check_characters(node)
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
            given = self._given(value, key if name.tag == MERGE_TAG else joined(key, name.value))
            if name.tag == MERGE_TAG:
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
            _check_characters(name)
            if name.value in first and name.tag != MERGE_TAG:
                path = joined(key, name.value)
                self._problems.append(
                    f"{where}: {path} is given a second time (first at {first[name.value]}); keep one"
                )
            first.setdefault(name.value, where)

    def _scalar(self, node: yaml.ScalarNode) -> None | bool | int | float | str:
        text: str = node.value
        if node.tag in _TEXT_TAGS:
            return text
        if node.tag == NULL_TAG:
            return None
        if node.tag == BOOL_TAG and text.lower() in YamlLoader.bool_values:
            return YamlLoader.bool_values[text.lower()]
        if node.tag == INT_TAG and INT.match(text):
            if len(text) > _MOST_DIGITS:
                problem = f"a whole number of more than {_MOST_DIGITS} digits"
                raise LimitError(problem=problem, problem_mark=node.start_mark)
            return int(text)
        if node.tag == FLOAT_TAG and (FLOAT.match(text) or INT.match(text)):
            return float(re.sub(r"\.(?=[a-zA-Z])(?![eE])", "", text))
        raise yaml.MarkedYAMLError(
            problem=f"{node.tag} {shortened(repr(text))} is no tag for a plain value", problem_mark=node.start_mark
        )


def _check_characters(node: yaml.ScalarNode) -> None:
    try:
        node.value.encode()
    except UnicodeEncodeError:
        problem = "\\ud800 to \\udfff are halves of characters, which no text may hold"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
