"""The strict reader, on trees of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.config.given import inline
from spmdrl.config.key_names import Alias
from spmdrl.config.reader import ConfigError, LoadedConfig, read_config, resolved_yaml, start_up
from spmdrl.config.sources import split_arguments

ALIASES = {
    "learning_rate": Alias("optim.lr"),
    "model.name": Alias("model.path"),
    "n": Alias("rollout.num_generations"),
}


@dataclass(frozen=True)
class Source:
    path: str
    weight: float = 1.0


@dataclass(frozen=True)
class Model:
    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class Optim:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    fused: bool = True

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError(f"optim.lr is {self.lr}, but must be >= 0; 0 trains nothing")


@dataclass(frozen=True)
class Rollout:
    num_generations: int = 8
    top_p: float = 1.0
    engine_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Root:
    model: Model
    optim: Optim = field(default_factory=lambda: Optim(lr=3e-4))
    rollout: Rollout = field(default_factory=Rollout)
    reference: Model | None = None
    train: str | Source | tuple[str | Source, ...] = ()
    stops: tuple[int, ...] = ()
    save_by: str | None = None
    resume: Literal["auto", "never"] | int | str = "auto"
    label: int | str = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rollout.num_generations == 1 and self.seed == 13:
            raise ValueError(f"rollout.num_generations is 1, which can't go with seed {self.seed}; raise it")


def load(
    folder: Path, text: str, *overrides: str, later: str | None = None, aliases: Mapping[str, Alias] = ALIASES
) -> LoadedConfig[Root]:
    files = []
    for name, content in (("a.yaml", text), ("b.yaml", later)):
        if content is not None:
            (folder / name).write_text(content, encoding="utf-8")
            files.append(folder / name)
    return read_config(Root, files, overrides, aliases)


def refusal(folder: Path, text: str, *overrides: str, later: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides, later=later)
    return str(caught.value).replace(f"{folder}/", "")


def test_types_are_those_of_the_fields(tmp_path: Path) -> None:
    value = load(
        tmp_path,
        """
model: {path: some/where}
optim: {lr: 1e-6, betas: [0, 0.5]}
rollout: {num_generations: 1_000, top_p: 1, engine_kwargs: {seed: 3, scale: 1e-3, nested: {a: [1, x]}}}
train: [a.jsonl, {path: b.jsonl, weight: 2}]
stops: [1, 2]
""",
    ).value
    assert value.optim == Optim(lr=1e-6, betas=(0.0, 0.5))
    assert value.rollout.num_generations == 1000 and type(value.rollout.top_p) is float
    assert value.rollout.engine_kwargs == {"seed": 3, "scale": 1e-3, "nested": {"a": [1, "x"]}}
    assert value.train == ("a.jsonl", Source("b.jsonl", 2.0))
    assert value.stops == (1, 2)


def test_text_is_taken_as_it_is_written(tmp_path: Path) -> None:
    value = load(tmp_path, "model: {path: no}\nsave_by: 23:59\nresume: 100").value
    assert (value.model.path, value.save_by, value.resume) == ("no", "23:59", 100)
    value = load(tmp_path, "model: {path: 1.10}\nresume: never\ntrain: 12\nstops: []").value
    assert (value.model.path, value.train) == ("1.10", "12")
    assert [load(tmp_path, f"model: {{path: a}}\nlabel: {text}").value.label for text in ("7", "1.50")] == [7, "1.50"]
    assert load(tmp_path, "model: {path: a}\ntrain: [1.10, {path: on}]").value.train == ("1.10", Source("on"))


def test_dots_make_paths_of_keys_but_not_of_the_names_in_a_mapping_of_any_names(tmp_path: Path) -> None:
    text = "model.path: a\nrollout:\n  engine_kwargs: {a.b: 1, c: {d.e: 2}}\n  engine_kwargs.f: 3\n"
    loaded = load(tmp_path, text, "rollout.engine_kwargs={g.h: 4}", "rollout.engine_kwargs.i.j=5")
    assert loaded.value.rollout.engine_kwargs == {"a.b": 1, "c": {"d.e": 2}, "f": 3, "g.h": 4, "i": {"j": 5}}
    assert loaded.origin["rollout.engine_kwargs.a.b"] == f"{tmp_path}/a.yaml:3"


def test_later_files_win_key_by_key_and_overrides_win_over_files(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "model: {path: a}\nrollout:\n  engine_kwargs: {x: 1, y: 1}\n  top_p: 0.5\n",
        "seed=7",
        "--optim.fused",
        "false",
        "--stops=[4]",
        "rollout.engine_kwargs.z=3",
        "seed=8",
        later="model: {dtype: bfloat16}\nrollout: {engine_kwargs: {y: 2}}\n",
    )
    value = loaded.value
    assert value.model == Model("a", "bfloat16")
    assert value.rollout == Rollout(top_p=0.5, engine_kwargs={"x": 1, "y": 2, "z": 3})
    assert (value.seed, value.optim.fused, value.stops) == (8, False, (4,))
    assert loaded.origin["model.path"] == f"{tmp_path}/a.yaml:1"
    assert loaded.origin["rollout.top_p"] == f"{tmp_path}/a.yaml:4"
    assert loaded.origin["rollout.engine_kwargs.y"] == f"{tmp_path}/b.yaml:2"
    assert loaded.origin["seed"] == "command line"
    assert loaded.origin["optim.lr"] == "default"


def test_a_default_section_keeps_its_own_values_for_keys_that_are_left_out(tmp_path: Path) -> None:
    assert load(tmp_path, "model: {path: a}\noptim: {fused: false}").value.optim == Optim(lr=3e-4, fused=False)


def test_an_optional_section_is_filled_or_null(tmp_path: Path) -> None:
    text = "model: {path: a}\nreference: {path: b}\n"
    assert load(tmp_path, text).value.reference == Model("b")
    assert load(tmp_path, text, "reference=null").value.reference is None
    assert load(tmp_path, "model: {path: a}\nreference: null\n", "reference.path=c").value.reference == Model("c")


def test_dotted_keys_at_the_top_and_anchors_are_understood(tmp_path: Path) -> None:
    text = "model.path: a\nrollout: &base {top_p: 0.5, num_generations: 2}\n"
    assert load(tmp_path, text).value.rollout == Rollout(2, 0.5)
    merged = "model: &base {path: a, dtype: bfloat16}\nreference: {<<: *base, path: b}\n"
    assert load(tmp_path, merged).value.reference == Model("b", "bfloat16")


def test_aliases_are_read_and_named(tmp_path: Path) -> None:
    loaded = load(tmp_path, "model: {name: a}\nlearning_rate: 1e-3\nrollout: {n: 4}\n")
    assert (loaded.value.model.path, loaded.value.optim.lr, loaded.value.rollout.num_generations) == ("a", 1e-3, 4)
    assert loaded.aliases_used == {
        "model.name": "model.path",
        "learning_rate": "optim.lr",
        "rollout.n": "rollout.num_generations",
    }
    assert "lr: 0.001  # " in resolved_yaml(loaded)


def test_one_key_under_two_names_in_one_file_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, "model: {path: a}\nlearning_rate: 1e-3\noptim: {lr: 1e-4}\n")
    assert message == "a.yaml:3: optim.lr and learning_rate (a.yaml:2) are the same key; keep one"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("optim: {lr: fast}", "a.yaml:2: optim.lr is 'fast', but must be a number; write one such as 0.0003"),
        ('optim: {lr: "8"}', "a.yaml:2: optim.lr is '8', but must be a number; remove the quotes if it is one"),
        ("seed: 1.0", "a.yaml:2: seed is 1.0, but must be a whole number; write 1, without point or exponent"),
        ("seed: 1.5", "a.yaml:2: seed is 1.5, but must be a whole number; round it"),
        ("seed: true", "a.yaml:2: seed is true, but must be a whole number; write one such as 8"),
        ("seed: 010", "a.yaml:2: seed is '010', but must be a whole number; write one such as 8"),
        ("seed: [1]", "a.yaml:2: seed is a list of 1, but must be a whole number; write one such as 8"),
        ("seed:", "a.yaml:2: seed is empty, but must be a whole number; write a value, or leave the key out"),
        ("optim: {fused: 1}", "a.yaml:2: optim.fused is 1, but must be true or false; write one such as true"),
        (
            "optim: {betas: [1]}",
            "a.yaml:2: optim.betas is a list of 1, but must be a list of 2: a number, a number; write [first, second]",
        ),
        ("stops: 3", "a.yaml:2: stops is 3, but must be a list, each item a whole number; write [3]"),
        ("stops: [1, x]", "a.yaml:2: stops[1] is 'x', but must be a whole number; write one such as 8"),
        (
            "reference: {path: a, dtype: float23}",
            "a.yaml:2: reference.dtype is 'float23', but must be one of float32, bfloat16; did you mean float32?",
        ),
        (
            "rollout: 3",
            "a.yaml:2: rollout is 3, but must be a mapping with keys of num_generations, top_p, engine_kwargs; "
            "write its keys below rollout:, one per line, or {name: value}",
        ),
        ("train: [{path: a, weight: heavy}]", "a.yaml:2: train[0].weight is 'heavy', but must be a number"),
        ("train: {path: a, wieght: 2}", "a.yaml:2: unknown key train.wieght (= 2)"),
        ("lr: 1e-3", "a.yaml:2: unknown key lr (= 1e-3); did you mean optim.lr?"),
        ("optim: {lrr: 1e-3}", "a.yaml:2: unknown key optim.lrr (= 1e-3); did you mean optim.lr?"),
        ("learning_rat: 1", "a.yaml:2: unknown key learning_rat (= 1); did you mean optim.lr?"),
        ("optimizer: {lr: 1}", "a.yaml:2: unknown key optimizer (= a mapping (lr)); did you mean optim?"),
        ("path: a", "a.yaml:2: unknown key path (= 'a'); did you mean model.path or reference.path?"),
        ("optim: {zzz: 1}", "a.yaml:2: unknown key optim.zzz (= 1); the keys of optim are lr, betas, fused"),
        ("optim: {lr: -1}", "a.yaml:2: optim.lr is -1.0, but must be >= 0; 0 trains nothing"),
        ("seed: 1\nseed: 2", "a.yaml:3: seed is given a second time (first at a.yaml:2); keep one"),
        (
            "seed: [1",
            "a.yaml:3: not valid YAML: expected ',' or ']', but got '<stream end>' "
            "(while parsing a flow sequence at a.yaml:2)",
        ),
        ("seed: !!python/name:os.system", "a.yaml:2: not valid YAML: tag:yaml.org,2002:python/name:os.system"),
        ("seed: .nan", "a.yaml:2: seed is '.nan', but must be a whole number"),
        ("optim: {lr: .nan}", "a.yaml:2: optim.lr is '.nan', but must be a number"),
        ("optim: {lr: 1" + 400 * "0" + "}", "a.yaml:2: a whole number of more than 300 digits"),
        ("optim: {<<: 3}", "a.yaml:2: not valid YAML: << takes a mapping or a list of mappings, such as *name"),
        ("seed: &a [*a]", "a.yaml:2: not valid YAML: an anchor holds itself"),
        ("---\nseed: 1", "not valid YAML: but found another document"),
        ("? [a]\n: 1", "a.yaml:2: not valid YAML: a key must be plain text"),
        ('save_by: "\\ud800"', "a.yaml:2: not valid YAML: \\ud800 to \\udfff are halves of characters"),
        ("stops: [1, 2]\noptim: {betas: [1, 2, 3]}", "optim.betas is a list of 3, but must be a list of 2"),
    ],
)
def test_a_wrong_line_is_named_with_the_rule_and_a_way_out(tmp_path: Path, line: str, expected: str) -> None:
    assert expected in refusal(tmp_path, f"model: {{path: a}}\n{line}\n")


@pytest.mark.parametrize("line", ["train: [{path: a, weight: x}]", "train: {path: a, wieght: 2}", "train: [[1]]"])
def test_a_value_that_resembles_one_member_of_a_union_is_one_fault(tmp_path: Path, line: str) -> None:
    assert "\n" not in refusal(tmp_path, f"model: {{path: a}}\n{line}\n")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optim.lr=fast"], "command line: optim.lr is 'fast', but must be a number"),
        (["--optim.lr"], "command line: --optim.lr has no value; write --optim.lr VALUE or optim.lr=VALUE"),
        (["seed"], "command line: 'seed' is no override; write key.path=value or --key.path value"),
        (["sede=1"], "command line: unknown key sede (= 1); did you mean seed?"),
        (["save_by=*.x"], "(in save_by=*.x; quote text for YAML too: save_by=\"'...'\")"),
        (["optim.lr=-1"], "command line: optim.lr is -1.0, but must be >= 0"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, overrides: list[str], expected: str) -> None:
    assert expected in refusal(tmp_path, "model: {path: a}", *overrides)


def test_all_faults_are_shown_together(tmp_path: Path) -> None:
    message = refusal(tmp_path, "optim: {lr: fast}\nsede: 1\n", "seed=x", later="stops: 1\n")
    assert message.startswith("5 faults in the configuration:\n")
    for part in ("a.yaml:1: optim.lr", "a.yaml:2: unknown key sede", "command line: seed", "b.yaml:1: stops"):
        assert f"  {part}" in message
    assert "a.yaml, b.yaml: model.path is required (text), but is not given; set it in b.yaml, or add" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)),
            "more than 50,000 values once aliases (*name) are expanded, which no configuration needs",
            id="a bomb of lists",
        ),
        pytest.param(
            "a0: &a0 {x: 1}\n"
            + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 30)),
            "more than 50,000 values",
            id="a bomb of merges",
        ),
        pytest.param("seed: " + "[" * 30_000, "a.yaml:1: more than 50 levels inside each other", id="brackets"),
        pytest.param("seed: " + "{a: " * 30_000, "more than 50 levels", id="braces"),
        pytest.param("- " * 30_000, "more than 50 levels", id="dashes on a line"),
        pytest.param("".join(f"{' ' * n}a:\n" for n in range(300)), "more than 50 levels", id="indentation"),
        pytest.param("? " * 30_000, "more than 50 levels", id="question marks"),
        pytest.param("model: {path: a}\n" + "a." * 60 + "a: 1", "has more than 50 names", id="dots"),
        pytest.param("x: " + "y" * 300_000, "a.yaml: more than 256 KiB, which no configuration needs", id="size"),
        pytest.param("seed: " + "9" * 5000, "a.yaml:1: a whole number of more than 300 digits", id="digits"),
    ],
)
def test_text_that_exhausts_a_reader_is_refused_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    started = time.process_time()
    message = refusal(tmp_path, text)
    assert expected in message
    assert "\n" not in message and len(message) < 1000
    # Unlimited, the bombs take years and the rest seconds; a busy machine is ten times slower than this needs.
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "override", ["seed=" + "[" * 30_000, "a." * 2000 + "a=1", "seed=" + "9" * 5000, "rollout.engine_kwargs=" + "[" * 99]
)
def test_the_command_line_has_the_same_limits(tmp_path: Path, override: str) -> None:
    message = refusal(tmp_path, "model: {path: a}", override)
    assert "more than" in message and len(message) < 1000


def test_a_file_without_end_is_read_no_further_than_the_limit() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: more than 256 KiB"):
        read_config(Root, [Path("/dev/zero")], [], ALIASES)


def test_many_faults_are_counted_and_the_first_shown(tmp_path: Path) -> None:
    message = refusal(tmp_path, "".join(f"key{n}: 1\n" for n in range(200)), "model.path=a")
    assert message.startswith("200 faults") and message.endswith("... and 180 more")


# What YAML is made of, so that random texts get past its first character.
PIECES = st.sampled_from(
    [
        "seed",
        "model",
        "optim",
        "lr",
        "path",
        ": ",
        ":\n",
        "\n",
        "  ",
        "- ",
        "? ",
        "[",
        "]",
        "{",
        "}",
        ", ",
        "&a ",
        "*a",
        "<<",
    ]
    + [
        "!!int ",
        "!!float ",
        "!!binary ",
        "!x ",
        "|",
        ">",
        "'",
        '"',
        "\\",
        "#",
        "%",
        "---",
        "...",
        "1e999",
        ".nan",
        "0x1",
        "~",
    ]
    + ["2001-01-01", "null", "=", "\t", "\ufeff", "é", "\x00", "\ud800", "1" * 50, "."]
)


@settings(max_examples=150 * int(os.environ.get("SPMDRL_FUZZ", "1")))
@given(st.binary(max_size=60) | st.lists(PIECES, max_size=40).map("".join), st.lists(PIECES, max_size=12).map("".join))
def test_random_input_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes | str, value: str
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    for files, overrides in (([path], []), ([], [f"rollout.engine_kwargs={value}", "model.path=a"]), ([], [value])):
        try:
            read_config(Root, files, overrides, ALIASES)
        except ConfigError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("text", "num_faults"), [("path: [1", 1), ("- a", 1), ("pth: a", 1), ("pth: a\nnote: 3", 1), ("zzz: 1", 2), ("", 1)]
)
def test_a_broken_file_or_a_misspelt_key_is_one_fault(tmp_path: Path, text: str, num_faults: int) -> None:
    @dataclass(frozen=True)
    class Unset:
        path: str | None = None
        note: str | None = None

        def __post_init__(self) -> None:
            if self.path is None:
                raise ValueError("path is null; set it")

    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(Unset, [tmp_path / "a.yaml"], [], {})
    assert str(caught.value).startswith("2 faults" if num_faults == 2 else ("defaults: ", f"{tmp_path}/a.yaml:1: "))


def test_a_rule_over_several_sections_names_the_origin_of_its_keys(tmp_path: Path) -> None:
    message = refusal(tmp_path, "model: {path: a}\nrollout:\n  num_generations: 1\n", "seed=13")
    assert message.startswith("rollout.num_generations is 1, which can't go with seed 13")
    assert message.endswith("[rollout.num_generations from a.yaml:3; seed from command line]")


def test_a_rule_that_the_defaults_break_says_so(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Unset:
        path: str | None = None
        note: str | None = None

        def __post_init__(self) -> None:
            if self.path is None:
                raise ValueError("path is null; set it")

    (tmp_path / "a.yaml").write_text("")
    with pytest.raises(ConfigError, match="^defaults: path is null; set it$"):
        read_config(Unset, [tmp_path / "a.yaml"], ["note=x"], {})


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="c.yaml: the file can't be read: "):
        read_config(Source, [path], ["path=a"], {})


def test_a_misspelt_file_is_looked_for_beside_it(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("path: a")
    with pytest.raises(ConfigError, match=rf"did you mean {tmp_path / 'quickstart.yaml'}\?"):
        read_config(Source, [tmp_path / "quikstart.yaml"], [], {})


def test_a_file_of_comments_is_an_empty_one_and_a_list_is_none(tmp_path: Path) -> None:
    assert load(tmp_path, "# nothing yet\n", "model.path=a").value.model.path == "a"
    assert "the file holds a list of 1, but must hold a mapping" in refusal(tmp_path, "- a\n", "model.path=a")


def test_the_resolved_tree_names_every_key_and_its_origin(tmp_path: Path) -> None:
    loaded = load(tmp_path, "model: {path: a}\nreference: {path: b}\n", "optim.lr=1e-6", "train=[{path: c}]")
    lines = resolved_yaml(loaded).splitlines()
    assert f"  path: a  # {tmp_path}/a.yaml:1" in lines
    assert "  lr: 1.0e-06  # command line" in lines
    assert "train: [{path: c, weight: 1.0}]  # command line" in lines
    assert "seed: 0  # default" in lines
    # Any other reader of YAML sees the same numbers.
    assert yaml.safe_load("\n".join(lines))["optim"]["lr"] == 1e-6


texts = st.text(max_size=8) | st.sampled_from(
    ["no", "1e-6", "010", "null", "~", "# x", "a: b", " a ", "'", "\n", "=", "a.b"]
)
floats = st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
models = st.builds(Model, texts, st.sampled_from(["float32", "bfloat16"]))
sources = st.builds(Source, texts, floats)
roots = st.builds(
    Root,
    model=models,
    optim=st.builds(Optim, floats.map(abs), st.tuples(floats, floats), st.booleans()),
    rollout=st.builds(Rollout, st.integers(), floats, st.dictionaries(texts, values, max_size=2)),
    reference=st.none() | models,
    train=texts | sources | st.lists(texts | sources, max_size=2).map(tuple),
    stops=st.lists(st.integers(), max_size=2).map(tuple),
    save_by=st.none() | texts,
    resume=st.sampled_from(["auto", "never", "some/folder"]) | st.integers(),
    seed=st.integers(14),
)


@settings(max_examples=30)
@given(roots)
def test_the_resolved_tree_reads_back_as_the_same_value(tmp_path_factory: pytest.TempPathFactory, root: Root) -> None:
    path = tmp_path_factory.mktemp("resolved") / "config.resolved.yaml"
    path.write_text(resolved_yaml(LoadedConfig(root, _Anywhere(), {})), encoding="utf-8", newline="")
    assert read_config(Root, [path], [], ALIASES).value == root


class _Anywhere(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "somewhere:1"


@pytest.mark.parametrize(
    ("arguments", "files", "overrides"),
    [
        (["a.yaml", "b.yml", "x.y=1"], ["a.yaml", "b.yml"], ["x.y=1"]),
        (["--x.y", "-1", "a.yaml"], ["a.yaml"], ["--x.y", "-1"]),
        (["--x.y=2", "runs/lr=1/a.yaml"], ["runs/lr=1/a.yaml"], ["--x.y=2"]),
        (["a.yaml", "--x"], ["a.yaml"], ["--x"]),
    ],
)
def test_a_command_line_is_parted_into_files_and_overrides(
    arguments: Sequence[str], files: list[str], overrides: list[str]
) -> None:
    assert split_arguments(arguments) == ([Path(file) for file in files], overrides)


def test_what_fails_at_the_start_is_bad_input_but_a_bug_stays_a_bug() -> None:
    with pytest.raises(ConfigError, match="no such device"), start_up():
        raise ValueError("no such device")
    with pytest.raises(KeyError), start_up():
        raise KeyError("bug")


def test_equal_scalars_of_other_types_are_written_as_what_they_are():
    assert [inline(value) for value in (True, 1, 1.0, "1", "true", None, False, 0, -0.0)] == [
        "true", "1", "1.0", "'1'", "'true'", "null", "false", "0", "-0.0",
    ]  # fmt: skip
