"""Loading of functions and classes from users' modules, and explanations of errors there."""

from __future__ import annotations

import bdb
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

Kind = Literal["function", "class"]


@dataclass(frozen=True)
class Loaded:
    """A worker's functions, ready to answer."""

    answer: Callable[[dict[str, Any]], Any]
    """handler of a message; a coroutine function takes further ones while others wait, in a concurrent worker"""
    facts: Any = None
    """facts about the functions for the pool"""
    keeps_processes: Callable[[], bool] = bool
    """true while processes that calls started live on; not asked of a concurrent worker, which ends them itself"""

    @property
    def is_concurrent(self) -> bool:
        return inspect.iscoroutinefunction(self.answer)


_OTHERS = ("<", str(Path(os.__file__).parent), str(Path(__file__).parents[2]))
"""prefixes of file names that aren't the user's"""


def load_attribute(spec: str, key: str, built_in: Iterable[str], kind: Kind) -> Any:
    """Load the function or class `pkg.mod:name` or `file.py:name`; `built_in` names need no module.

    Raises ValueError, naming the setting `key`, if it can't be loaded.
    """
    where, _, attribute = spec.rpartition(":")
    if not where or not attribute:
        close = difflib.get_close_matches(spec, built_in, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"write pkg.mod:{kind} or file.py:{kind}"
        known = " nor ".join([*built_in, f"module:{kind}"])
        raise ValueError(f"{key}: '{spec}' is {'neither' if built_in else 'not'} {known}; {hint}")
    try:
        module = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    except bdb.BdbQuit:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{key}: '{spec}' can't be loaded: {explain(error)}") from error
    found = getattr(module, attribute, None)
    if not (callable(found) if kind == "function" else isinstance(found, type)):
        offered = sorted(name for name, value in vars(module).items() if _is_offered(value, kind, module))
        close = difflib.get_close_matches(attribute, offered, n=1)
        plural = "functions" if kind == "function" else "classes"
        hint = f"did you mean '{close[0]}'?" if close else f"its {plural} are {', '.join(offered) or '(none)'}"
        raise ValueError(f"{key}: '{spec}': {where} has no {kind} '{attribute}'; {hint}")
    return found


def load_optional(module: str, package: str, key: str, instead: str = ", or name a file.py:Class") -> Any:
    """Import a library that only the setting `key` needs. Raises ValueError, with a way out, if it isn't installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{key} needs {package} ({error}): pip install {package}{instead}") from error


def load_registered(
    build: Callable[[Callable[..., Any]], Any], module: str, package: str, key: str, specs: Sequence[str]
) -> Callable[[], Any]:
    """Load a class, or find a name that a library's `make` knows; the result builds the environment of it."""
    (spec,) = specs
    if ":" in spec:
        return partial(build, load_attribute(spec, key, (), kind="class"))
    return partial(build, partial(load_optional(module, package, key).make, spec))


def _is_offered(value: object, kind: Kind, module: ModuleType) -> bool:
    if kind == "function":
        return isinstance(value, FunctionType)
    return isinstance(value, type) and value.__module__ == module.__name__


def _load_file(where: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    # The file may import its neighbours, as a script could.
    sys.path.insert(0, str(path.parent))
    module_name = f"spmdrl_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def explain(error: BaseException) -> str:
    """Describe an exception in one line: type, message, and place."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    # The user's own line is more useful than a library's below it.
    own = [frame for frame in frames if not frame.filename.startswith(_OTHERS) and "-packages" not in frame.filename]
    place = "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in (own or frames)[-1:])
    is_unset = isinstance(error, KeyError) and bool(frames) and frames[-1].filename in ("<frozen os>", os.__file__)
    hint = "; pass it with reward.variables, or to an environment with environment.variables" if is_unset else ""
    return f"{type(error).__name__}: {error!s:.500}{place}{hint}"
