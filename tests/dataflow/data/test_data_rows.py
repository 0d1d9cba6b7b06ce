"""Data rows are found under the names that users have, and every bad row is named by file and line."""

import json
import os

import duckdb
import pytest

from spmdrl.dataflow.data.data_rows import RowNeeds, read_rows
from spmdrl.dataflow.data.records import BadRows
from spmdrl.nouns.settings.data_config import DataConfig, data_sources


def written(tmp_path, *lines, name="data.jsonl"):
    path = tmp_path / name
    texts = [line if isinstance(line, (str, bytes)) else json.dumps(line) for line in lines]
    path.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in texts) + b"\n")
    return str(path)


def rows_of(path, *, needs_answer=True, **settings):
    (part,) = read_rows(path, DataConfig(**settings), needs=RowNeeds(answer=needs_answer))
    return part


GOOD = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("line", "kind", "problem"),
    [
        ('{"prompt": "a", ', "not_json", "JSONL has one object per line"),
        ('["a", "b"]', "not_object", "a list"),
        ({"text": "a", "answer": "1"}, "no_prompt", "its columns are text, answer: set data.prompt_key"),
        ({"prompt": 5, "answer": "1"}, "prompt_type", "'prompt' is a int"),
        ({"prompt": " ", "answer": "1"}, "empty_prompt", "'prompt' is empty"),
        ({"prompt": [], "answer": "1"}, "empty_prompt", "empty list"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "bad_message", r"'prompt\[0\]'"),
        ({"prompt": ["hi"], "answer": "1"}, "bad_message", r"'prompt\[0\]'"),
        ({"prompt": "a"}, "no_answer", "need one"),
        ({"prompt": "a", "answer": None}, "no_answer", "need one"),
        ({"prompt": "a", "answer": ["1"]}, "answer_type", "'answer' is a list"),
        ({"prompt": "a", "answer": ""}, "empty_answer", "'answer' is empty"),
        ({"prompt": "a", "answer": "1", "id": [1]}, "id_type", "'id' is a list"),
        ({"prompt": "a", "answer": "1", "id": 7}, "duplicate_id", "id '7' stands at .*:1 already"),
        (b'{"prompt": "\xff", "answer": "1"}', "invalid_utf8", "byte 0xff"),
        ('{"prompt": "a", "answer": "1", "level": {"x": [1, -Infinity]}}', "not_finite", r"'level.x\[1\]' is -inf"),
        ('{"prompt": "a", "answer": NaN}', "no_answer", "need one"),
        ('{"prompt": "a", "answer": "1", "level": 1e999}', "not_finite", "'level' is inf"),
        ('{"prompt": "a", "prompt": "b", "answer": "1"}', "duplicate_key", "'prompt' stands twice"),
        ('{"prompt": "\\ud800", "answer": "1"}', "broken_text", "surrogate"),
        ("[" * 100_000, "not_json", "nested too deeply"),
        ('{"a": ' * 900 + "1" + "}" * 900, "too_deep", "more than 64 levels inside each other"),
        ('{"prompt": "a", "answer": ' + "1" * 5000 + "}", "not_json", "4300"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "not_text", "of type 'image', but only texts"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_kind(tmp_path, line, kind, problem):
    path = written(tmp_path, {**GOOD, "id": 7}, "", line, GOOD)
    with pytest.raises(BadRows, match=problem) as caught:
        rows_of(path)
    (bad,) = caught.value.rows
    assert bad.place.startswith(f"{path}:3")
    assert bad.kind == kind
    skipping = rows_of(path, on_bad_row="skip")
    assert [row.id for row in skipping.rows] == ["7", f"{path}:4"]
    assert skipping.skipped == (bad,)
    assert "1 bad rows skipped" in skipping.summary


def test_bad_rows_are_shown_by_their_reasons_with_the_first_few_places(tmp_path):
    empty, twice = {"prompt": "", "answer": "2"}, {"id": 1, **GOOD}
    path = written(tmp_path, GOOD, *[empty] * 20, *[{"id": n, **GOOD} for n in (1, 2)], twice, {"id": 2, **GOOD})
    with pytest.raises(BadRows, match="22 of 25 rows") as caught:
        rows_of(path)
    assert len(caught.value.rows) == 22
    lines = str(caught.value).splitlines()[1:-1]
    assert len(lines) == 2, lines
    assert lines[0].startswith(f"  20 rows alike: {path}:2: 'prompt' is empty [empty_prompt]")
    assert lines[0].endswith("(also data.jsonl:3, data.jsonl:4, data.jsonl:5, ...)")
    # Each of these names another id and another line.
    assert lines[1].startswith(f"  2 rows alike: {path}:24: id '1'") and lines[1].endswith("(also data.jsonl:25)")


def test_no_more_than_twenty_reasons_are_shown(tmp_path):
    rows = [{f"{'x' * (number + 1)}": 1} for number in range(25)]
    with pytest.raises(BadRows, match=r"25 of 26 rows(.|\n)*and 5 more reasons") as caught:
        rows_of(written(tmp_path, GOOD, *rows))
    assert str(caught.value).count("[no_prompt]") == 20


def test_what_is_no_file_is_named_as_what_it_is_and_nothing_waits_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    (tmp_path / "folder" / "rows.jsonl").mkdir(parents=True)
    os.mkfifo(tmp_path / "folder" / "more.jsonl")
    said = {
        "/dev/null": "data file /dev/null is a device file",
        f"{tmp_path}/pipe.jsonl": "pipe.jsonl is a pipe",
        f"{tmp_path}/link.jsonl": "link.jsonl is a link to gone.jsonl, which isn't there",
        f"{tmp_path}/folder": "more.jsonl is a pipe",
    }
    for path, words in said.items():
        with pytest.raises(ValueError, match=words) as refusal:
            rows_of(path)
        assert "did you mean" not in str(refusal.value)


@pytest.mark.parametrize("prompt_key", ["prompt", "question", "problem", "input"])
@pytest.mark.parametrize("answer_key", ["answer", "ground_truth", "solution", "label", "reward_model.ground_truth"])
def test_prompts_and_answers_are_found_under_the_names_in_use(tmp_path, prompt_key, answer_key):
    outer, _, inner = answer_key.partition(".")
    values = {prompt_key: "1+1=", outer: {inner: "2"} if inner else "2", "level": 3}
    part = rows_of(written(tmp_path, values))
    assert (part.rows[0].prompt, part.rows[0].answer) == ("1+1=", "2")
    assert part.rows[0].columns == {**{k: v for k, v in values.items() if k != prompt_key}, "answer": "2"}
    assert part.summary.endswith(f"1 rows, prompt in '{prompt_key}', answer in '{answer_key}'")


def test_keys_can_be_named_and_messages_are_kept(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = written(tmp_path, {"chat": messages, "meta": {"gold": 4}, "prompt": "no", "answer": "no"})
    row = rows_of(path, prompt_key="chat", answer_key="meta.gold").rows[0]
    assert (row.prompt, row.answer, row.columns["answer"]) == (messages, "4", 4)


def test_a_row_needs_no_answer_where_no_rule_needs_one(tmp_path):
    rows = rows_of(written(tmp_path, {"prompt": "a"}, {"prompt": "b", "answer": {"any": 1}}), needs_answer=False).rows
    assert rows[0].answer is None
    assert rows[1].columns["answer"] == {"any": 1}


def test_windows_line_ends_and_a_byte_order_mark_are_no_error(tmp_path):
    path = written(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r", b"  \r")
    assert [row.prompt for row in rows_of(path).rows] == ["1+1="]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dat.jsonl", "did you mean .*data.jsonl"),
        ("", "folder of several kinds of files: b.csv, data.jsonl; name one, or a pattern"),
        ("a.txt", r"its name must end in .jsonl, .json, .csv"),
        ("*.parquet", "no file matches"),
    ],
)
def test_a_path_that_is_no_data_file_is_refused_with_a_way_out(tmp_path, name, message):
    written(tmp_path, GOOD)
    written(tmp_path, GOOD, name="a.txt")
    written(tmp_path, GOOD, name="b.csv")
    with pytest.raises(ValueError, match=message):
        rows_of(str(tmp_path / name))


def test_sources_are_paths_lists_and_weighted_paths(tmp_path):
    assert [(s.path, s.weight) for s in data_sources("a")] == [("a", None)]
    assert [(s.path, s.weight) for s in data_sources([{"path": "a", "weight": 2}, {"path": "b", "weight": 0.5}])] == [
        ("a", 2.0),
        ("b", 0.5),
    ]
    paths = [written(tmp_path, GOOD), "synthetic://addition?count=5"]
    parts = read_rows(paths, DataConfig(), needs=RowNeeds(answer=True))
    assert [len(part.rows) for part in parts] == [1, 5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": 5}, "data.train holds 5"),
        ({"eval": {"file": "a"}}, "data.eval holds"),
        ({"train": {"path": "a", "weight": 0}}, "weight of a is 0"),
        ({"train": ["a", {"path": "b", "weight": 1}]}, r"not to \['a'\]"),
        ({"train": ["a", "a"]}, "twice"),
    ],
)
def test_a_config_value_that_cannot_be_is_refused_by_its_key(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"data.train is not set"):
        rows_of(None)
    with pytest.raises(ValueError, match="no usable row; 1 were skipped"):
        rows_of(written(tmp_path, "{"), on_bad_row="skip")


MESSAGES = [{"role": "user", "content": "1+1="}]
PARQUET_ROWS = [
    {"prompt": MESSAGES, "reward_model": {"ground_truth": "2", "style": None}, "x": 1.0, "tags": ["a", "b"]},
    {"prompt": MESSAGES, "x": float("nan")},
]


def check_parquet_rows(path):
    part = rows_of(str(path), on_bad_row="skip")
    assert [(row.prompt, row.answer, row.columns["x"]) for row in part.rows] == [(MESSAGES, "2", 1.0)]
    assert part.rows[0].columns["tags"] == ["a", "b"] and "split" not in part.rows[0].columns
    assert [(bad.place, bad.kind) for bad in part.skipped] == [(f"{path}:2", "no_answer")]


def test_parquet_rows_are_read_like_jsonl(tmp_path):
    lines = written(tmp_path, *PARQUET_ROWS)
    # Names that would be a pattern, and a folder that would be a column.
    path = tmp_path / "split=train" / "data[1]*.parquet"
    path.parent.mkdir()
    duckdb.sql(f"copy (select * from read_json('{lines}')) to '{path}' (format parquet)")
    check_parquet_rows(path)
    num_rows = 3000
    duckdb.sql(f"copy (select cast(range as text) as prompt from range({num_rows})) to '{path}' (row_group_size 1000)")
    rows = rows_of(str(path), needs_answer=False).rows
    assert [row.prompt for row in rows] == [str(number) for number in range(num_rows)]
    assert rows[-1].place == f"{path}:{num_rows}"


def test_parquet_by_arrow_is_read_with_each_of_its_types(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(PARQUET_ROWS), path)
    check_parquet_rows(path)
    columns = {
        "prompt": pyarrow.array(["a", "b"], pyarrow.large_string()),
        "label": pyarrow.array(["1", "2"]).dictionary_encode(),
        "none": pyarrow.nulls(2),
        "level": pyarrow.array([1, None], pyarrow.int8()),
        "big": pyarrow.array([2**64 - 1, 0], pyarrow.uint64()),
        "scores": pyarrow.array([[0.5, 1.0], []], pyarrow.list_(pyarrow.float32())),
        "image": pyarrow.array([{"bytes": b"x", "path": None}, None]),
        "calls": pyarrow.array([[{"name": "f", "arguments": {"x": 1}}], None]),
    }
    parquet.write_table(pyarrow.table(columns), path)
    rows = rows_of(str(path)).rows
    expected = [{**row, "answer": row["label"]} for row in pyarrow.table(columns).to_pylist()]
    assert [{"prompt": row.prompt, **row.columns} for row in rows] == expected


def test_nan_is_a_missing_value_wherever_it_stands(tmp_path):
    line = '{"prompt": "a", "answer": "1", "level": NaN, "deep": {"x": [1, NaN, 2.5]}}'
    (row,) = rows_of(written(tmp_path, line)).rows
    assert row.columns == {"answer": "1", "level": None, "deep": {"x": [1, None, 2.5]}}


@pytest.mark.real_data
def test_the_whole_of_gsm8k_is_read():
    path = os.environ.get("SPMDRL_GSM8K")
    if not path:
        pytest.skip("SPMDRL_GSM8K names no GSM8K file")
    part = rows_of(path)
    with open(path, "rb") as lines:
        assert len(part.rows) == sum(1 for _ in lines)
    assert part.summary.endswith(f"{len(part.rows)} rows, prompt in 'question', answer in 'answer'")
