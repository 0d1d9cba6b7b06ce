"""Checks of this machine: packages, devices, a port, disk, shared memory, open files, links."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from spmdrl.job.run.run_folder import existing_part
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.prepared import Prepared, check_room
from spmdrl.job.start.rank_facts import open_job
from spmdrl.observability.terminal.units import bytes_text
from spmdrl.resources.collectives import gather_bytes, sum_over
from spmdrl.resources.device import find_device
from spmdrl.runtime.launch import LaunchEnvironment

_MIN_SHARED_BYTES = 64 << 20
_MIN_FILES = 1024
_REDUCED = 1 << 18
"""number of float32 values in the all-reduce: 1 MiB"""
_ROUNDS = 10
_MOST_ROUND_SECONDS = 0.5


@dataclass(frozen=True)
class CheckLine:
    """Result of one check."""

    passed: bool
    text: str

    @classmethod
    def ok(cls, text: str) -> CheckLine:
        return cls(True, text)

    @classmethod
    def failed(cls, what: str, remedy: str) -> CheckLine:
        """Return a failure with its remedy."""
        return cls(False, f"{what}; {remedy}")


def machine_lines(checked: CheckedRun, prepared: Prepared, launch: LaunchEnvironment) -> list[CheckLine]:
    """Return the findings on rank 0's machine, and failures on others. Collective over all ranks."""
    own = [
        *_versions(),
        _devices(checked, launch),
        _port(launch),
        _disk(checked, prepared),
        _shared_memory(),
        _open_files(),
    ]
    if launch.world_size == 1:
        return own
    with open_job(checked):
        failed = "\n".join(line.text for line in own if not line.passed)
        others = [payload.decode() for payload in gather_bytes(failed.encode())]
        lines = [
            CheckLine(False, f"rank {rank}: {text}")
            for rank, texts in enumerate(others)
            for text in texts.splitlines()
            if rank != launch.rank
        ]
        return [*own, *lines, _all_reduce(launch)]


def _versions() -> Iterator[CheckLine]:
    """Compare installed versions with this package's requirements."""
    try:
        of_package = metadata.metadata("spmdrl")
        wanted = [Requirement(text) for text in metadata.requires("spmdrl") or ()]
    except metadata.PackageNotFoundError:
        yield CheckLine.ok("versions: not compared, as spmdrl isn't installed (pip install -e .)")
        return
    python = ".".join(map(str, sys.version_info[:3]))
    if python not in SpecifierSet(of_package["Requires-Python"] or ""):
        yield CheckLine.failed(
            f"Python {python}, but spmdrl needs {of_package['Requires-Python']}", "make an environment of such a one"
        )
    found = [f"Python {python}"]
    for one in wanted:
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            continue  # an extra that isn't installed; without the others nothing would have started
        found.append(f"{one.name} {version}")
        if not one.specifier.contains(version, prereleases=True):
            remedy = f"pip install '{one.name}{one.specifier}'"
            yield CheckLine.failed(f"{one.name} {version}, but spmdrl is made for {one.specifier}", remedy)
    yield CheckLine.ok(f"versions: {', '.join(dict.fromkeys(found))}")


def _devices(checked: CheckedRun, launch: LaunchEnvironment) -> CheckLine:
    try:
        device = find_device(checked.config.resources.device, launch.device_index)
    except ValueError as error:
        return CheckLine(False, f"devices: {error}")
    there = os.cpu_count() or 1 if device.is_cpu else torch.accelerator.device_count()
    return CheckLine.ok(
        f"devices: {there} {device.kind}{' cores' if device.is_cpu else ''} for {launch.local_world_size} ranks"
    )


def _port(launch: LaunchEnvironment) -> CheckLine:
    """Check that rank 0 could listen: on a launcher's own port, or any."""
    wanted = 0 if launch.world_size > 1 else int(os.environ.get("MASTER_PORT", 29500))
    try:
        with socket.create_server(("127.0.0.1", wanted)) as listener:
            port = listener.getsockname()[1]
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = "set MASTER_PORT to a free one" if taken else "look at the loopback interface (ip link)"
        return CheckLine.failed(f"ports: {wanted} of 127.0.0.1 isn't available ({error.strerror})", remedy)
    return CheckLine.ok(f"ports: {port} of 127.0.0.1 is free")


def _disk(checked: CheckedRun, prepared: Prepared) -> CheckLine:
    config = checked.config
    folder = config.run.folder
    there = existing_part(folder)
    if not os.access(there, os.W_OK):
        return CheckLine.failed(
            f"disk: {there} can't be written to", f"set {config.run.folder_key} to a folder that can"
        )
    kind = find_device(config.resources.device, 0).kind
    try:
        needed = check_room(checked, {role: source.decoder for role, source in prepared.sources.items()}, kind)
    except ValueError as error:
        return CheckLine(False, f"disk: {error}")
    free = shutil.disk_usage(there).free
    return CheckLine.ok(f"disk: {bytes_text(needed)} of {bytes_text(free)} free for {folder}")


def _shared_memory() -> CheckLine:
    place = Path("/dev/shm")  # noqa: S108
    if not place.exists():
        return CheckLine.failed(
            "shared memory: there is no /dev/shm, in which ranks of a node share rows", "mount a tmpfs there"
        )
    free = shutil.disk_usage(place).free
    if free < _MIN_SHARED_BYTES:
        return CheckLine.failed(
            f"shared memory: /dev/shm has {bytes_text(free)} free, less than {bytes_text(_MIN_SHARED_BYTES)}",
            "remove what is left there, or enlarge it (docker run --shm-size=8g, mount -o remount,size=8g /dev/shm)",
        )
    return CheckLine.ok(f"shared memory: {bytes_text(free)} free in /dev/shm")


def _open_files() -> CheckLine:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_FILES:
        return CheckLine.failed(
            f"open files: at most {soft}, less than {_MIN_FILES}", f"ulimit -n {hard} before the start"
        )
    return CheckLine.ok(f"open files: at most {soft}")


def _all_reduce(launch: LaunchEnvironment) -> CheckLine:
    """Sum 1 MiB over all ranks. Collective over all ranks."""
    values, times = torch.ones(_REDUCED), []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        summed = sum_over(values)
        times.append(time.perf_counter() - started)
    seconds = sorted(times)[_ROUNDS // 2]
    what = f"all-reduce of 1 MiB over {launch.world_size} ranks on {launch.num_nodes} nodes: {1000 * seconds:.2g} ms"
    if not torch.equal(summed, values * launch.world_size):
        return CheckLine.failed(f"{what}, but its sum is wrong", "look at the network's hardware")
    if seconds > _MOST_ROUND_SECONDS:
        remedy = "set GLOO_SOCKET_IFNAME to the fast interface, and look for other programs on the nodes"
        return CheckLine.failed(f"{what}, which is slow", remedy)
    return CheckLine.ok(what)
