"""The page of all keys and their JSON schema are those of the code, and fit what is written."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from spmdrl.cli.command_line import main
from spmdrl.config.aliases import ALIASES
from spmdrl.config.config import Config
from spmdrl.config.key_schema import schema, schema_keys
from spmdrl.config.sources import read_file
from tests.support.jobs import ROOT

SCHEMA = ROOT / "docs" / "config.schema.json"
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize(("flag", "file"), [("--markdown", "config.md"), ("--schema", "config.schema.json")])
def test_the_pages_in_docs_are_what_the_command_prints(
    flag: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["help", flag]) == 0
    printed = capsys.readouterr().out
    assert printed == (ROOT / "docs" / file).read_text(), f"run: python -m spmdrl help {flag} > docs/{file}"


def test_the_page_has_every_key_with_a_text_and_every_alias() -> None:
    page = " ".join((ROOT / "docs" / "config.md").read_text().split())
    items = re.findall(r"- `([\w.]+)` \([^`]+; default (?:`[^`]+`|\d+ characters)\): \S", page)
    sections = re.findall(r"#+ ([a-z_.]+) ", page)
    # A section of a class that is listed already refers to it.
    referring = dict(re.findall(r"#+ ([a-z_.]+) (?:(?!#).)*?\. Keys as in \[([a-z_.]+)\]", page))
    items += [
        name for names in re.findall(r"- ((?:`[\w.]+`(?:, )?)+): as in", page) for name in re.findall(r"[\w.]+", names)
    ]
    items += [f"{section}.{item.rpartition('.')[2]}" for section, known in referring.items()
              for item in items if item.rpartition(".")[0] == known]  # fmt: skip
    assert sorted(set(items)) == sorted({key.name for key in schema(Config) if not key.sections})
    assert set(items) | set(sections) == set(schema_keys(Config))
    # Of sections, and of a key that is listed with another section, the page has no other names.
    left_out = ["use_peft", "use_lora", "critic_learning_rate"]
    assert [name for name in ALIASES if f"`{name}` (" not in page] == left_out


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    definition = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(definition)
    return jsonschema.Draft202012Validator(definition)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_fits_the_schema_and_names_it(path, validator) -> None:
    first_line = path.read_text().partition("\n")[0]
    assert first_line.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first_line.partition("=")[2]).resolve() == SCHEMA
    given = read_file(path, problems := [])
    assert given is not None and problems == []
    validator.validate(given.plain)


@pytest.mark.parametrize(
    ("document", "is_valid"),
    [
        ({"optim": {"lr": 1e-6}, "rollout": {"temperature": 1}}, True),
        ({"run": {"name": 12}, "resume": 100}, True),
        ({"learning_rate": 1e-6, "optim": {"learning_rate": 1e-6}, "optim.lr": 1e-6}, True),
        ({"model": {"make": None}, "algo": {"kl_coef": 0.1}}, True),
        ({"optim": {"lrr": 1e-6}}, False),
        ({"optim": {"lr": "fast"}}, False),
        ({"optim": {"betas": [0.9]}}, False),
        ({"model": {"dtype": "bf16"}}, False),
        ({"optimiser": {}}, False),
    ],
)
def test_the_schema_takes_what_the_reader_takes(document, is_valid, validator) -> None:
    assert validator.is_valid(document) == is_valid
