"""A few modules for another Python, which has what they compare with, but not the package."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

import spmdrl


def copy_modules(package: str, modules: Sequence[str], folder: Path) -> None:
    """Copy modules of a package below `folder`, with the `__init__.py` of each package above them."""
    root = Path(next(iter(spmdrl.__path__))).parent
    parts = package.split(".")
    wanted = [".".join(parts[: depth + 1]) for depth in range(len(parts))] + [f"{package}.{name}" for name in modules]
    for name in wanted:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin)
        target = folder / source.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
