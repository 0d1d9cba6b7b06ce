import re
from fractions import Fraction

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.support.jobs import ROOT

from spmdrl.dataflow.data.synthetic import synthetic_rows
from spmdrl.engines.environment.calculator import Calculator, value_of, written
from spmdrl.engines.environment.episode import End, Episode, Observation


def answer(response: str) -> Observation | End:
    return Calculator().step(Episode("p", {}, 0, (), response))


def test_it_completes_annotations_and_leaves_other_equals_signs_alone():
    assert answer("48/2 = <<48/2=") == Observation("24>>")
    assert answer("48/2 =") == Observation("")
    assert answer("<<48/2=24>>24, so x=") == Observation("")
    assert answer("<<1,5+x=") == Observation("?>>")
    assert answer("<<1/0=") == Observation("?>>")
    assert answer("24") == End()


NUMBERS = st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=3).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({''.join(parts)})")
    | inner.map(lambda text: f"-{text}"),
    max_leaves=6,
)  # fmt: skip


@given(EXPRESSIONS)
def test_values_are_those_of_python_in_exact_fractions(expression):
    exact = eval(re.sub(r"[\d.]+", lambda found: f"Fraction('{found[0]}')", expression), {"Fraction": Fraction})
    if len(expression) <= 200:
        assert value_of(expression) == exact


@pytest.mark.parametrize(
    "expression",
    ["9**9**9", "2**65", "(10**60)**60", "__import__('os')", "a", "1 if 1 else 2", "1e9999", "[1]", "", "1;2",
     "(" * 150, "True", "'a'*9", "1j", "1//2", "0x_", "1_0", "+" * 200 + "1"],
)  # fmt: skip
def test_what_is_no_short_arithmetic_is_refused(expression):
    with pytest.raises(ValueError):
        value_of(expression)


def test_numbers_are_written_as_a_person_would():
    assert [written(value_of(text)) for text in ("1/2", "10/4*2", "1/3", "-7", "3**2")] == [
        "0.5", "5", "0.333333", "-7", "9",
    ]  # fmt: skip


def test_the_calculators_run_learns_first_what_the_calculator_would_have_said():
    settings = yaml.safe_load((ROOT / "configs" / "recipes" / "calculator" / "train.yaml").read_text())
    assert settings["environment"]["function"] == "calculator" and settings["rollout"]["stop"] == ["="]
    for row in synthetic_rows(settings["data"]["train"])[:200]:
        call, _, rest = row["completion"].partition("=")
        observation = answer(f"{call}=")
        assert isinstance(observation, Observation) and rest == observation.text + row["answer"]
        assert answer(row["answer"]) == End()
