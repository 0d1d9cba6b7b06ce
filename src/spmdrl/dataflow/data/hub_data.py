"""Files of a data set on the Hugging Face hub, named like a file: `hub://openai/gsm8k?config=main&split=train`."""

from __future__ import annotations

import functools
import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl

from spmdrl.dataflow.data.split_files import README, files_of_split
from spmdrl.observability.terminal.spelling import unknown
from spmdrl.runtime.launch import read_launch_environment

HUB_SCHEME = "hub://"
_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_SETTINGS = ("split", "config", "revision")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")


@functools.cache
def hub_files(url: str, split: str) -> dict[str, Path]:
    """Return the files of a hub data set's split, or of the one that the URL names, by their names on the hub.

    They are downloaded unless they are in the cache of huggingface_hub: the first process that comes here does it,
    others of the same cache wait. Raises ValueError for unknown names, and if neither hub nor cache has the files.
    """
    name, _, query = url.removeprefix(HUB_SCHEME).partition("?")
    settings = dict(parse_qsl(query, keep_blank_values=True))
    if not _NAME.fullmatch(name):
        raise ValueError(f"{url} names {name!r}, but must name a data set, as in hub://openai/gsm8k?config=main")
    for key in settings:
        if key not in _SETTINGS:
            raise ValueError(unknown(f"{url}: there is no setting", key, _SETTINGS))
    split, config, revision = settings.get("split", split), settings.get("config"), settings.get("revision")
    with _waiting_for_download(name):
        folder = _snapshot(url, name, revision, [README])
        names, is_whole = _listed(name, folder)
        readme = folder / README
        text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
        chosen = files_of_split(names, text, split, config, f"{HUB_SCHEME}{name}")
        if is_whole:
            folder = _snapshot(url, name, folder.name, chosen)
        elif (lacking := _lacking_shard(chosen)) is not None:
            raise ValueError(f"the cache has {chosen[0]} of {url}, but not {lacking}; {_way_out(name)}")
    return {f"{HUB_SCHEME}{name}/{one}": folder / one for one in chosen}


@contextmanager
def _waiting_for_download(name: str) -> Iterator[None]:
    # Imported here, as below, because only data of the hub needs it.
    from filelock import FileLock
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        # The cache may not be writable, and nothing is downloaded.
        yield
        return
    folder = Path(constants.HF_HUB_CACHE).expanduser() / ".locks" / f"datasets--{name.replace('/', '--')}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "split.lock"):
        yield


def _snapshot(url: str, name: str, revision: str | None, files: list[str]) -> Path:
    """Return the local folder of a revision with these files, or with what the cache has of them offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars

    if read_launch_environment(os.environ).local_rank > 0:
        disable_progress_bars()
    try:
        return Path(
            snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=[*map(glob.escape, files)])
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise ValueError(f"{url} is neither on the hub nor in its cache ({reason}); {_way_out(name)}") from error


def _listed(name: str, folder: Path) -> tuple[list[str], bool]:
    """Return the names of all files of a snapshot, and true; if the hub isn't reached, of those here, and false."""
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        try:
            return HfApi().list_repo_files(name, repo_type="dataset", revision=folder.name), True
        except Exception:  # noqa: S110  # requests' or httpx' error, by the version of huggingface_hub
            pass
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()], False


def _lacking_shard(names: list[str]) -> str | None:
    """Return a shard, as in train-00001-of-00002.parquet, that isn't among the names though others of its file are."""
    for shard in filter(None, map(_SHARD.fullmatch, names)):
        start, _, count, end = shard.groups()
        missing = next((n for n in range(int(count)) if f"{start}-{n:05d}-of-{count}{end}" not in names), None)
        if missing is not None:
            return f"{start}-{missing:05d}-of-{count}{end}"
    return None


def _way_out(name: str) -> str:
    return (
        "check the name, and that this account may read it (`hf auth login`, HF_TOKEN); or fetch it where the hub is "
        f"reached (`hf download --repo-type dataset {name}`) and copy the cache here, or name local files"
    )
