"""News survive packing, in little room, and other bytes are refused."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.catalogue import RowDrop, RowMetadata, announced_lengths, joined, pack_news, unpack_news
from spmdrl.dataflow.samples.schema import RULES, columns_mask

NUM_ROWS = 300


def integers(values) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)


@st.composite
def row_numbers(draw) -> np.ndarray:
    """Rows as they occur: one range, or runs of a group each, or any."""
    if draw(st.booleans()):
        first = draw(st.integers(0, NUM_ROWS - 1))
        return np.arange(first, draw(st.integers(first, NUM_ROWS)))
    if draw(st.booleans()):
        groups = draw(st.lists(st.integers(0, NUM_ROWS // 8 - 1), unique=True))
        return integers(group * 8 + member for group in groups for member in range(8))
    return integers(draw(st.lists(st.integers(0, NUM_ROWS - 1), unique=True)))


@st.composite
def entries(draw):
    rows = draw(row_numbers())
    if draw(st.booleans()):
        return RowDrop(rows, draw(st.text(max_size=20)))
    seed = np.random.default_rng(draw(st.integers(0, 2**16)))
    columns = draw(st.integers(0, 2 ** len(RULES) - 1))
    lengths = {name: seed.integers(0, 10 ** seed.integers(1, 9), rows.size) for name in announced_lengths(columns)}
    num_frames = draw(st.integers(0, min(3, rows.size)))
    places = seed.integers(0, 2**50, (num_frames, 4))
    places[:, 3] = [len(part) for part in np.array_split(rows, num_frames)] if num_frames else []
    return RowMetadata(rows, columns, lengths, places)


def content(entry) -> dict:
    shown = {}
    for name, value in vars(entry).items():
        value = {key: lengths.tolist() for key, lengths in value.items()} if isinstance(value, dict) else value
        shown[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return shown


@given(st.lists(entries(), max_size=5))
def test_news_survive_packing(sent):
    received = unpack_news(pack_news(sent))
    assert [type(entry) for entry in received] == [type(entry) for entry in sent]
    assert [content(entry) for entry in received] == [content(entry) for entry in sent]


@given(st.lists(entries(), max_size=6))
@example([RowDrop(integers([1, 2]), "no reward"), RowDrop(integers([2, 3]), "no reward")])
def test_joined_news_say_the_same_of_every_row(sent):
    def said(news) -> list:
        out = []
        for entry in news:
            for at, row in enumerate(entry.rows.tolist()):
                if isinstance(entry, RowMetadata):
                    lengths = {name: int(values[at]) for name, values in entry.lengths.items()}
                    out.append(("metadata", entry.columns, row, str(lengths)))
                elif isinstance(entry, RowDrop):
                    out.append(("drop", entry.reason, row))
        return sorted(set(out))

    merged = joined(sent)
    assert said(merged) == said(sent)
    drops = [entry.rows.tolist() for entry in merged if isinstance(entry, RowDrop)]
    assert all(len(set(rows)) == len(rows) for rows in drops)
    places = [entry.places.tolist() for entry in merged if isinstance(entry, RowMetadata)]
    frames = [place for entry in sent if isinstance(entry, RowMetadata) for place in entry.places.tolist()]
    assert sorted(place for some in places for place in some) == sorted(frames)
    masks = [entry.columns for entry in merged if isinstance(entry, RowMetadata)]
    assert len(masks) == len(set(masks))


def test_a_row_takes_a_few_bytes():
    random = np.random.default_rng(0)
    rows, columns = np.sort(random.choice(4096, 512, replace=False)), columns_mask(["response_ids"])
    lengths = {"response_ids": random.lognormal(6.5, 0.8, rows.size).astype(np.int64)}
    assert len(pack_news([RowMetadata(rows, columns_mask(["reward"]), {})])) < 2 * rows.size
    assert len(pack_news([RowMetadata(rows, columns, lengths)])) < 4.5 * rows.size
    assert len(pack_news([RowDrop(np.arange(1 << 20), "late")])) < 1 << 16


@given(st.lists(entries(), min_size=1, max_size=3), st.data())
def test_damaged_bytes_are_refused_or_say_the_same(sent, data):
    packed = bytearray(pack_news(sent))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        # A few bits of a zlib stream mean nothing.
        assert [content(entry) for entry in unpack_news(bytes(packed))] == [content(entry) for entry in sent]
    except ValueError as error:
        assert "same version on all ranks" in str(error)
    with pytest.raises(ValueError, match="same version on all ranks"):
        unpack_news(pack_news(sent)[:-1])


@pytest.mark.parametrize(
    "content",
    [b"", b"no news", zlib.compress(b'[["late", 2]]\n' + bytes(7)), zlib.compress(b"[[8388608, 0, 0]]\n")],
)
def test_bytes_that_are_never_written_are_refused(content):
    with pytest.raises(ValueError, match="are no news of rows"):
        unpack_news(content)
