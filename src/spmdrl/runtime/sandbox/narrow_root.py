"""Files that a box sees: Python's library with its dependencies, four devices, and a private folder in memory."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence

from spmdrl.runtime.sandbox.kernel_calls import (
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NODIRATIME,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_RELATIME,
    MS_REMOUNT,
    enter_root,
    mount,
)

# A box's private folder, and a staging folder that only its server sees.
OWN_FOLDER = _STAGE = "/tmp"  # noqa: S108
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib32", "/lib64")
_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_KEPT_FLAGS = {os.ST_NOSUID: MS_NOSUID, os.ST_NODEV: MS_NODEV, os.ST_NOEXEC: MS_NOEXEC, os.ST_NOATIME: MS_NOATIME,
               os.ST_NODIRATIME: MS_NODIRATIME, os.ST_RELATIME: MS_RELATIME}  # fmt: skip


def readable_places(also: Sequence[str] = ()) -> list[str]:
    """Return the folders and files that a box may read, none inside another."""
    python = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib"))
    wanted = sorted({path for path in (*_LIBRARIES, *_FILES, *python, *also) if os.path.exists(path)})
    places: list[str] = []
    for path in wanted:
        if os.path.islink(path) or not any(
            path.startswith(f"{place}/") for place in places if not os.path.islink(place)
        ):
            places.append(path)
    return places


def enter(places: Iterable[str]) -> None:
    """Restrict the file system of this process and its children to these places, read-only.

    Needs a mount namespace of its own and the right to mount in it.
    """
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    # Opened before anything is mounted above them.
    sources = {path: os.open(path, os.O_PATH) for path in (*places, *_DEVICES) if not os.path.islink(path)}
    links = {path: os.readlink(path) for path in places if os.path.islink(path)}
    mount("tmpfs", _STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, source in sources.items():
        is_folder = os.path.isdir(f"/proc/self/fd/{source}")
        os.makedirs(_STAGE + (path if is_folder else os.path.dirname(path)), exist_ok=True)
        if not is_folder:
            os.close(os.open(_STAGE + path, os.O_CREAT | os.O_WRONLY, 0o444))
        mount(f"/proc/self/fd/{source}", _STAGE + path, flags=MS_BIND | MS_REC)
        os.close(source)
    for path, target in links.items():
        os.makedirs(_STAGE + os.path.dirname(path), exist_ok=True)
        os.symlink(target, _STAGE + path)
    os.mkdir(_STAGE + OWN_FOLDER)
    for place in [*_mounted_below(_STAGE), _STAGE]:
        _make_read_only(place)
    enter_root(_STAGE)


def _mounted_below(folder: str) -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        points = [line.split()[4] for line in lines]
    # A space is written \040, and so on.
    unescaped = (
        part.encode("latin-1", "surrogateescape").decode("unicode_escape") if "\\" in part else part for part in points
    )
    return [point for point in unescaped if point.startswith(f"{folder}/")]


def _make_read_only(place: str) -> None:
    has = os.statvfs(place).f_flag
    # An ordinary user's namespace may not drop the mount's existing restrictions.
    kept = sum(flag for status, flag in _KEPT_FLAGS.items() if has & status)
    is_device = place.removeprefix(_STAGE) in _DEVICES
    flags = MS_NOSUID if is_device else MS_NOSUID | MS_NODEV
    mount("none", place, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | kept | flags)
