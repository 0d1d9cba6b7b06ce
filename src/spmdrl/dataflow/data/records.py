"""Raw records of a data path: a file, a folder, a pattern of file names, a data set of the hub, or generated rows."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from spmdrl.dataflow.data.formats import NAMES, BadRow, Record, read_file, suffix_of
from spmdrl.dataflow.data.gym_rows import gym_rows
from spmdrl.dataflow.data.hub_data import HUB_SCHEME, hub_files
from spmdrl.dataflow.data.split_files import NOT_ROWS, README, files_of_split
from spmdrl.dataflow.data.synthetic import SCHEME, synthetic_rows
from spmdrl.engines.reward.gym_tasks import GYM_SCHEME
from spmdrl.observability.terminal.spelling import nearest

_NUM_SHOWN, _NUM_PLACES = 20, 3
_OF_A_ROW = re.compile(r"'[^']*'|\d+")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class BadRows(ValueError):
    """Unusable rows, all of them in `rows`; the message shows the first few.

    `alike` has sources whose rows are all unusable for one reason; the message shows the first row of each.
    """

    def __init__(self, rows: list[BadRow], num_rows: int, alike: dict[str, list[BadRow]] | None = None):
        self.rows, self.has_all = tuple(rows), len(rows) == num_rows
        alike = alike or {}
        lines = [f"none of the {len(bad)} rows of {path}; the first is {bad[0]}" for path, bad in alike.items()]
        shown = {row for bad in alike.values() for row in bad}
        groups: dict[tuple[str, str], list[BadRow]] = {}
        for row in (row for row in rows if row not in shown):
            # Texts of one reason differ in numbers, names and values.
            groups.setdefault((row.kind, _OF_A_ROW.sub("", row.problem)), []).append(row)
        lines += [_together(group) for group in [*groups.values()][:_NUM_SHOWN]]
        lines += [f"... and {len(groups) - _NUM_SHOWN} more reasons"] if len(groups) > _NUM_SHOWN else []
        reasons = "\n  ".join(lines)
        way_out = "mend them" if alike else "mend them, or set data.on_bad_row: skip to leave them out"
        super().__init__(f"{len(rows)} of {num_rows} rows can't be used:\n  {reasons}\n{way_out}")


def _together(rows: list[BadRow]) -> str:
    """Return the line of rows with one reason."""
    first, *others = rows
    if not others:
        return str(first)
    places = [Path(row.place).name for row in others[:_NUM_PLACES]] + ["..."] * (len(others) > _NUM_PLACES)
    return f"{len(rows)} rows alike: {first} (also {', '.join(places)})"


def is_made(path: str) -> bool:
    """Return True for a URL whose rows are made by code."""
    return path.startswith((SCHEME, GYM_SCHEME))


def has_splits(path: str) -> bool:
    """Return True for a data set of the hub, and for a folder."""
    return path.startswith(HUB_SCHEME) or Path(path).expanduser().is_dir()


def read_records(path: str, split: str | None = None) -> Iterator[Record | BadRow]:
    """Yield the rows of all files of a data path, in order; anything but an object becomes a BadRow.

    `split` chooses files of a folder, and is needed for a data set of the hub.
    """
    if is_made(path):
        rows = gym_rows(path) if path.startswith(GYM_SCHEME) else synthetic_rows(path)
        return (Record(f"{path}:{number}", row, path) for number, row in enumerate(rows, 1))
    return chain.from_iterable(read_file(name, file) for name, file in data_files(path, split).items())


def data_files(path: str, split: str | None = None) -> dict[str, Path]:
    """Return the files of a data path, in order, by the names that their rows have in messages.

    Raises ValueError if there is none, or for an unsupported one.
    """
    if path.startswith(HUB_SCHEME):
        assert split is not None, f"{path} is read without a split"
        return hub_files(path, split)
    named = Path(path).expanduser()
    if named.is_dir():
        files = _files_of_folder(path, named) if split is None else _files_of_folders_split(path, named, split)
    elif not named.exists() and glob.has_magic(path):
        files = [Path(name) for name in sorted(glob.glob(str(named), recursive=True)) if Path(name).is_file()]
        if not files:
            raise ValueError(f"no file matches {path}; the working directory is {Path.cwd()}")
    else:
        files = [named]
    for file in files:
        # Opening a pipe would wait for its writer.
        if not file.is_file():
            raise ValueError(_no_such_file(file))
        if suffix_of(file) is None:
            raise ValueError(f"data file {file} isn't read: its name must end in {NAMES}; convert or rename it")
    return {path: named} if files == [named] else {str(file): file for file in files}


def _files_of_folder(path: str, folder: Path) -> list[Path]:
    files = [file for file in sorted(folder.iterdir()) if suffix_of(file) and file.name not in NOT_ROWS]
    names = ", ".join(file.name for file in files) or "none"
    if not files:
        raise ValueError(f"data path {path} is a folder with no file that is read ({NAMES})")
    splits = {word for file in files for word in ("train", "test", "val") if file.name.startswith(word)}
    if len(splits) > 1 or len({suffix_of(file) for file in files}) > 1:
        raise ValueError(
            f"data path {path} is a folder of several kinds of files: {names}; name one, or a pattern such as "
            f"{folder / ('*' + ''.join(files[0].suffixes))}, or a split by data.split (data.eval_split)"
        )
    return files


def _files_of_folders_split(path: str, folder: Path, split: str) -> list[Path]:
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    readme = folder / README
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    return [folder / name for name in files_of_split(names, text, split, None, f"data path {path}")]


def _no_such_file(file: Path) -> str:
    if file.is_symlink() and not file.exists():
        return f"data file {file} is a link to {file.readlink()}, which isn't there; mend the link or name another file"
    if file.exists():
        kind = "a folder" if file.is_dir() else "a pipe" if file.is_fifo() else "a device file"
        return f"data file {file} is {kind}, but each rank and each start reads the rows anew; write them to a file"
    siblings = [child.name for child in file.parent.iterdir()] if file.parent.is_dir() else []
    close = nearest(file.name, siblings)
    if close is not None:
        return f"there is no data file {file}; did you mean {file.parent / close}?"
    hint = f"there is no data file {file}; data is local files, and hub://, synthetic:// and reasoning_gym:// URLs"
    if _HUB_NAME.fullmatch(str(file)) and suffix_of(file) is None:
        hint += f"; a data set of the hub is {HUB_SCHEME}{file}"
    return hint
