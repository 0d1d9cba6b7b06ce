"""A section whose keys depend on one of its values, on a tree of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from spmdrl.config.key_schema import ChosenBy, describe, key_groups, schema_keys
from spmdrl.config.reader import ConfigError, LoadedConfig, read_config, resolved_yaml
from spmdrl.config.reference import find_keys, key_page


@dataclass(frozen=True)
class Square:
    """Four equal sides."""

    name: Literal["square"] = "square"
    """the shape"""
    side: float = 1.0
    """length of a side"""
    color: str = "red"
    """of the inside"""
    width: int = 1
    """of the line"""
    angle: float = 0.0
    """of the first side"""

    def __post_init__(self) -> None:
        if self.side > 9 and self.color == "red":
            raise ValueError(f"shape.side is {self.side}, but must be <= 9 where shape.color is red; lower it")


@dataclass(frozen=True)
class Circle:
    """All points at one distance."""

    name: Literal["circle", "disk"] = "circle"
    """the shape"""
    radius: float = 2.0
    """distance from the middle"""
    color: str = "blue"
    """of the inside"""
    width: int = 1
    """of the line"""
    angle: float = 0.0
    """of a mark on it"""


@dataclass(frozen=True)
class Drawing:
    shape: Annotated[Square | Circle, ChosenBy("name")] = field(default_factory=lambda: Square(side=3.0))
    """what is drawn"""


@dataclass(frozen=True)
class Chosen:
    shape: Annotated[Square | Circle, ChosenBy("name")]


def load(folder: Path, text: str, *overrides: str) -> LoadedConfig[Drawing]:
    (folder / "a.yaml").write_text(text)
    return read_config(Drawing, [folder / "a.yaml"], overrides, {})


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("", [], Square(side=3.0)),
        ("shape: {color: green}", [], Square(side=3.0, color="green")),
        ("shape: {name: square}", [], Square(side=3.0)),
        ("shape: {name: circle}", [], Circle()),
        ("shape: {name: disk, radius: 5}", [], Circle("disk", 5.0)),
        ("shape: {color: green}", ["shape.name=circle"], Circle(color="green")),
        ("shape: {name: circle, color: green}", ["shape.name=square"], Square(side=3.0, color="green")),
    ],
)
def test_the_name_chooses_the_keys_and_shared_keys_stay(tmp_path, text, overrides, expected):
    assert load(tmp_path, text, *overrides).value.shape == expected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["shape.color=red"], "shape.name is required (one of square, circle, disk)"),
        ([], "shape is required"),
    ],
)
def test_without_a_default_the_name_is_required(overrides, words):
    with pytest.raises(ConfigError) as caught:
        read_config(Chosen, [], overrides, {})
    assert words in str(caught.value)
    assert read_config(Chosen, [], ["shape.name=circle"], {}).value.shape == Circle()


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (
            "shape:\n  name: cirle",
            [],
            "a.yaml:2: shape.name is 'cirle', but must be one of square, circle, disk; did you mean circle?",
        ),
        (
            "shape:\n  side: 2",
            ["shape.name=circle"],
            "a.yaml:2: shape.side is a key of square, but shape.name is circle; remove it, or set shape.name to square",
        ),
        (
            "shape: {radius: 2}",
            [],
            "a.yaml:1: shape.radius is a key of circle and disk, but shape.name is square; remove it, or set "
            "shape.name to circle or disk",
        ),
        ("shape: {name: circle, radios: 2}", [], "unknown key shape.radios (= 2); did you mean shape.radius?"),
        ("shape: {name: circle, radius: x}", [], "a.yaml:1: shape.radius is 'x', but must be a number"),
        ("shape: {side: 10}", [], "a.yaml:1: shape.side is 10.0, but must be <= 9 where shape.color is red"),
        ("shape: 3", [], "a.yaml:1: shape is 3, but must be a mapping"),
    ],
)
def test_what_does_not_fit_the_chosen_name_is_named(tmp_path, text, overrides, expected):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    assert expected in str(caught.value)


def test_all_faults_of_a_choice_come_together(tmp_path):
    with pytest.raises(ConfigError, match="^3 faults") as caught:
        load(tmp_path, "shape: {name: circle, side: 3, radius: x, colour: red}")
    assert all(name in str(caught.value) for name in ("shape.side", "shape.radius", "shape.colour"))


def test_the_resolved_tree_has_the_keys_of_the_choice_alone(tmp_path):
    loaded = load(tmp_path, "shape: {color: green}", "shape.name=circle")
    assert resolved_yaml(loaded).splitlines() == [
        "shape:",
        "  name: circle  # command line",
        "  radius: 2.0  # default",
        f"  color: green  # {tmp_path}/a.yaml:1",
        "  width: 1  # default",
        "  angle: 0.0  # default",
    ]


def test_the_schema_has_the_keys_of_all_choices_and_those_of_each():
    assert schema_keys(Drawing) == (
        "shape",
        *(f"shape.{name}" for name in ("name", "width", "side", "color", "angle", "radius")),
    )
    [section], [name] = find_keys(Drawing, "shape"), find_keys(Drawing, "shape.name")
    assert {choice: [key.name for key in keys] for choice, keys in key_groups(section).items()} == {
        "": ["shape.name", "shape.width"],
        "shape.name=square": ["shape.side", "shape.color", "shape.angle"],
        "shape.name=circle": ["shape.radius", "shape.color", "shape.angle"],
        "shape.name=disk": ["shape.radius", "shape.color", "shape.angle"],
    }
    assert describe(name.kind) == "one of square, circle, disk" and name.default == "square"
    page = key_page(Drawing, "shape.color") or ""
    assert "default red" in page and "default blue" in page
