"""The source tree keeps its shape: small folders, no circles, and nothing that only tests use."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.jobs import ROOT
from tests.support.structure import PACKAGE, figures, modules_of


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    return figures(ROOT / "src" / PACKAGE)


def test_no_folder_hides_its_parts(found):
    assert found["widest_folder"] <= 12, found["widest_folders"]


def test_no_modules_import_each_other_in_a_circle(found):
    assert found["import_cycles"] == []


def test_every_module_is_reached_from_what_people_start(found):
    assert found["modules_nothing_in_the_product_imports"] == []


def test_no_function_is_there_for_tests_alone(found):
    assert found["names_that_only_tests_use"] == []


def test_functions_stay_small(found):
    assert found["function_lines_median"] <= 8 and found["function_lines_p90"] <= 20


def test_a_file_name_says_which_file_it_is():
    names = Counter(path.name for path in modules_of(ROOT / "src" / PACKAGE).values())
    del names["__init__.py"]
    assert [name for name, count in names.items() if count > 1] == []
