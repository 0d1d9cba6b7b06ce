from __future__ import annotations

from collections.abc import Sequence

import pytest

from spmdrl.engines.generation.protocol import completes_stop_string
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from tests.engines.generation.support import make_engine, prompt_of, request, run, small_rollout, wake


def of_bytes(token_ids: Sequence[int]) -> str:
    """The text of tokens of which each is a byte."""
    return bytes(token_ids).decode(errors="replace")


def of_letters(token_ids: Sequence[int]) -> str:
    """The text of tokens of which each is a letter."""
    return "".join(chr(ord("A") + token) for token in token_ids)


def test_a_string_is_found_with_the_token_that_completes_it() -> None:
    text = "so 4 € it is".encode()
    completing = [
        count for count in range(1, len(text) + 1) if completes_stop_string(text[:count], ["xyz", "€"], of_bytes)
    ]
    # Three bytes are one character; later it is still in the window, but the row has ended.
    assert completing[0] == text.index(b"\x82\xac") + 2
    assert not completes_stop_string(text, ["4 it"], of_bytes)


def test_no_more_is_decoded_than_the_longest_string_can_take() -> None:
    decoded: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return of_bytes(token_ids)

    completes_stop_string([65] * 5000, ["END", "STOP"], decode)
    assert decoded == [12]


def test_a_stop_string_ends_the_row_and_belongs_to_it() -> None:
    sampling = SamplingParams(temperature=0, max_tokens=12)
    free = run(wake(make_engine(small_rollout())), [request(prompt_of(5), [0], sampling)])[0]
    stop = of_letters(free.token_ids[4:7])
    expected = free.token_ids[: of_letters(free.token_ids).index(stop) + 3]
    sampling = SamplingParams(temperature=0, max_tokens=len(expected), stop_strings=("never said", stop))
    engine = wake(make_engine(small_rollout(), decode=of_letters))
    stopped = run(engine, [request(prompt_of(5), [0], sampling)])[0]
    assert (stopped.token_ids, stopped.finish) == (expected, "stop")
    assert len(stopped.logprobs) == len(expected)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    engine = wake(make_engine(small_rollout()))
    with pytest.raises(ValueError, match=r"rows \[0, 1\] have stop strings \['x'\], but"):
        engine.submit([request(prompt_of(5), [0, 1], SamplingParams(max_tokens=4, stop_strings=("x",)))])
    assert not engine.num_unfinished


def test_the_config_hands_its_stop_strings_to_the_sampling() -> None:
    assert RolloutConfig(stop=("</answer>",)).sampling((2,)).stop_strings == ("</answer>",)
    with pytest.raises(ValueError, match="rollout.stop has an empty text"):
        RolloutConfig(stop=("a", ""))
    with pytest.raises(ValueError, match="but rollout.ignore_eos is true"):
        RolloutConfig(stop=("a",), ignore_eos=True)
