"""Configurations of other trainers as names and values: YAML, TOML, a shell script, or a typed command line."""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from spmdrl.config.given import Given, given_of, joined
from spmdrl.config.sources import read_file, read_value

_REFERENCE = re.compile(r"^\$\{([\w.]+)\}$")
_ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+)?(\w+)=(\S.*)?$")
_ARRAY = re.compile(r"^(?:declare\s+-a\s+|local\s+)?\w+\+?=\(")
_OPENING = re.compile(r"(?:^|;|\bdo|\bthen|\belse)\s*(?:if|case|for|while|until)\b")
_CLOSING = re.compile(r"(?:^|;)\s*(?:fi|esac|done)\b")
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?::?[-=]([^{}]*))?\}")
END = "\n"
_PAIR = re.compile(r"^\+{0,2}([A-Za-z_][\w.-]*)=(.*)$", re.DOTALL)


def read_elsewhere(path: Path, problems: list[str]) -> list[tuple[str, Given]]:
    """Return the settings of a file, by its ending: .toml, .sh, or YAML; faults go to `problems`."""
    if path.suffix == ".toml":
        return list(_flat(given_of(_toml(path, problems), str(path))))
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch"):
        try:
            return read_words(words_of_script(path.read_text(encoding="utf-8")), str(path))
        except (OSError, UnicodeDecodeError, ValueError) as error:
            problems.append(f"{path}: the script can't be read: {error}")
            return []
    given = read_file(path, problems)
    return [] if given is None else list(_flat(_resolved(given, given, "")))


def _toml(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        # Python 3.10 has none.
        toml: Any = import_module("tomllib")
        found: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
        return found
    except ImportError:
        problems.append(f"{path}: TOML needs Python 3.11; write it as YAML")
        return {}
    # TOMLDecodeError and UnicodeDecodeError are ValueErrors.
    except (OSError, ValueError) as error:
        problems.append(f"{path}: the file can't be read: {error}")
        return {}


def read_words(words: Sequence[str], origin: str) -> list[tuple[str, Given]]:
    """Return the settings of a command line: --name VALUE ..., --name=VALUE, --name, --no_name and key=VALUE."""
    found: dict[str, Given] = {}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        pair = _PAIR.match(word.removeprefix("--"))
        if pair is not None and not pair[1].isupper():
            name, values = pair[1], [pair[2]]
        elif word.startswith("--") and len(word) > 2:
            name, values = word[2:], []
            while rest and not rest[0].startswith("--") and rest[0] != END and _PAIR.match(rest[0]) is None:
                values.append(rest.popleft())
        else:
            continue
        is_negated = not values and name.startswith(("no_", "no-"))
        name = name[3:] if is_negated else name
        texts = values or ["false" if is_negated else "true"]
        given = [read_value(text.strip(","), origin) for text in texts]
        found[name.replace("-", "_")] = given[0] if len(given) == 1 else Given(given, " ".join(texts), origin)
    return [leaf for name, given in found.items() for leaf in _flat(given, name)]


def words_of_script(text: str) -> list[str]:
    """Return the words of a shell script that set something, with the variables to which it gives plain values.

    Of branches and loops, only variables count that have no value yet, so that the first branch wins.
    """
    variables: dict[str, str] = {}
    words: list[str] = []
    level = 0
    for line in map(str.strip, text.replace("\\\n", " ").splitlines()):
        num_opened = len(_OPENING.findall(line))
        level += num_opened
        assignment = _ASSIGNMENT.match(line)
        value = assignment[2] or "" if assignment else ""
        parts = _words(_filled(value, variables))
        # A command may follow the assignments that are for it alone.
        is_command = any(not _ASSIGNMENT.match(part) for part in parts[1:]) and not value.startswith(("$(", "`", "("))
        if assignment is not None and not is_command and not value.startswith("("):
            if not (level and variables.get(assignment[1])):
                variables[assignment[1]] = parts[0] if parts else ""
        elif not level:
            words += [*(parts[1:] if is_command else _words(_filled(_ARRAY.sub("", line), variables))), END]
        level = max(0, level - len(_CLOSING.findall(line)))
    return words


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        # A quotation over several lines, such as the JSON of an environment.
        return []
    closed = (word.rstrip(")") if "(" not in word else word for word in words)
    return [word for word in closed if word]


def _filled(line: str, variables: Mapping[str, str]) -> str:
    """Replace variables by their values or defaults, several times, as one may hold another."""
    for _ in range(3):
        line = _VARIABLE.sub(lambda found: _value_of(found, variables), line)
    return line


def _value_of(found: re.Match[str], variables: Mapping[str, str]) -> str:
    name = found[1] or found[2]
    if found[3] is not None:
        return variables.get(name) or found[3]
    return variables.get(name, found[0])


def _resolved(given: Given, root: Given, section: str) -> Given:
    """Replace `${a.b}` and `${.b}`, as OmegaConf has them, by the values that they refer to."""
    if isinstance(given.value, dict):
        entries = {name: _resolved(entry, root, joined(section, name)) for name, entry in given.value.items()}
        return Given(entries, given.text, given.origin)
    reference = _REFERENCE.match(given.text) if isinstance(given.value, str) else None
    if reference is None:
        return given
    name = joined(section.rpartition(".")[0], reference[1][1:]) if reference[1].startswith(".") else reference[1]
    target: Any = root
    for part in name.split("."):
        target = target.value.get(part) if target is not None and isinstance(target.value, dict) else None
    return given if target is None or target is given else _resolved(target, root, name)


def _flat(given: Given, name: str = "") -> Iterator[tuple[str, Given]]:
    """Yield dotted names and values; a list of one mapping counts as that, and a section that is off as one value."""
    value = given.value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0].value, dict):
        value = value[0].value
    if not isinstance(value, dict):
        yield name, given
        return
    switch = value.get("enabled", value.get("enable"))
    if name and switch is not None and switch.value is False:
        yield joined(name, "enabled"), switch
        return
    for key, entry in value.items():
        yield from _flat(entry, joined(name, key.replace("-", "_")))
