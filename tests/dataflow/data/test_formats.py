"""Data files of every format and of other trainers' shapes are read as they are, and broken ones end in one line."""

from __future__ import annotations

import csv
import gzip
import json
import os
import resource
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.dataflow.data import formats
from spmdrl.dataflow.data.data_rows import Row, RowNeeds, SourceRows, read_rows
from spmdrl.dataflow.data.formats import BadRow, Record, read_file
from spmdrl.dataflow.data.records import BadRows, data_files
from spmdrl.nouns.settings.data_config import DataConfig

USER = {"role": "user", "content": "1+1="}
ASSISTANT = {"role": "assistant", "content": "2"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]}
SFT, RL, PROMPTS = RowNeeds(completion=True), RowNeeds(answer=True), RowNeeds()


def written(path: Path, content: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    data = content if isinstance(content, bytes) else json.dumps(content, indent=2).encode()
    (gzip.open if path.suffix == ".gz" else open)(path, "wb").write(data)
    return path


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def part_of(path: Path | str, needs: RowNeeds = PROMPTS, **options: object) -> SourceRows:
    (part,) = read_rows(str(path), DataConfig(**options), needs=needs)  # type: ignore[arg-type]
    return part


def row_of(folder: Path, values: dict[str, object], needs: RowNeeds) -> Row:
    (row,) = part_of(written(folder / "data.jsonl", lines(values)), needs).rows
    return row


@pytest.mark.parametrize(
    ("values", "needs", "prompt", "answer", "completion"),
    [
        pytest.param(
            {"problem": "1+1=", "answer": "2", "solution": "It is 2."}, RL, "1+1=", "2", None, id="DeepScaleR"
        ),
        pytest.param({"problem": "1+1=", "expected_answer": "2", "solution": "..."}, RL, "1+1=", "2", None, id="NeMo"),
        pytest.param({"question": "1+1=", "final_answer": 2}, RL, "1+1=", "2", None, id="final_answer"),
        pytest.param(
            {"data_source": "x", "prompt": [USER], "ability": "math", "reward_model": {"ground_truth": "2"},
             "extra_info": {"index": 0}},
            RL, [USER], "2", None, id="verl",
        ),
        pytest.param(
            {"prompt": [USER], "env_class": "gsm8k", "reward_spec": {"ground_truth": "2"}}, RL, [USER], "2", None,
            id="SkyRL",
        ),
        pytest.param({"prompt": "1+1=", "label": "2"}, RL, "1+1=", "2", None, id="slime"),
        pytest.param({"prompt": [PARTS], "answer": "2"}, RL, [USER], "2", None, id="content parts"),
        pytest.param({"messages": [USER]}, PROMPTS, [USER], None, None, id="messages for RL"),
        pytest.param({"messages": [USER, ASSISTANT]}, SFT, [USER], None, "2", id="messages"),
        pytest.param({"messages": [USER, ASSISTANT], "answer": "2"}, RL, [USER], "2", "2", id="messages with answer"),
        pytest.param(
            {"messages": [USER, ASSISTANT, USER, ASSISTANT]}, SFT, [USER, ASSISTANT, USER], None, "2", id="turns"
        ),
        pytest.param({"messages": [USER, CALLS]}, SFT, [USER], None, CALLS, id="tool calls alone"),
        pytest.param({"prompt": [USER], "completion": [CALLS]}, SFT, [USER], None, CALLS, id="TRL tool calls"),
        pytest.param(
            {"messages": [USER, {**ASSISTANT, "tool_calls": None}]}, SFT, [USER], None, "2", id="parquet's nulls"
        ),
        pytest.param({"messages": [USER, CALLS, USER]}, PROMPTS, [USER, CALLS, USER], None, None, id="calls in turns"),
        pytest.param({"prompt": "1+1=", "completion": "2"}, SFT, "1+1=", None, "2", id="TRL prompt and completion"),
        pytest.param({"prompt": [USER], "completion": [ASSISTANT]}, SFT, [USER], None, "2", id="TRL conversational"),
        pytest.param({"instruction": "Add.", "input": "", "output": "2"}, SFT, "Add.", None, "2", id="alpaca"),
        pytest.param(
            {"instruction": "Add.", "input": "1, 1", "output": "2"}, SFT, "Add.\n\n1, 1", None, "2", id="alpaca input"
        ),
        pytest.param({"input": "1+1=", "output": "2"}, SFT, "1+1=", None, "2", id="input and output"),
        pytest.param({"question": "1+1=", "answer": "2"}, SFT, "1+1=", "2", None, id="an answer is learnt"),
    ],
)  # fmt: skip
def test_rows_of_other_trainers_are_read_unchanged(
    tmp_path: Path, values: dict[str, object], needs: RowNeeds, prompt: object, answer: object, completion: object
) -> None:
    row = row_of(tmp_path, values, needs)
    assert (row.prompt, row.answer, row.completion) == (prompt, answer, completion)


@pytest.mark.parametrize(
    ("values", "needs", "problem"),
    [
        (
            {"messages": [USER]},
            SFT,
            "nothing to learn: no completion, output, response, answer and no messages .* supervised",
        ),
        ({"prompt": "a"}, SFT, "no messages that end with the assistant's"),
        ({"prompt": "a", "completion": " "}, SFT, "'completion' is empty, so there is nothing to learn"),
        ({"prompt": "a", "completion": [USER]}, SFT, "'completion' is a list, but must be text or one message"),
        ({"messages": [ASSISTANT]}, SFT, "'messages' is an empty list of messages before the answer"),
        ({"prompt": "a"}, RL, "no answer in answer, expected_answer, .*built-in reward functions"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            PROMPTS,
            r"'messages\[0\].content\[0\]' is of type 'image_url', but only texts are read",
        ),
    ],
)
def test_a_row_without_what_its_use_needs_is_refused_for_that_use(
    tmp_path: Path, values: dict[str, object], needs: RowNeeds, problem: str
) -> None:
    with pytest.raises(BadRows, match=problem) as caught:
        row_of(tmp_path, values, needs)
    assert needs == RL or "reward" not in str(caught.value)


ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "note": 'a\nb, "c" é'} for n in range(30)]


def as_csv(delimiter: str) -> bytes:
    from io import StringIO

    text = StringIO()
    table = csv.DictWriter(text, list(ROWS[0]), delimiter=delimiter)
    table.writeheader()
    table.writerows(ROWS)
    return text.getvalue().encode()


@pytest.mark.parametrize(
    ("name", "content", "first", "second"),
    [
        ("a.jsonl", lines(*ROWS), 1, 2),
        ("a.ndjson", b"\xef\xbb\xbf" + lines(*ROWS), 1, 2),
        ("a.json", lines(*ROWS), 1, 2),
        ("a.json", ROWS, "2:3", "7:3"),
        ("a.jsonl", json.dumps(ROWS).encode(), "1:2", "1:67"),
        ("a.jsonl.gz", lines(*ROWS), 1, 2),
        ("a.json.gz", ROWS, "2:3", "7:3"),
        ("a.csv", as_csv(","), 2, 4),
        ("a.csv", b"\xef\xbb\xbf" + as_csv(",").replace(b"\r\n", b"\n"), 2, 4),
        ("a.tsv", as_csv("\t"), 2, 4),
        ("a.csv.gz", as_csv(","), 2, 4),
    ],
)
def test_every_format_gives_the_same_rows_with_their_lines(
    tmp_path: Path, name: str, content: object, first: object, second: object
) -> None:
    path = written(tmp_path / name, content)
    part = part_of(path, RL)
    assert [(row.prompt, row.answer, row.columns["note"]) for row in part.rows] == [
        (row["prompt"], row["answer"], row["note"]) for row in ROWS
    ]
    assert [row.place for row in part.rows[:2]] == [f"{path}:{first}", f"{path}:{second}"]


def test_folders_and_patterns_are_read_file_by_file(tmp_path: Path) -> None:
    for name in ("b", "a"):
        written(tmp_path / "d" / f"{name}.jsonl", lines({"id": 1, "prompt": name}))
    written(tmp_path / "d" / "dataset_info.json", {})
    for path in (f"{tmp_path}/d", f"{tmp_path}/d/*.jsonl", f"{tmp_path}/**/?.jsonl"):
        part = part_of(path)
        assert [row.prompt for row in part.rows] == ["a", "b"]
        assert [row.id for row in part.rows] == [f"{tmp_path}/d/a.jsonl#1", f"{tmp_path}/d/b.jsonl#1"]
    with pytest.raises(ValueError, match="names .*a.jsonl twice"):
        read_rows([f"{tmp_path}/d", f"{tmp_path}/d/a.jsonl"], DataConfig())


def test_a_file_whose_name_has_a_pattern_s_letters_is_itself(tmp_path: Path) -> None:
    path = written(tmp_path / "a[1].jsonl", lines({"prompt": "a"}))
    assert data_files(str(path)) == {str(path): path}


def test_a_folder_of_splits_is_not_guessed_at(tmp_path: Path) -> None:
    written(tmp_path / "train.jsonl", lines({"prompt": "a"}))
    written(tmp_path / "test.jsonl", lines({"prompt": "b"}))
    with pytest.raises(ValueError, match="several kinds of files: test.jsonl, train.jsonl; name one"):
        part_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.json", b'[{"prompt": "a"}', "a.json:1: not a JSON array: ',' or ']' expected after a row"),
        ("a.json", b'[{"prompt": "a"},\n{"prompt": ]', "a.json:2: not a JSON array: Expecting value"),
        ("a.json", b'[{"prompt": "a"}]\n[1]', "a.json:2: not a JSON array: text after the array's end"),
        ("a.json", b"[" * 5000, "not a JSON array: "),
        ("a.json", b'[{"prompt": "\xff"}]', "byte 0xff isn't UTF-8"),
        ("a.json", b"[{'prompt': 1}]", "not a JSON array: Expecting property name"),
        ("a.csv", b'prompt,answer\n"a,b\n', "a.csv:2: not CSV: unexpected end of data; look for a quote"),
        ("a.csv", b"prompt,prompt\na,b\n", "the header names 'prompt' twice"),
        ("a.csv", b"prompt,answer\n\xff,b\n", "a.csv:2:1: byte 0xff isn't UTF-8"),
        ("b.jsonl.gz", None, "is no whole gzip file"),
        ("c.jsonl.gz", gzip.compress(lines(*ROWS), mtime=0)[:-20], "is no whole gzip file"),
        ("a.parquet", b"PAR1", "parquet"),
        ("a.jsonl", b"", "holds no usable row"),
        ("a.json", b"[]", "holds no usable row"),
        ("a.csv", b"prompt,answer\n", "holds no usable row"),
    ],
)
def test_a_file_that_is_broken_is_one_line(tmp_path: Path, name: str, content: bytes | None, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(lines(*ROWS) if content is None else content)
    with pytest.raises(ValueError, match=problem) as caught:
        part_of(path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", json.dumps({"a": [1, 2, 3]}, indent=1).encode(), "not_json"),
        ("a.jsonl", as_csv(","), "not_json"),
        ("a.json", [{"text": "a"}] * 500, "no_prompt"),
        ("a.csv", b"text,label\n" + b"a,b\n" * 500, "no_prompt"),
        ("a.jsonl", lines(*[{"prompt": f"{n}"} for n in range(50)]), "no_answer"),
    ],
)
def test_a_file_of_the_wrong_kind_is_one_message(tmp_path: Path, name: str, content: object, kind: str) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(BadRows, match="none of the .* rows of .*; the first is ") as caught:
        part_of(path, RL)
    assert str(caught.value).count(f"[{kind}]") == 1
    assert len(str(caught.value).splitlines()) == 3


def test_a_long_line_and_rows_that_are_no_objects_are_bad_rows(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"prompt": "' + b"x" * (17 << 20) + b'"}\n{"prompt": "a"}\n')
    part = part_of(path, on_bad_row="skip")
    assert [row.place for row in part.rows] == [f"{path}:2"]
    assert [(bad.place, bad.kind) for bad in part.skipped] == [(f"{path}:1", "too_long")]
    path = written(tmp_path / "b.json", b'[1, "a", {"prompt": "a"}, {"a": 1, "a": 2}]')
    part = part_of(path, on_bad_row="skip")
    assert [bad.kind for bad in part.skipped] == ["not_object", "not_object", "duplicate_key"]


@pytest.mark.parametrize("content", [b"\n", b" ", b'{"prompt": "a"}\n', b"["])
def test_a_packed_bomb_is_refused_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(formats, "_GROWTH_FROM_BYTES", 256 << 10)
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=6) as file:
        for _ in range(128):
            file.write(content * ((1 << 20) // len(content)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="unpacks to more than 100 times its size|nested too deeply"):
        part_of(path)
    # 128 MiB unpacked; in KiB here.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


rows_of_json = st.dictionaries(
    st.sampled_from(["prompt", "answer", "x"]),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=4
    ),
)


@settings(max_examples=60 * int(os.environ.get("SPMDRL_FUZZ", "1")))
@given(st.lists(rows_of_json, max_size=8), st.integers(1, 40), st.sampled_from([None, 1]))
def test_an_array_reads_the_same_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]], size: int, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=False))
    whole, formats._CHUNK_BYTES = formats._CHUNK_BYTES, size
    try:
        assert [record.values for record in read_file("a", path) if isinstance(record, Record)] == rows
    finally:
        formats._CHUNK_BYTES = whole


@settings(max_examples=60 * int(os.environ.get("SPMDRL_FUZZ", "1")))
@given(
    st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.jsonl.gz"]),
    st.binary(max_size=80) | st.text('[]{}",:0x \n\\', max_size=60).map(str.encode),
    st.booleans(),
)
def test_random_files_give_rows_or_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes, is_packed: bool
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / name
    path.write_bytes(gzip.compress(content) if is_packed else content)
    try:
        read_rows(str(path), DataConfig(), needs=RL)
    except ValueError as error:
        assert str(error)


def test_parquet_with_content_parts_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "train.parquet"
    parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": [PARTS], "reward_model": {"ground_truth": "2"}}] * 3), path
    )
    part = part_of(tmp_path, RL)
    assert [(row.prompt, row.answer) for row in part.rows] == [([USER], "2")] * 3
    assert isinstance(next(read_file("x", path)), Record | BadRow)
    assert sys.modules["pyarrow"] is pyarrow
