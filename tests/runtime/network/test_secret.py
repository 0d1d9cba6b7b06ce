from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from spmdrl.runtime.network.secret import SECRET_BYTES, VARIABLE, read_or_make_secret, secret_file


def test_ranks_that_come_at_once_read_the_same_secret(tmp_path):
    path = tmp_path / "run" / ".job_secret"
    found: list[bytes] = []
    ranks = [threading.Thread(target=lambda: found.append(read_or_make_secret(path))) for _ in range(16)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(found) == 16 and len(set(found)) == 1 and len(found[0]) == SECRET_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_another_folder_has_another_secret(tmp_path):
    assert read_or_make_secret(tmp_path / "a") != read_or_make_secret(tmp_path / "b")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_that_others_may_read_is_refused_with_a_way_out(tmp_path, mode):
    path = tmp_path / "secret"
    read_or_make_secret(path)
    path.chmod(mode)
    with pytest.raises(ValueError, match=rf"has mode {mode:o}, .* 600 is required; delete it, .*{VARIABLE}="):
        read_or_make_secret(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_secret_of_another_user_is_refused(tmp_path):
    path = tmp_path / "secret"
    read_or_make_secret(path)
    os.chown(path, 65534, -1)
    with pytest.raises(ValueError, match="belongs to user 65534, but this rank runs as user 0"):
        read_or_make_secret(path)


def test_links_pipes_folders_and_short_files_are_refused(tmp_path):
    read_or_make_secret(tmp_path / "sound")
    (tmp_path / "link").symlink_to(tmp_path / "sound")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    os.close(os.open(tmp_path / "short", os.O_CREAT | os.O_WRONLY, 0o600))
    for name in ("link", "folder", "pipe", "short"):
        with pytest.raises(ValueError, match=f"{tmp_path / name} (can't be read|isn't a plain file|has 0 bytes)"):
            read_or_make_secret(tmp_path / name)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"can't be read or made: .*{VARIABLE}="):
        read_or_make_secret(tmp_path / "file" / "secret")


def test_the_environment_may_name_the_file(tmp_path):
    assert secret_file(tmp_path, {VARIABLE: "/elsewhere/secret"}) == Path("/elsewhere/secret")
    assert secret_file(tmp_path, {}).parent == tmp_path
    assert secret_file(None, {"XDG_CACHE_HOME": str(tmp_path)}).parent == tmp_path / "spmdrl"
    (tmp_path / "file").touch()
    assert f"spmdrl-{os.geteuid()}" in str(secret_file(None, {"XDG_CACHE_HOME": str(tmp_path / "file")}))
