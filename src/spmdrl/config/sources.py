"""Sources of a configuration, YAML files and the command line, read as values with their origins."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from spmdrl.config.given import FLOAT, FLOAT_TAG, NUMBER_STARTS, Given, joined, leaves, shortened, show
from spmdrl.config.key_names import KnownNames
from spmdrl.observability.terminal.spelling import nearest

COMMAND_LINE = "command line"

_INT_TAG, _BOOL_TAG, _NULL_TAG, _MERGE_TAG = (f"tag:yaml.org,2002:{name}" for name in ("int", "bool", "null", "merge"))
_TEXT_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "timestamp", "value", "merge")}
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)$")
_KEY = re.compile(r"[A-Za-z_][\w.-]*")

# A run's file has a few hundred short lines. Beyond these limits it is something else, or an attempt to exhaust the
# reader: a few lines of anchors can stand for billions of values. Whole numbers of up to this many digits fit a float.
_MOST_BYTES = 256 << 10
_MOST_VALUES = 50_000
_MOST_DIGITS = 300
_MOST_LEVELS = 50


class _LimitError(yaml.MarkedYAMLError):
    """Valid text beyond a configuration's limits."""


class _YamlLoader(yaml.SafeLoader):
    """YAML loader with YAML 1.2's numbers: `1e-6` is a float, and `010`, `1:30` or `.nan` are text."""

    yaml_implicit_resolvers = {
        start: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT_TAG, FLOAT_TAG)]
        for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node and its children, within the allowed depth."""
        self._level += 1
        if self._level > _MOST_LEVELS:
            mark = self.peek_event().start_mark
            raise _LimitError(problem=f"more than {_MOST_LEVELS} levels inside each other", problem_mark=mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._level -= 1


_YamlLoader.add_implicit_resolver(_INT_TAG, _INT, NUMBER_STARTS)
_YamlLoader.add_implicit_resolver(FLOAT_TAG, FLOAT, NUMBER_STARTS)


def read_file(path: Path, problems: list[str]) -> Given | None:
    """Read a YAML file's mapping, or return None; faults go to `problems`."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode("utf-8", errors="strict" if len(content) <= _MOST_BYTES else "replace")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        problems.append(f"{path}: the file can't be read: {reason}; {_file_meant(path)}")
        return None
    given = _Composer(str(path), problems).read(text.replace("\r\n", "\n").replace("\r", "\n"))
    if given is not None and given.value is None and not given.text:
        return replace(given, value={})
    if given is not None and not isinstance(given.value, dict):
        problems.append(f"{given.origin}: the file holds {show(given)}, but must hold a mapping such as 'seed: 0'")
        return None
    return given


def read_value(text: str, origin: str) -> Given:
    """Return the value of a word: as YAML, or as text if it is no YAML."""
    given = _Composer(None, []).read(text)
    return Given(text, text, origin) if given is None else replace(given, origin=origin)


def _file_meant(path: Path) -> str:
    """Return a way out for a missing file."""
    beside = {str(found.name) for found in path.parent.glob("*.yaml")} if path.parent.is_dir() else set()
    near = nearest(path.name, beside - {path.name})
    return f"did you mean {path.parent / near}?" if near else f"the working directory is {Path.cwd()}"


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split a command line into files to read and overrides, which have a `key=` or begin with `--`."""
    files, overrides = [], []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument.startswith("-") and len(argument) > 1:
            overrides.append(argument)
            if _awaits_value(argument) and rest and _is_value(rest[0]):
                overrides.append(rest.popleft())
        elif _is_pair(argument):
            overrides.append(argument)
        else:
            files.append(Path(argument))
    return files, overrides


def override_leaves(
    overrides: Sequence[str], names: KnownNames, problems: list[str]
) -> Iterator[tuple[tuple[str, ...], Given]]:
    """Yield the names and values of the overrides, each key once; faults go to `problems`."""
    rest = deque(overrides)
    latest: dict[tuple[str, ...], Given] = {}
    while rest:
        override = rest.popleft()
        key, equals, text = override.removeprefix("--").partition("=")
        if override.startswith("--"):
            key = key.replace("-", "_")
        if _awaits_value(override):
            flag = names.flag_value(key)
            if not (rest and _is_value(rest[0])) and flag is not None:
                (key, text), equals = flag, "="
            elif not (rest and _is_value(rest[0])):
                advice = names.known_advice(key)
                missing = f"--{key} has no value; write --{key} VALUE or {key}=VALUE"
                fault = f"there is no --{key}; {advice}" if advice else missing
                problems.append(f"{COMMAND_LINE}: {shortened(fault)}")
                continue
            else:
                equals, text = "=", rest.popleft()
        if not equals or not _KEY.fullmatch(key):
            way_out = "write key.path=value or --key.path value"
            problems.append(f"{COMMAND_LINE}: {shortened(repr(override))} is no override; {way_out}")
            continue
        faults: list[str] = []
        given = _Composer(None, faults).read(text)
        quoting = f"quote text for YAML too: {key}=\"'...'\""
        problems += [f"{fault} (in {key}={shortened(text)}; {quoting})" for fault in faults]
        if given is not None and not faults:
            for parts, leaf in leaves(given, tuple(key.split("."))):
                latest.pop(parts, None)
                latest[parts] = leaf
    yield from latest.items()


def _awaits_value(argument: str) -> bool:
    return argument.startswith("--") and "=" not in argument


def _is_pair(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    return bool(equals) and _KEY.fullmatch(key) is not None


def _is_value(argument: str) -> bool:
    """Return True if this can be the previous flag's value, rather than the next flag, pair or file."""
    return not (argument.startswith("--") or _is_pair(argument) or argument.endswith((".yaml", ".yml")))


class _Composer:
    """Parser of one source, a file or the command line, into a tree of Given."""

    def __init__(self, file: str | None, problems: list[str]) -> None:
        self._file = file
        self._problems = problems
        self._open: list[yaml.Node] = []
        self._num_values = 0

    def read(self, text: str) -> Given | None:
        """Return the value of the text, null if empty; None if it isn't valid."""
        try:
            if len(text) > _MOST_BYTES:
                raise _LimitError(problem=f"more than {_MOST_BYTES >> 10} KiB")
            node = _YamlLoader(text).get_single_node()
            return Given(None, "", self._origin(None)) if node is None else self._given(node, "")
        except _LimitError as error:
            self._problems.append(f"{self._origin(error.problem_mark)}: {error.problem}, which no configuration needs")
        except yaml.MarkedYAMLError as error:
            context = f" ({error.context} at {self._origin(error.context_mark)})" if error.context_mark else ""
            self._problems.append(f"{self._origin(error.problem_mark)}: not valid YAML: {error.problem}{context}")
        except yaml.YAMLError as error:
            self._problems.append(f"{self._origin(None)}: not valid YAML: {' '.join(str(error).split())}")
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
            _check_characters(node)
            return Given(_scalar(node), node.value, origin, quoted=node.style in ("'", '"'))
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return Given(self._entries(node, key), "", origin)
            items = enumerate(node.value)
            return Given([self._given(item, f"{key}[{index}]") for index, item in items], "", origin)
        finally:
            self._open.pop()

    def _entries(self, node: yaml.MappingNode, key: str) -> dict[str, Given]:
        merged: dict[str, Given] = {}
        own: dict[str, Given] = {}
        first: dict[str, str] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=name.start_mark)
            _check_characters(name)
            if name.tag == _MERGE_TAG:
                # Of several mappings under `<<`, the first with a name wins.
                merged = _mapping_to_merge(self._given(value, key), value) | merged
                continue
            path, where = joined(key, name.value), self._origin(name.start_mark)
            if name.value in own:
                before = first[name.value]
                self._problems.append(f"{where}: {path} is given a second time (first at {before}); keep one")
            first.setdefault(name.value, where)
            own[name.value] = replace(self._given(value, path), origin=where)
        return merged | own


def _mapping_to_merge(given: Given, node: yaml.Node) -> dict[str, Given]:
    merged: dict[str, Given] = {}
    for source in given.value if isinstance(given.value, list) else [given]:
        if not isinstance(source.value, dict):
            problem = "<< takes a mapping or a list of mappings, such as *name"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        merged = source.value | merged
    return merged


def _scalar(node: yaml.ScalarNode) -> None | bool | int | float | str:
    text: str = node.value
    if node.tag in _TEXT_TAGS:
        return text
    if node.tag == _NULL_TAG:
        return None
    if node.tag == _BOOL_TAG and text.lower() in _YamlLoader.bool_values:
        return _YamlLoader.bool_values[text.lower()]
    if node.tag == _INT_TAG and _INT.match(text):
        if len(text) > _MOST_DIGITS:
            problem = f"a whole number of more than {_MOST_DIGITS} digits"
            raise _LimitError(problem=problem, problem_mark=node.start_mark)
        return int(text)
    if node.tag == FLOAT_TAG and (FLOAT.match(text) or _INT.match(text)):
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
