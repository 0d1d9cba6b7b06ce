"""Files of one split of a data set: by the configs in its README's header, or else by the names of its files.

The rules are those of Hugging Face's `datasets` for repositories without code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from spmdrl.dataflow.data.formats import NAMES, suffix_of
from spmdrl.observability.terminal.spelling import unknown

README = "README.md"
# JSON files beside the rows.
NOT_ROWS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_KEYWORDS = {
    "train": "train|training", "validation": "validation|valid|dev|val", "test": "test|testing|eval|evaluation",
}  # fmt: skip
_SHARD_OF_SPLIT = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
# A keyword stands between these, or at the ends of a folder's or file's name.
_SIGNS = "._ 0-9-"
_IN_FOLDER, _IN_NAME = f"(?:^|[/{_SIGNS}])(?:%s)(?:[{_SIGNS}][^/]*)?/", f"(?:^|[/{_SIGNS}])(?:%s)[{_SIGNS}][^/]*$"
_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def files_of_split(names: Sequence[str], readme: str, split: str, config: str | None, place: str) -> list[str]:
    """Return the files of a split, in order, of all `names` in a data set, which messages call `place`.

    Without configs in the README's header, `config` is the folder of the files. Raises ValueError, with the splits that
    there are.
    """
    entry = _entry(readme, config, place)
    folder = str(entry.get("data_dir") or "").strip("./")
    files = [name for name in sorted(names) if _holds_rows(name) and name.startswith(f"{folder}/" if folder else "")]
    patterns = _patterns(entry["data_files"], place) if "data_files" in entry else None
    if not files:
        where = f" in {folder}" if folder else ""
        found = ", ".join(sorted(names)[:5]) or "nothing"
        raise ValueError(
            f"{place} holds no file{where} that is read ({NAMES}), but {found}; convert it, or try the hub's own "
            "conversion, revision=refs/convert/parquet with config=NAME"
        )
    # Names and patterns are read from the folder on.
    start = len(folder) + 1 if folder else 0
    splits = _by_names(files, start) if patterns is None else _by_patterns(files, start, patterns)
    if not splits.get(split):
        raise ValueError(unknown(f"{place} has no files of a split", split, [name for name in splits if splits[name]]))
    if len({suffix_of(Path(name)) for name in splits[split]}) > 1:
        raise ValueError(
            f"the split {split} of {place} has several kinds of files: {', '.join(splits[split])}; name one file, or a "
            "pattern of local ones"
        )
    return splits[split]


def _holds_rows(name: str) -> bool:
    *folders, last = name.split("/")
    is_hidden = any(part.startswith(".") for part in (*folders, last)) or any(part.startswith("__") for part in folders)
    return not is_hidden and last not in NOT_ROWS and suffix_of(Path(last)) is not None


def _entry(readme: str, config: str | None, place: str) -> Mapping[str, Any]:
    """Return a config's entry in the header: the only one, the default or the named one."""
    found = re.match(r"---[ \t]*\r?\n(.*?)^---", readme, re.DOTALL | re.MULTILINE)
    try:
        header = yaml.safe_load(found[1]) if found else None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"the header of {place}'s {README} isn't YAML: {error}; name its files instead") from None
    configs = header.get("configs") if isinstance(header, Mapping) else None
    entries = {str(one.get("config_name", "default")): one for one in configs or () if isinstance(one, Mapping)}
    if not entries:
        return {"data_dir": config}
    if config is None:
        defaults = [name for name, one in entries.items() if one.get("default")] + ["default"]
        config = next(iter(entries)) if len(entries) == 1 else next((one for one in defaults if one in entries), None)
    if config is None:
        raise ValueError(f"{place} has several configs: {', '.join(entries)}; add config=NAME to its URL")
    if config not in entries:
        raise ValueError(unknown(f"{place} has no config", config, entries))
    return entries[config]


def _patterns(given: Any, place: str) -> dict[str, list[str]]:
    """Return the patterns of each split: a pattern or several are of `train`, entries have `split` and `path`."""
    items = [{"split": key, "path": path} for key, path in given.items()] if isinstance(given, Mapping) else given
    items = items if isinstance(items, list) else [items]
    if all(isinstance(item, str) for item in items):
        items = [{"split": "train", "path": items}]
    found: dict[str, list[str]] = {}
    for item in items:
        if not isinstance(item, Mapping) or not {"split", "path"} <= item.keys():
            raise ValueError(
                f"data_files in the header of {place}'s {README} holds {item!r:.80}; name its files instead"
            )
        paths = item["path"] if isinstance(item["path"], list) else [item["path"]]
        found[str(item["split"])] = [str(path).removeprefix("./") for path in paths]
    return found


def _by_patterns(files: Sequence[str], start: int, patterns: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    chosen = {split: [_compiled(one) for one in of_split] for split, of_split in patterns.items()}
    return {
        split: [name for name in files if any(one.fullmatch(name[start:]) for one in chosen[split])] for split in chosen
    }


def _compiled(pattern: str) -> re.Pattern[str]:
    """Translate a pattern of paths, in which * stays within a folder and ** doesn't."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\])", pattern)
    return re.compile("".join(_WILDCARDS.get(part) or _literal(part) for part in parts))


def _literal(part: str) -> str:
    if not part.startswith("["):
        return re.escape(part)
    return part.replace("\\", "\\\\").replace("[!", "[^", 1)


def _by_names(files: Sequence[str], start: int) -> dict[str, list[str]]:
    """Group files by split: shards in `data`, else by names of folders, else of files, else all are `train`."""
    splits: dict[str, list[str]] = {}
    for name in files:
        if shard := _SHARD_OF_SPLIT.fullmatch(name[start:]):
            splits.setdefault(shard[1], []).append(name)
    for form in (_IN_FOLDER, _IN_NAME):
        if not splits:
            found = {key: re.compile(form % words) for key, words in _KEYWORDS.items()}
            splits = {key: [name for name in files if form.search(name[start:])] for key, form in found.items()}
            splits = {key: of_split for key, of_split in splits.items() if of_split}
    return splits or {"train": list(files)}
