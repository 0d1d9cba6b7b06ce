"""`spmdrl explain`."""

from __future__ import annotations

import inspect
import json
import re
import sys

import pytest

from spmdrl.algorithms.table import ALGORITHMS
from spmdrl.cli.command_line import main
from spmdrl.cli.explain import paper_of

NAMES = [config.name for config in ALGORITHMS]


@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda config: config.name)
def test_each_algorithm_has_its_paper_equations_keys_and_who_differs(config, capsys) -> None:
    assert main(["explain", f"algo.{config.name}"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"{config.name}: ") and f"arXiv:{paper_of(config)}" in page
    assert re.search(r"^ *[A-Z]\S* += \S", page, re.MULTILINE), "no equation"
    # The page's are read from the file of the algorithm, found by its name.
    of_module = inspect.cleandoc(sys.modules[ALGORITHMS[config].__module__].__doc__ or "")
    assert "\n\n" in (config.__doc__ or "") or f"\n\n{of_module}\n\n" in page
    for key in set(config.__dataclass_fields__) - {"name"}:
        assert re.search(rf"^  {key} +\S", page, re.MULTILINE), key
    assert "verl 0.9.1" in page and f"algo.name={config.name}" in page
    assert max(map(len, page.splitlines())) <= 120


def test_the_list_names_all_and_json_has_their_defaults(capsys) -> None:
    assert main(["explain"]) == 0
    assert re.findall(r"^(\w+)  +\S", capsys.readouterr().out, re.MULTILINE) == NAMES
    assert main(["explain", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["algorithms"]}
    assert list(entries) == NAMES
    assert entries["gspo"]["paper"] == "arXiv:2507.18071" and entries["gspo"]["keys"]["clip_ratio_high"] == 4e-4
    assert all(re.fullmatch(r"arXiv:\d{4}\.\d{4,5}", entry["paper"]) for entry in entries.values())


def test_an_unknown_name_is_refused_with_the_nearest(capsys) -> None:
    assert main(["explain", "algo.gsppo"]) == 2
    assert "there is no algorithm 'gsppo'; did you mean 'gspo'?" in capsys.readouterr().err
