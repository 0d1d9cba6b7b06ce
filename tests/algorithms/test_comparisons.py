"""What other trainers' functions make of the same rows, as it is written down: the comparison itself needs them."""

from __future__ import annotations

import json

import pytest
from tests.algorithms.disagreements.page import PAGE, RECORD, with_table

from spmdrl.algorithms.table import ALGORITHMS

FOUND = json.loads(RECORD.read_text())


def test_the_page_has_the_table_that_was_found() -> None:
    assert with_table(PAGE.read_text(), FOUND) == PAGE.read_text()


@pytest.mark.parametrize("name", [config.name for config in ALGORITHMS])
def test_an_algorithm_that_differs_somewhere_is_shown_to_equal_something_too(name: str) -> None:
    rows = [row for row in FOUND["rows"] if row["algorithm"] == name]
    assert not rows or any(not row["why"] for row in rows)
    assert f"| `{name}`" in PAGE.read_text()


def test_keys_that_were_compared_exist() -> None:
    keys = {config.name: set(config.__dataclass_fields__) for config in ALGORITHMS}
    for row in FOUND["rows"]:
        named = {
            part.partition("=")[0]
            for part in row["keys"].split(", ")
            if "=" in part and "." not in part.partition("=")[0]
        }
        assert named <= keys.get(row["algorithm"], keys["grpo"])
