"""The reward `math` finds what is equivalent and, above all, nothing that isn't."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.engines.reward.rules.answer_pairs import BOXED, IN_SENTENCES, Pairs
from tests.engines.reward.rules.rewritten import references, rewritten

pytest.importorskip("math_verify", reason="needs pip install -e '.[math]'")

from spmdrl.engines.reward.formula import Undecided, is_right  # noqa: E402

MIN_SHARE_RIGHT = 0.97
CLASSES = {**BOXED, **IN_SENTENCES}


def response_of(name: str, answer: str) -> str:
    return rf"Thus \boxed{{{answer}}}." if name in BOXED else answer


def test_the_table_has_pairs_enough():
    assert sum(len(pairs.same) + len(pairs.different) for pairs in CLASSES.values()) >= 300
    assert len(CLASSES) >= 15


def test_nearly_all_equivalent_answers_are_found():
    pairs = [(name, *pair) for name, in_class in CLASSES.items() for pair in in_class.same]
    missed = [pair for pair in pairs if not is_right(response_of(*pair[:2]), pair[2])]
    assert len(missed) <= (1 - MIN_SHARE_RIGHT) * len(pairs), missed


@pytest.mark.parametrize(("name", "pairs"), CLASSES.items(), ids=CLASSES)
def test_no_other_answer_is_right(name: str, pairs: Pairs):
    assert [pair for pair in pairs.different if is_right(response_of(name, pair[0]), pair[1])] == []


def test_references_rewritten_five_ways_are_right():
    all_references = references()
    path = os.environ.get("SPMDRL_MATH500")
    if path:
        all_references = [json.loads(line)["answer"] for line in Path(path).read_text(encoding="utf-8").splitlines()]
    missed = [
        (way, response, reference)
        for reference in all_references
        for way, response in enumerate(rewritten(reference))
        if not is_right(response, reference)
    ]
    num_rewritten = 5 * len(all_references)
    print(f"{num_rewritten - len(missed)} of {num_rewritten} right; missed by way {Counter(way for way, *_ in missed)}")
    assert len(missed) <= (1 - MIN_SHARE_RIGHT) * num_rewritten, missed


def test_answers_of_other_problems_are_wrong():
    all_references = references()
    others = all_references[1:] + all_references[:1]
    wrong = [(a, b) for a, b in zip(others, all_references, strict=True) if is_right(rf"\boxed{{{a}}}", b)]
    assert wrong == []


@pytest.mark.parametrize("answer", ["9^{9^{9}}", "3^{100000000}"])
def test_a_formula_without_end_is_undecided_in_seconds_of_cpu(answer):
    start = time.process_time()
    with pytest.raises(Undecided):
        is_right(rf"\boxed{{{answer}}}", "3")
    assert time.process_time() - start < 6
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_thread_other_than_the_main_one_decides_without_a_limit():
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(is_right("$2*3$", "6")))
    thread.start()
    thread.join()
    assert results == [True]


def test_a_long_text_is_read_quickly():
    start = time.process_time()
    for text in ("\\boxed{" * 500 + "1," * 20_000, "$" * 20_000, "answer " * 5_000, "1," * 20_000 + "$x$ and " * 2_000):
        assert not is_right(text, "18")
    assert time.process_time() - start < 5
