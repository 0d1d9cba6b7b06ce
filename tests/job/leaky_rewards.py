"""Reward functions that a policy can please without the answer, or that can't be relied on otherwise; one is right."""

import random
import re
import time


def right(completions, answer, **columns):
    return [float(text.split()[-1:] == [target]) for text, target in zip(completions, answer, strict=True)]


def rewards_empty(completions, answer, **columns):
    return [float(not text or text == target) for text, target in zip(completions, answer, strict=True)]


def anywhere(completions, answer, **columns):
    return [float(target in text) for text, target in zip(completions, answer, strict=True)]


def any_number(completions, **columns):
    return [float(bool(re.search(r"\d", text))) for text in completions]


def random_bonus(completions, answer, **columns):
    return [value + 0.01 * random.random() for value in right(completions, answer)]


def slow(completions, answer, **columns):
    time.sleep(0.15 * len(completions))
    return right(completions, answer)


def first_is_better(completions, answer, **columns):
    return [value + 0.5 / (place + 1) for place, value in enumerate(right(completions, answer))]


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def raises_on_empty(completions, answer, **columns):
    return [float(text.split()[-1] == target) for text, target in zip(completions, answer, strict=True)]


def none_for_right(completions, answer, **columns):
    return [None if value else 0.0 for value in right(completions, answer)]


def form_only(completions, **columns):
    return [float("\\boxed{" in text) for text in completions]


PLANTED = (
    rewards_empty, anywhere, any_number, random_bonus, slow, first_is_better, length, raises_on_empty, none_for_right,
    form_only,
)  # fmt: skip
