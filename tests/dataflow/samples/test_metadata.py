"""News survive packing, in little room, and words that nobody packed are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.control.row_news import (
    RowDrop,
    RowMetadata,
    Stored,
    announced_lengths,
    joined,
    pack_integers,
    pack_news,
    unpack_news,
)
from spmdrl.dataflow.samples.schema import RULES, columns_mask
from spmdrl.dataflow.samples.store.shared_memory import Place

NUM_ROWS = 300
sizes = st.integers(0, 2**31 - 1)


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
    kind = draw(st.sampled_from([RowMetadata, RowDrop, Stored]))
    if kind is RowDrop:
        return RowDrop(rows, draw(st.text(max_size=20)))
    seed = np.random.default_rng(draw(st.integers(0, 2**16)))
    columns = draw(st.integers(0, 2 ** len(RULES) - 1))
    if kind is Stored:
        place = Place(draw(st.integers(0, 63)), draw(st.integers(0, 2**50)), draw(sizes))
        return Stored(rows, columns, place, draw(st.sampled_from([None, seed.integers(0, 99, rows.size)])))
    spread = 10 ** seed.integers(0, 9)
    lengths = {name: seed.integers(0, spread, rows.size) for name in announced_lengths(columns)}
    return RowMetadata(rows, seed.integers(0, draw(st.sampled_from([1, 500])), rows.size), columns, lengths)


def content(entry) -> dict:
    shown = {}
    for name, value in vars(entry).items():
        value = {key: lengths.tolist() for key, lengths in value.items()} if isinstance(value, dict) else value
        shown[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return shown


@given(st.lists(entries(), max_size=5))
def test_news_survive_packing(sent):
    received = unpack_news(pack_news(sent), NUM_ROWS)
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
                    out.append(("metadata", entry.columns, row, int(entry.homes[at]), str(lengths)))
                elif isinstance(entry, RowDrop):
                    out.append(("drop", entry.reason, row))
        return sorted(set(out))

    merged = joined(sent)
    assert said(merged) == said(sent)
    drops = [entry.rows.tolist() for entry in merged if isinstance(entry, RowDrop)]
    assert all(len(set(rows)) == len(rows) for rows in drops)
    masks = [entry.columns for entry in merged if isinstance(entry, RowMetadata)]
    assert len(masks) == len(set(masks))


@pytest.mark.parametrize(
    ("values", "num_words"),
    [
        ([], 1),
        ([7] * 1000, 1),
        (range(2**30, 2**30 + 1000), 2),
        ([8 * group + member for group in range(0, 100, 2) for member in range(8)], 51),
        (range(0, 8 * 256, 8), 1 + 256 * 2 // 8),
        (range(5, 5 + 2 * 80, 2), 1 + 80 // 8),
        ([0, 70_000] * 100, 1 + 200 * 4 // 8),
        ([0, 2**40] * 100, 1 + 200),
    ],
)
def test_integers_take_as_little_room_as_their_spread_allows(values, num_words):
    assert pack_integers(integers(values)).size == num_words


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40))
@example([1 | 2**54 << 8, 4095])
@example([1 | 9 << 8, 0, 9 | 1 << 8, 5 << 32 | 9, 0])
def test_any_words_are_read_or_refused(words):
    try:
        news = unpack_news(integers(words), NUM_ROWS)
    except ValueError:
        return
    assert sum(entry.rows.size for entry in news) <= NUM_ROWS * len(words)


@given(st.lists(entries(), min_size=1, max_size=3), st.data())
def test_damaged_words_are_read_or_refused(sent, data):
    packed = pack_news(sent)
    at = data.draw(st.integers(0, packed.size - 1))
    packed[at] ^= 1 << data.draw(st.integers(0, 62))
    try:
        news = unpack_news(packed[: data.draw(st.integers(0, packed.size))], NUM_ROWS)
    except ValueError:
        return
    assert sum(entry.rows.size for entry in news) <= NUM_ROWS * packed.size


def test_words_that_are_never_written_are_refused():
    rows = np.arange(4)
    whole = pack_news([RowMetadata(rows, np.zeros_like(rows), columns_mask(["reward"]), {})])
    with pytest.raises(ValueError, match="ends at word 4, but 1 are due"):
        unpack_news(whole[:-1], NUM_ROWS)
    with pytest.raises(ValueError, match="unknown kind 77"):
        unpack_news(integers([77]), NUM_ROWS)
    with pytest.raises(ValueError, match="announces 4 rows at once"):
        unpack_news(whole, 3)
    with pytest.raises(ValueError, match="names columns 0x800000"):
        unpack_news(integers([whole[0], 1 << 23]), NUM_ROWS)
    with pytest.raises(ValueError, match="reason of 1000000 bytes"):
        unpack_news(integers([2 | 4 << 8, 10**6, *pack_integers(rows)]), NUM_ROWS)


def test_few_words_never_become_many_rows():
    rows = np.arange(NUM_ROWS)
    one = pack_news([RowDrop(rows, "x")])
    with pytest.raises(ValueError, match="too often"):
        unpack_news(np.tile(one, 1000), NUM_ROWS)
