"""Ways to what an installation lacks or has elsewhere: packages of extras, and files of docs/ and configs/."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

_CLONE = Path(__file__).resolve().parents[3]
_SHIPPED = re.compile(r"\b(?:docs|configs)/[\w/]+\.(?:md|json|yaml)")


def how_to_install(extra: str, clone: Path = _CLONE) -> str:
    """Return the command that installs an extra's packages.

    For an installed package it names them: under this project's name an index may have a stranger's.
    """
    if (clone / "setup.cfg").is_file():
        return f"`pip install -e '.[{extra}]'` in the clone"
    # Imported here, as it takes 20 ms, and each command's start imports this module.
    from importlib import metadata

    wanted = [one for one in metadata.requires("spmdrl") or () if re.search(rf"extra == ['\"]{extra}['\"]", one)]
    packages = " ".join(f"'{one.partition(';')[0].strip()}'" for one in wanted)
    return f"`pip install {packages}`"


def located(text: str, clone: Path = _CLONE) -> str:
    """Return a message in which files of docs/ and configs/ have their whole path, if they aren't those of a clone."""
    if (clone / "setup.cfg").is_file():
        return text
    shared = Path(sysconfig.get_path("data"), "share", "spmdrl")
    return _SHIPPED.sub(lambda name: str(shared / name[0]) if (shared / name[0]).is_file() else name[0], text)
