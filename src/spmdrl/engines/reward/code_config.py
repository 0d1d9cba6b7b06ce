"""How the reward `code` runs programs and counts their tests."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

CODE = "code"
"""the name of the reward"""


@dataclass(frozen=True)
class CodeConfig:
    """What the reward code gives to a program that a response holds, and what the program may use."""

    score: Literal["share", "all"] = "share"
    """share: the share of a row's tests that pass; all: 1 where every test passes, else 0"""
    tests_key: str | None = None
    """column that has a row's tests; null: the first of tests, test_cases, verification_info, input_output, test_list,
    test, public_tests, public_test_cases, answer that a row has"""
    test_seconds: Annotated[float, Interval(gt=0, lt=math.inf)] = 4.0
    """time of each test; the program is ended after it"""
    row_seconds: Annotated[float, Interval(gt=0, lt=math.inf)] = 12.0
    """time of all tests of a row; those that it doesn't reach haven't passed. reward.timeout_seconds is for what else
    a call does"""
    memory_gib: Annotated[float, Interval(ge=0.125, lt=math.inf)] = 1.0
    """address space in GiB of a program"""
    readable: tuple[str, ...] = ()
    """folders that programs may read and import from, besides Python's own library"""

    def __post_init__(self) -> None:
        if self.test_seconds > self.row_seconds:
            raise ValueError(
                f"reward.code.test_seconds {self.test_seconds:g} is more than reward.code.row_seconds "
                f"{self.row_seconds:g}; a row's tests end together, so lower the first"
            )
        for folder in self.readable:
            if not os.path.isabs(folder) or folder != os.path.normpath(folder):
                raise ValueError(
                    f"reward.code.readable has {folder!r}; give absolute paths, without .. or a / at the end"
                )
