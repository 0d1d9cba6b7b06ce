"""`spmdrl explain`: an algorithm's equations, keys and defaults, and its differences from other trainers."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import Any

from spmdrl.algorithms.settings.algo_config import AlgoConfig
from spmdrl.algorithms.settings.choices import ALGO_CONFIGS
from spmdrl.config.given import inline
from spmdrl.config.reader import ConfigError
from spmdrl.observability.terminal.spelling import unknown
from spmdrl.runtime.screen import show

_WIDTH = 110
_CONFIGS = {str(vars(config)["name"]): config for config in ALGO_CONFIGS}


def main(arguments: Sequence[str]) -> int:
    """Print the pages of the named algorithms, or the list of all; with `--json` the list as JSON.

    Raises ConfigError for an unknown name.
    """
    names = [argument.removeprefix("algo.") for argument in arguments if argument != "--json"]
    for name in names:
        if name not in _CONFIGS:
            raise ConfigError(f"{unknown('there is no algorithm', name, _CONFIGS)}; spmdrl help KEY explains a key")
    if "--json" in arguments:
        chosen = {name: _CONFIGS[name] for name in names or _CONFIGS}
        entries = [
            {"name": name, "paper": f"arXiv:{paper_of(config)}", "keys": _defaults(config)}
            for name, config in chosen.items()
        ]
        show(json.dumps({"algorithms": entries}, indent=1))
    else:
        show("\n\n".join("\n".join(_page(name)) for name in names) if names else "\n".join(_list()))
    return 0


def paper_of(config: type[AlgoConfig]) -> str:
    """Return the arXiv number of the paper that a config's docstring names first."""
    found = re.search(r"arXiv:(\d{4}\.\d{4,5})", f"{config.__doc__} {_equations(config)}")
    return found[1] if found else ""


@cache
def comparisons() -> Mapping[str, Any]:
    """Read the results of `bash launch/disagreements.sh`: other trainers' `versions`, and one of `rows` per
    comparison."""
    found: Mapping[str, Any] = json.loads((files("spmdrl.algorithms") / "comparisons.json").read_text())
    return found


def _defaults(config: type[AlgoConfig]) -> dict[str, Any]:
    return {entry.name: entry.default for entry in fields(config) if entry.name != "name"}


def _list() -> Iterator[str]:
    width = max(map(len, _CONFIGS))
    yield from (f"{name:{width}}  {_summary(config)}" for name, config in _CONFIGS.items())
    yield ""
    yield "spmdrl explain algo.NAME explains one; algo.name=NAME chooses it"


def _summary(config: type[AlgoConfig]) -> str:
    return " ".join(inspect.cleandoc(config.__doc__ or "").split("\n\n")[0].split())


def _equations(config: type[AlgoConfig]) -> str:
    """Return the rest of the settings' docstring; without one, the docstring of their algorithm's file.

    The file is read, as importing it takes PyTorch; algorithms that share one have names that begin with its name.
    """
    if own := inspect.cleandoc(config.__doc__ or "").partition("\n\n")[2]:
        return own
    paths = {path.name.removesuffix(".py"): path for path in files("spmdrl.algorithms.policy").iterdir()}
    stem = max(filter(str(vars(config)["name"]).startswith, paths), key=len)
    return ast.get_docstring(ast.parse(paths[stem].read_text(encoding="utf-8"))) or ""


def _page(name: str) -> Iterator[str]:
    config = _CONFIGS[name]
    yield from textwrap.wrap(f"{name}: {_summary(config)}", _WIDTH)
    yield ""
    yield from _equations(config).splitlines()
    yield ""
    shared = _defaults(AlgoConfig)
    own = {key: value for key, value in _defaults(config).items() if key not in shared or shared[key] != value}
    yield from _keys("Its own keys and defaults:", own)
    yield from _keys("Keys of every algorithm:", {key: value for key, value in shared.items() if key not in own})
    yield f"spmdrl help algo describes them; spmdrl train FILE.yaml algo.name={name} chooses it."
    yield ""
    yield from _beside_peers(name)


def _keys(title: str, keys: Mapping[str, Any]) -> Iterator[str]:
    width = max(map(len, keys), default=0)
    yield title
    yield from (f"  {key:{width}}  {inline(value)}" for key, value in keys.items())
    yield ""


def _beside_peers(name: str) -> Iterator[str]:
    found = comparisons()
    peers = ", ".join(f"{peer} {version}" for peer, version in found["versions"].items())
    rows = [row for row in found["rows"] if row["algorithm"] == name]
    if not rows:
        yield f"No function of {peers} is compared with it."
        return
    yield f"On the same random rows as {peers}:"
    for row in rows:
        keys = f" with {row['keys']}" if row["keys"] else ""
        result = f"differs: {row['why']}" if row["why"] else "equal"
        yield from textwrap.wrap(
            f"{row['part']}{keys} | {row['peer']}: {row['function']} | {result}",
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="      ",
        )
