"""Free memory is the least that the host and any limit of a control group leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.resources.host_memory import free_cgroup_bytes, free_host_bytes, is_memory_folder


def limited(folder: Path, limit: str, used: int, cache: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nfile 7\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_every_limit_between_a_group_and_the_root_counts(tmp_path):
    listed, mount = tmp_path / "cgroup", tmp_path / "mount"
    listed.write_text("0::/user/job\n")
    limited(mount / "user" / "job", "max", 10, 0, V2)
    limited(mount / "user", "4000", 1000, 300, V2)
    assert list(free_cgroup_bytes(listed, mount)) == [3300]
    limited(mount / "user" / "job", "1000", 900, 0, V2)
    assert list(free_cgroup_bytes(listed, mount)) == [100, 3300]


def test_version_1_is_read_where_the_memory_controller_is(tmp_path):
    listed, mount = tmp_path / "cgroup", tmp_path / "mount"
    listed.write_text("5:cpu,cpuacct:/a\n4:memory:/docker/abc\n")
    # A container shows its own group at the root, under another path than the one listed.
    limited(mount / "memory", "2000", 2500, 100, V1)
    assert list(free_cgroup_bytes(listed, mount)) == [0]


def test_nothing_is_read_beside_a_limit_that_is_none(tmp_path):
    listed, mount = tmp_path / "cgroup", tmp_path / "mount"
    listed.write_text("4:memory:/\n0::/\n")
    # Of version 1 with pages of 4 and 64 KiB, and of version 2; what is used can't be read.
    for limit, folder, names in (
        (2**63 - 2**12, "memory", V1), (2**63 - 2**16, "memory", V1), ("max", ".", V2),
    ):  # fmt: skip
        limited(mount / folder, str(limit), 0, 0, names)
        (mount / folder / names[1]).write_text("no number")
        assert list(free_cgroup_bytes(listed, mount)) == []


def test_no_limit_and_no_control_groups_leave_the_hosts_memory(tmp_path):
    assert list(free_cgroup_bytes(tmp_path / "missing", tmp_path)) == []
    (tmp_path / "cgroup").write_text("0::/\n")
    assert list(free_cgroup_bytes(tmp_path / "cgroup", tmp_path)) == []
    assert free_host_bytes() > 0


@pytest.mark.parametrize(("folder", "expected"), [("/dev/shm/run", True), ("/", False), ("/dev/shmx", False)])
def test_a_folder_kept_in_memory_is_recognised_by_the_nearest_mount(tmp_path, folder, expected):
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n")
    assert is_memory_folder(Path(folder), mounts) == expected
