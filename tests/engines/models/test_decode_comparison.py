"""Tokens become text again as with transformers itself, and stop strings end it, over tokenizers of every kind."""

from __future__ import annotations

import functools
import random
import unicodedata
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from spmdrl.engines.generation.protocol import completes_stop_string
from spmdrl.engines.models.tokenizer import ModelTokenizer
from tests.support.tokenizer_zoo import ZOO

_PIECES = (
    "The answer is 42.", " ", "  ", "\n", "é", "中文", "😀", "it 's", "n't !", "<answer>", "</answer>", "helpful",
    "x" * 30,
    '{"a": 1}', "שלום", "0", "assistant", " , ", "\t",
)  # fmt: skip


@functools.cache
def _tokenizer(specimen: int) -> ModelTokenizer:
    with TemporaryDirectory() as folder:
        return ModelTokenizer(ZOO[specimen].make(Path(folder)))


def _answer(specimen: int, rng: random.Random) -> tuple[list[int], list[int], str]:
    """Tokens of a prompt in the template, of an answer behind it, and the answer's text."""
    tokenizer = _tokenizer(specimen)
    text = "".join(rng.choices(_PIECES, k=rng.randint(1, 8)))
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    prompt = tokenizer.raw.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
    return prompt_ids, ids, text


def _compare(specimen: int, seed: int) -> bool:
    """Compare one random answer; returns False where its first token would span the prompt's end."""
    tokenizer, rng = _tokenizer(specimen), random.Random(seed)
    prompt_ids, ids, text = _answer(specimen, rng)
    if ids[: len(prompt_ids)] != prompt_ids:
        return False
    case = f"{ZOO[specimen].name}, seed {seed}: {text!r}"
    whole, prompt = (
        tokenizer.raw.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for part in (ids, prompt_ids)
    )
    found = tokenizer.decode(ids[len(prompt_ids) :])
    assert whole.startswith(prompt), case
    assert found == whole[len(prompt) :], case
    if ZOO[specimen].is_lossless and unicodedata.is_normalized("NFC", text):
        assert found == text, case
    return True


def test_what_is_written_behind_a_prompt_is_read_as_transformers_reads_the_whole() -> None:
    compared = [_compare(seed % len(ZOO), seed) for seed in range(1500)]
    assert sum(compared) > 0.8 * len(compared)


@pytest.mark.parametrize("specimen", range(len(ZOO)), ids=lambda number: ZOO[number].name)
def test_a_stop_string_is_found_with_the_token_that_completes_it(specimen: int) -> None:
    tokenizer = _tokenizer(specimen)
    for seed in range(20):
        rng = random.Random(seed)
        prompt_ids, ids, text = _answer(specimen, rng)
        answer_ids = ids[len(prompt_ids) :]
        start = rng.randrange(len(text))
        stop = text[start : start + rng.randint(1, 6)]
        ends = [stop in tokenizer.decode_all(answer_ids[:number]) for number in range(len(answer_ids) + 1)]
        for number in range(1, ends.index(True) + 1 if True in ends else len(ends)):
            found = completes_stop_string(answer_ids[:number], [stop], tokenizer.decode_all)
            assert found == ends[number], (ZOO[specimen].name, seed, text, stop, number)


def test_a_special_token_is_a_stop_string() -> None:
    for number, specimen in enumerate(ZOO):
        tokenizer = _tokenizer(number)
        mark = str(getattr(specimen.added[0], "content", specimen.added[0]))
        ids = [*tokenizer.encode("The answer is 42."), tokenizer.raw.convert_tokens_to_ids(mark)]
        assert completes_stop_string(ids, [mark], tokenizer.decode_all), specimen.name
        assert not completes_stop_string(ids[:-1], [mark], tokenizer.decode_all), specimen.name
