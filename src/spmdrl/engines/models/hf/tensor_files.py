"""Safetensors files of a model folder: one, or several with an index, by the names in the files."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from spmdrl.nouns.batch import WeightSlice

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class TensorFiles:
    """Tensors of a folder's safetensors files.

    Files are mapped, so that reading a slice touches only that slice's pages.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._opened: dict[str, Any] = {}
        if (folder / SINGLE_FILE).exists():
            self._file_of = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            self._file_of = _read_index(folder)
            self._check_index()

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def path(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self.folder / self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._stored(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype in safetensors' terms, like BF16."""
        return str(self._stored(name).get_dtype())

    def read(self, box: WeightSlice) -> Tensor:
        """Return a view of one slice in the mapped file."""
        stored = self._stored(box.name)
        if 0 in box.shape:
            # safetensors refuses empty slices, which uneven shards do have.
            whole = stored[tuple(slice(0, min(1, size)) for size in stored.get_shape())]
            return whole.new_empty(box.shape)
        return stored[tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))]

    def _check_index(self) -> None:
        """Raise ValueError unless files match the index: transformers reads by files, others by index."""
        for file_name in sorted(set(self._file_of.values())):
            listed = {name for name, place in self._file_of.items() if place == file_name}
            if differing := sorted(listed ^ set(self._open(file_name).keys())):
                place = "the index" if differing[0] in listed else file_name
                raise ValueError(
                    f"{INDEX_FILE} and {file_name} in {self.folder} disagree: {differing[0]} is only in {place}; "
                    "fetch both again"
                )

    def _stored(self, name: str) -> Any:
        if name not in self._file_of:
            nearest = difflib.get_close_matches(name, self.names, n=1)
            hint = f"; the nearest name there is {nearest[0]}" if nearest else ""
            raise ValueError(f"{self.folder} holds no weight {name}{hint}; do config.json and weights belong together?")
        return self._open(self._file_of[name]).get_slice(name)

    def _open(self, file_name: str) -> Any:
        if file_name not in self._opened:
            path = self.folder / file_name
            try:
                self._opened[file_name] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} is not a whole safetensors file: {error}; fetch it again") from error
        return self._opened[file_name]


def weight_files_of(folder: Path) -> list[Path]:
    """Return the folder's safetensors files, sorted by name. Raises ValueError if one is missing."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    paths = [folder / name for name in sorted(set(_read_index(folder).values()))]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{folder} lacks {', '.join(missing[:3])} of {len(paths)} files; fetch it again")
    return paths


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    if not path.exists():
        raise ValueError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; give a folder with safetensors")
    try:
        file_of = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors index with a weight_map ({error}); fetch it again") from error
    if not file_of:
        raise ValueError(f"{path} names no weight; fetch it again")
    for file_name in file_of.values():
        # The index may come from anywhere, and must not make us read outside its folder.
        if not isinstance(file_name, str) or not file_name or Path(file_name).name != file_name:
            raise ValueError(f"{path} names {file_name!r}, but only plain names of files beside it are read")
    return file_of
