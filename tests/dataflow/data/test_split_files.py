"""Files of a data set's split, by the header of its README or by names; and the first rows of a source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmdrl.dataflow.data.data_rows import read_rows
from spmdrl.dataflow.data.split_files import files_of_split
from spmdrl.nouns.settings.data_config import DataConfig

MAIN_AND_SOCRATIC = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
- config_name: socratic
  data_files: {train: socratic/train-*}
---
# A data set
"""
GSM8K = [f"{config}/{split}-00000-of-00001.parquet" for config in ("main", "socratic") for split in ("test", "train")]


def files(names: str | list[str], *, readme: str = "", split: str = "train", config: str | None = None) -> list[str]:
    return files_of_split(names.split() if isinstance(names, str) else names, readme, split, config, "hub://a/b")


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        ("README.md rows.jsonl", "train", "rows.jsonl"),
        ("train.jsonl test.jsonl", "train", "train.jsonl"),
        ("my_train_file.csv dev-1.csv", "validation", "dev-1.csv"),
        ("training1.csv trains.csv test.csv", "train", "training1.csv"),
        ("train/a.jsonl train/b.jsonl test/a.jsonl", "train", "train/a.jsonl train/b.jsonl"),
        ("x/val_2/test.jsonl x/train/test.jsonl", "validation", "x/val_2/test.jsonl"),
        (
            "data/train_prefs-00001-of-00002.parquet data/train_prefs-00000-of-00002.parquet other.parquet",
            "train_prefs",
            "data/train_prefs-00000-of-00002.parquet data/train_prefs-00001-of-00002.parquet",
        ),
        (".hidden/train.jsonl __pycache__/train.jsonl train.jsonl dataset_infos.json", "train", "train.jsonl"),
    ],
)
def test_without_a_header_names_of_folders_and_files_decide(names: str, split: str, expected: str) -> None:
    assert files(names, split=split) == expected.split()


@pytest.mark.parametrize(
    ("data_files", "split", "expected"),
    [
        ("a.jsonl", "train", ["a.jsonl"]),
        ("['*.jsonl', 'deep/**/c.jsonl']", "train", ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/c.jsonl"]),
        ("'**/c.jsonl'", "train", ["deep/c.jsonl", "deep/er/c.jsonl"]),
        ("'deep/**'", "train", ["deep/c.jsonl", "deep/er/c.jsonl"]),
        ("[{split: train, path: a.jsonl}, {split: fresh, path: '[!a].jsonl'}]", "fresh", ["b.jsonl"]),
        ("{train: ./b.jsonl}", "train", ["b.jsonl"]),
    ],
)
def test_patterns_of_the_header_choose_files(data_files: str, split: str, expected: list[str]) -> None:
    readme = f"---\nconfigs:\n- config_name: any\n  data_files: {data_files}\n---\n"
    assert files("a.jsonl b.jsonl deep/c.jsonl deep/er/c.jsonl", readme=readme, split=split) == expected


def test_a_config_is_the_named_the_default_or_the_only_one() -> None:
    assert files(GSM8K, readme=MAIN_AND_SOCRATIC, config="socratic") == [GSM8K[3]]
    assert files(GSM8K, readme=MAIN_AND_SOCRATIC, config="main", split="test") == [GSM8K[0]]
    assert files(GSM8K, readme=MAIN_AND_SOCRATIC.replace("name: main", "name: main\n  default: true")) == [GSM8K[1]]
    assert files("x/train.csv y/train.csv", readme="---\nconfigs: [{data_dir: y}]\n---\n") == ["y/train.csv"]
    # As in the hub's own conversion, which has no header.
    assert files("main/train/0000.parquet other/train/0000.parquet", config="main") == ["main/train/0000.parquet"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"readme": MAIN_AND_SOCRATIC}, "hub://a/b has several configs: main, socratic; add config=NAME"),
        ({"readme": MAIN_AND_SOCRATIC, "config": "mian"}, "has no config 'mian'; did you mean 'main'"),
        ({"readme": MAIN_AND_SOCRATIC, "config": "socratic", "split": "test"}, "split 'test'; known are train"),
        ({"readme": "---\nconfigs: [{data_files: [{split: a}]}]\n---\n"}, "header of hub://a/b's README.md holds"),
        ({"readme": "---\na: [\n---\n"}, "isn't YAML"),
        ({"names": "script.py images.zip"}, "no file that is read .*images.zip, script.py; .*refs/convert/parquet"),
        ({"names": "train.csv train.jsonl"}, "several kinds of files: train.csv, train.jsonl"),
        ({"names": "train.csv", "config": "x"}, "no file in x that is read"),
    ],
)
def test_what_decides_nothing_is_refused_with_what_there_is(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        files(**({"names": GSM8K} | asked))


def row(prompt: str) -> bytes:
    return json.dumps({"prompt": prompt, "answer": "1"}).encode() + b"\n"


SPLITS = {
    "README.md": b"# no header\n",
    "data/train-00000-of-00002.jsonl": row("a") + row("b"),
    "data/train-00001-of-00002.jsonl": row("c"),
    "data/test-00000-of-00001.jsonl": row("held out"),
}


def test_a_local_folder_s_splits_are_chosen_by_name(tmp_path: Path) -> None:
    for name, content in SPLITS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    config = DataConfig(split="train")
    (part,) = read_rows(str(tmp_path), config)
    assert [one.prompt for one in part.rows] == ["a", "b", "c"]
    (part,) = read_rows(str(tmp_path), DataConfig(eval_split="test", split="train"), key="data.eval")
    assert [one.prompt for one in part.rows] == ["held out"]
    with pytest.raises(ValueError, match="several kinds of files: .*, or a split by data.split"):
        read_rows(str(tmp_path / "data"), DataConfig())
    with pytest.raises(ValueError, match="data.split is train, but data.train names neither a data set of the hub nor"):
        read_rows(str(tmp_path / "data" / "test-00000-of-00001.jsonl"), config)


def test_the_first_rows_of_each_source_are_used(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_bytes(b"".join(row(f"{name}{number}") for number in range(3)) + b"{broken")
    parts = read_rows([str(path) for path in paths], DataConfig(max_rows=2))
    assert [[one.prompt for one in part.rows] for part in parts] == [["a0", "a1"], ["b0", "b1"]]
    with pytest.raises(ValueError, match="2 of 8 rows can't be used"):
        read_rows([str(path) for path in paths], DataConfig(max_rows=2), key="data.eval")
