"""Free memory of this host, and of the control groups that this process runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
# Version 1 writes the largest page-aligned number if there is no limit, whatever the size of a page.
_NO_LIMIT = 1 << 62


def free_host_bytes() -> int:
    """Return the memory that can still be allocated here; without /proc, the host's total.

    In a container or a job with a memory limit, the rest of the limit.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            sizes = dict(line.split(":") for line in meminfo)
            free_bytes = int(sizes["MemAvailable"].split()[0]) * 1024
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free_bytes, *free_cgroup_bytes()])


def free_cgroup_bytes(listed_in: Path = Path("/proc/self/cgroup"), mount: Path = _MOUNT) -> Iterator[int]:
    """Yield the rest of each limit on this process's control groups, of version 1 and 2; nothing without limits.

    Cached file pages that the kernel drops first don't count as used.
    """
    try:
        lines = listed_in.read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _free_below(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _free_below(mount / "memory", path, *names)


def is_memory_folder(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Return True if a folder's files are in memory (tmpfs), so that writing to them frees none."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return False
    kind_at: Mapping[str, str] = {line.split()[1]: line.split()[2] for line in lines}
    resolved = folder.resolve()
    kinds = [kind_at[str(place)] for place in (resolved, *resolved.parents) if str(place) in kind_at]
    return bool(kinds) and kinds[0] in ("tmpfs", "ramfs")


def _free_below(mount: Path, path: str, limit_name: str, used_name: str, cache_name: str) -> Iterator[int]:
    """Yield the rest of each limit between the mount and this path, which containers may lack."""
    folder = mount / path.strip("/")
    for place in (folder, *folder.parents):
        if place != mount and mount not in place.parents:
            return
        try:
            limit = (place / limit_name).read_text(encoding="ascii").strip()
            if limit == "max" or int(limit) >= _NO_LIMIT:
                continue
            used = int((place / used_name).read_text(encoding="ascii"))
            stat = dict(line.split() for line in (place / "memory.stat").read_text(encoding="ascii").splitlines())
        except OSError:
            continue
        yield max(0, int(limit) - used + int(stat.get(cache_name, 0)))
