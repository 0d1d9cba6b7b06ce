from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.schema import RULES, length_column, rule_of
from spmdrl.dataflow.samples.store.frame import FrameError, OutgoingFrame, frame_bytes, pack, read_frame
from spmdrl.nouns.batch import Batch, offsets_of

INT64_MAX = 2**63 - 1
HEADER_WORDS = 3
NAMES = [rule.name for rule in RULES]


def make_batch(names: list[str], lengths: list[int], seed: int = 0) -> Batch:
    """Random bits in the named columns; ragged ones have `lengths`, but prompts and rewards' parts one more a row."""
    random = np.random.default_rng(seed)
    batch = Batch(torch.from_numpy(random.integers(0, 2**40, len(lengths))))
    for name in names:
        column = rule_of(name).column
        if not column.ragged:
            batch.put_dense(name, random_values(random, len(lengths), column.dtype))
            continue
        own = [length + (length_column(name) == name != "response_ids") for length in lengths]
        batch.put_ragged(name, random_values(random, sum(own), column.dtype), offsets_of(own))
    return batch


def random_values(random: np.random.Generator, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.bytes((count + 1) * dtype.itemsize)), dtype=dtype)[:count]


batches = st.builds(
    make_batch,
    st.lists(st.sampled_from(NAMES), unique=True),
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(0, 2**32),
)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def assert_equal(read: Batch, written: Batch) -> None:
    assert read.names == written.names
    assert torch.equal(read.rows, written.rows)
    for name in written.names:
        assert read.is_ragged(name) == written.is_ragged(name)
        if written.is_ragged(name):
            assert torch.equal(read.offsets(name), written.offsets(name))
            assert bits(read.values(name)) == bits(written.values(name))
        else:
            assert bits(read.dense(name)) == bits(written.dense(name))


@given(batches)
def test_a_batch_survives_a_round_trip_bit_for_bit(batch):
    assert_equal(read_frame(pack(batch)), batch)


@given(batches)
def test_metadata_alone_tells_the_size_of_a_frame(batch):
    num_values = {name: int(batch.lengths(name).sum()) if batch.is_ragged(name) else len(batch) for name in batch.names}
    assert frame_bytes(len(batch), num_values) == OutgoingFrame(batch).num_bytes == pack(batch).numel()


def test_what_is_read_shows_the_frame_itself_at_aligned_places():
    frame = pack(make_batch(NAMES, [3, 0, 5]))
    read = read_frame(frame)
    parts = [read.rows, *(read.values(name) if read.is_ragged(name) else read.dense(name) for name in read.names)]
    parts += [read.offsets(name) for name in read.names if read.is_ragged(name)]
    for part in parts:
        start = part.data_ptr() - frame.data_ptr()
        assert 0 <= start <= frame.numel() - part.nbytes and start % 64 == 0
    read.values("response_ids")[0] = 7
    assert read_frame(frame).values("response_ids")[0] == 7


def test_columns_with_the_same_lengths_share_one_offsets_array():
    read = read_frame(pack(make_batch(["prompt_ids", "response_ids", "old_logprobs"], [3, 0, 5])))
    assert read.offsets("old_logprobs") is read.offsets("response_ids")
    assert read.offsets("prompt_ids").data_ptr() != read.offsets("response_ids").data_ptr()


def test_strided_columns_are_written_as_they_read():
    batch = make_batch(["reward"], [1, 1, 1, 1])
    strided = Batch(batch.rows[::2])
    strided.put_dense("reward", torch.arange(4, dtype=torch.float32)[::2])
    assert_equal(read_frame(pack(strided)), strided)


def test_a_frame_refuses_what_breaks_the_schema():
    batch = make_batch(["response_ids"], [2, 1])
    batch.put_ragged("old_logprobs", torch.zeros(3), torch.tensor([0, 1, 3]))
    with pytest.raises(ValueError, match="'old_logprobs' has other row lengths .* those of 'response_ids'"):
        pack(batch)
    wrong_dtype = Batch.of_rows([0])
    wrong_dtype.put_dense("reward", torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="schema says dense torch.float32"):
        pack(wrong_dtype)
    short = Batch.of_rows([0])
    short.put_ragged("response_ids", torch.zeros(3, dtype=rule_of("response_ids").column.dtype), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="end at 2, but it has 3 values"):
        pack(short)


def test_a_frame_is_written_into_memory_of_exactly_its_size():
    batch = make_batch(["reward"], [1])
    frame = OutgoingFrame(batch)
    with pytest.raises(ValueError, match=f"a frame of {frame.num_bytes} bytes doesn't fit"):
        frame.write(torch.empty(frame.num_bytes + 64, dtype=torch.uint8))


def damaged(position: int, value: int) -> torch.Tensor:
    """A frame of 2 rows with prompts and rewards, one of its words replaced."""
    frame = pack(make_batch(["prompt_ids", "reward"], [2, 1]))
    frame.view(torch.int64)[position] = value
    return frame


ROWS, OFFSETS = 8, 16
"""words of `damaged`'s frame where the rows and the offsets begin"""


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, 1, "same version"),
        (1, -1, "don't hold the -1 rows"),
        (1, 2**61, "announces"),
        (1, INT64_MAX, "announces"),
        (2, -1, "of -1 columns"),
        (2, INT64_MAX, "columns that they announce"),
        (2, 1, "announces"),
        (5, NAMES.index("prompt_ids"), "must ascend"),
        (3, -1, "must ascend"),
        (3, len(RULES), "must ascend"),
        (4, -5, "announces -5 values"),
        (4, 6, "end at 5, but it has 6"),
        (4, INT64_MAX, "announces"),
        (6, 3, "'reward' announces 3 values in 2 rows"),
        (ROWS + 1, -1, "row -1"),
        (OFFSETS, 1, "begin with 0"),
        (OFFSETS + 1, 6, "never fall"),
        (OFFSETS + 1, -3, "never fall"),
        (OFFSETS + 2, INT64_MAX, "end at"),
    ],
)
def test_a_wrong_word_is_named(position, value, message):
    with pytest.raises(FrameError, match=message):
        read_frame(damaged(position, value))


def test_offsets_whose_differences_overflow_are_refused():
    frame = pack(make_batch(["prompt_ids"], [2, 1, 0]))
    # Seen as differences: 2^63 - 1, then 2^63 - 1 again by overflow, then 7.
    frame.view(torch.int64)[OFFSETS : OFFSETS + 4] = torch.tensor([0, INT64_MAX, -2, 6])
    with pytest.raises(FrameError, match="never fall"):
        read_frame(frame)


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(63, dtype=torch.uint8),
        torch.zeros(64, dtype=torch.uint8),
        torch.zeros(129, dtype=torch.uint8)[1:],
        torch.zeros(128, dtype=torch.uint8)[::2],
        torch.zeros(8, 64, dtype=torch.uint8),
        torch.zeros(64, dtype=torch.int64),
        torch.zeros(64, dtype=torch.uint8, device="meta"),
    ],
)
def test_memory_that_holds_no_frame_is_refused(memory):
    with pytest.raises(FrameError):
        read_frame(memory)


HUGE = np.array([-1, -(2**63), INT64_MAX, 2**62, 2**61, 2**32, 2**31, 2**20, 1, 0], dtype=np.int64)


@pytest.mark.parametrize("num_mutants", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_damaged_frames_give_an_error_or_a_valid_batch(num_mutants):
    random = np.random.default_rng(4)
    sources = [
        pack(make_batch(names, [int(length) for length in random.integers(0, 4, rows)], seed=rows)).numpy()
        for names in (["prompt_ids", "reward"], ["response_ids", "old_logprobs"], ["reward"], NAMES[:3], [])
        for rows in (0, 1, 3)
    ]
    picks = random.integers(0, [len(sources), 5, 2**31, 2**31], (num_mutants, 4)).tolist()
    num_valid, before = 0, status_bytes("VmRSS")
    with limited_memory(256 << 20):
        for source, *choice in picks:
            try:
                batch = read_frame(torch.from_numpy(mutant(sources[source], *choice)))
            except FrameError:
                continue
            assert_valid(batch)
            num_valid += 1
    assert 0 < num_valid < num_mutants
    assert status_bytes("VmRSS") < before + (32 << 20)


def mutant(source: np.ndarray, kind: int, first: int, second: int) -> np.ndarray:
    """The frame with a flipped bit, a huge or small word, two words swapped, or its end cut off or repeated."""
    if kind == 3:
        return source[: first % source.size].copy()
    frame = np.concatenate([source, source[: 64 * (1 + first % 2)]]) if kind == 4 else source.copy()
    words = frame[: frame.size // 8 * 8].view(np.int64)
    # Half of all damage goes into the header, which decides most.
    one, other = first % min(words.size, HEADER_WORDS + 8 if second % 2 else words.size), second % words.size
    if kind == 0:
        frame[8 * one + first % 8] ^= 1 << second % 8
    elif kind == 1:
        words[one] = HUGE[other % HUGE.size]
    else:
        words[one], words[other] = words[other], words[one]
    return frame


def assert_valid(batch: Batch) -> None:
    assert (batch.rows >= 0).all()
    for name in batch.names:
        if batch.is_ragged(name):
            bounds = batch.offsets(name).numpy()
            assert bounds[0] == 0 and bounds[-1] == batch.values(name).numel() and (bounds[1:] >= bounds[:-1]).all()
            assert bounds.size == len(batch) + 1
        else:
            assert batch.dense(name).numel() == len(batch)


class limited_memory:
    """Makes any allocation fail by which this process would grow beyond `extra_bytes`."""

    def __init__(self, extra_bytes: int):
        self.extra_bytes = extra_bytes

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + self.extra_bytes, self.before[1]))

    def __exit__(self, *_) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self.before)


def status_bytes(name: str) -> int:
    """One of the sizes that the kernel reports of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
