"""The paper's printed table follows from the equations."""

from __future__ import annotations

import json

import pytest

from tests.bench.__main__ import main
from tests.bench.samples.table1 import Printed


def test_every_printed_figure_follows_from_the_formulas(capsys):
    assert main(["table1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    first, last = content["rows"][0], content["rows"][-1]
    assert first["TCV"] == 256 * 8 * 4 * (2 * 2048 + 3 * 5 * 8192 + 8 * 3) / 2**30
    assert first["T100"] == pytest.approx(first["TCV"] * 10.24) and first["T1K"] == first["TCV"]
    assert last["Eq. 4, S = 16"] == pytest.approx(8 * last["Eq. 4, S = 128"])
    assert last["Eq. 4, S = 16"] == pytest.approx(last["TCV"] / 16, rel=1e-3)
    assert content["differing"] == []
    assert content["cut_off"] == [
        "TCV 0.96 (0.96893)", "TCV 15.2 (15.251)", "T100 156.1 (156.18)", "T1K 15.2 (15.251)",
        "T100 3.9K (3973.3)", "T100 31K (31622)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "exact", "verdict"),
    [("0.97", 0.969, "rounded"), ("0.96", 0.969, "cut off"), ("0.95", 0.969, "differs"), ("3.1K", 3088, "rounded"),
     ("31K", 31999, "cut off"), ("32K", 31999, "rounded"), ("30K", 31999, "differs")],
)  # fmt: skip
def test_printed_digits_are_compared_with_exact_values(text, exact, verdict):
    assert Printed(text).compared_with(exact) == verdict
