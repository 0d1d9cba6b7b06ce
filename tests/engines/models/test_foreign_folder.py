"""A model folder's tokenizer and template are tried with limits before a rank uses them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from spmdrl.engines.models.hf.foreign_folder import check_growth, try_folder

_PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_GIB = 0.5
_HOSTILE = {
    "doubling": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "format": "{{ '%999999999d' | format(1) }}",
    "center": "{{ 'x'.center(3000000000) }}",
    "only long conversations": "{% if messages | length > 9 %}{{ 'x'.center(3000000000) }}{% endif %}",
    "only tools": "{% if tools %}{{ 'x' * 3000000000 }}{% endif %}",
}


def _folder(path: Path, **files: str) -> Path:
    names = {"template": "chat_template.jinja", "tokenizer": "tokenizer.json", "settings": "tokenizer_config.json"}
    for key, text in files.items():
        (path / names[key]).write_text(text, encoding="utf-8")
    return path


def _of_words(growth: int = 1, times: int = 1) -> Tokenizer:
    """A tokenizer whose normalizer makes `growth` times as many of each "a", `times` times."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * growth)] * times)
    return tokenizer


def _refusal(folder: Path, seconds: float = 20.0) -> str:
    with pytest.raises(ValueError) as refused:
        try_folder(folder, seconds=seconds, memory_limit_gib=_GIB)
    return str(refused.value)


def test_a_sound_folder_and_one_without_any_file_are_taken(tmp_path: Path) -> None:
    try_folder(tmp_path)
    marks = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token + eos_token }}"}
    try_folder(_folder(tmp_path, template=_PLAIN, tokenizer=_of_words().to_str(), settings=json.dumps(marks)))


def test_a_template_that_refuses_the_messages_tried_is_no_fault(tmp_path: Path) -> None:
    try_folder(_folder(tmp_path, template="{{ raise_exception('only poems') }}"))


@pytest.mark.parametrize("kind", _HOSTILE)
def test_a_template_that_takes_all_memory_is_refused_by_file_and_limit(kind: str, tmp_path: Path) -> None:
    found = _refusal(_folder(tmp_path, template=_HOSTILE[kind]))
    assert str(tmp_path / "chat_template.jinja") in found and "needs more than the limit of 0.5 GiB or 20 s" in found


def test_a_template_that_does_not_end_is_refused_by_file_and_limit(tmp_path: Path) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    begin = time.monotonic()
    found = _refusal(_folder(tmp_path, template=loops), seconds=1.0)
    assert time.monotonic() - begin < 30
    assert str(tmp_path / "chat_template.jinja") in found and "limit of 0.5 GiB or 1 s" in found


def test_a_template_that_writes_far_more_than_it_reads_is_refused(tmp_path: Path) -> None:
    found = _refusal(_folder(tmp_path, template="{{ 'x' * 3000000 * messages | length }}"))
    assert "chat_template.jinja can't be used (ValueError: it renders 3000000 characters" in found


def test_a_template_of_the_settings_is_tried_too(tmp_path: Path) -> None:
    named = [{"name": "default", "template": _PLAIN}, {"name": "tool_use", "template": _HOSTILE["center"]}]
    for given in (_HOSTILE["center"], named):
        found = _refusal(_folder(tmp_path, settings=json.dumps({"chat_template": given})))
        assert "tokenizer_config.json needs more than the limit" in found


@pytest.mark.parametrize("template", ["{% if %}", "{{ 'x' | no_such_filter }}", "{% endfor %}"])
def test_a_template_that_cannot_be_compiled_is_named_with_its_line(template: str, tmp_path: Path) -> None:
    found = _refusal(_folder(tmp_path, template="\n" + template))
    assert "chat_template.jinja can't be used (Template" in found and "line 2" in found


@pytest.mark.parametrize(("growth", "times"), [(10**4, 1), (10**6, 1), (10**3, 4)])
def test_a_normalizer_that_makes_very_much_of_one_character_is_refused(growth: int, times: int, tmp_path: Path) -> None:
    assert "tokenizer.json" in _refusal(_folder(tmp_path, tokenizer=_of_words(growth, times).to_str()))


def test_files_that_cannot_be_read_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "tokenizer_config.json can't be used (JSONDecodeError" in _refusal(_folder(tmp_path, settings="{"))
    (tmp_path / "tokenizer_config.json").unlink()
    assert "tokenizer.json can't be used" in _refusal(_folder(tmp_path, tokenizer='{"model": {}}'))
    panicking = json.loads(_of_words().to_str()) | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    assert "PanicException" in _refusal(_folder(tmp_path, tokenizer=json.dumps(panicking)))
    assert capfd.readouterr().err == ""


def test_what_a_row_may_become_depends_on_its_messages_and_the_template() -> None:
    messages = [{"role": "user", "content": "x" * 1000}]
    check_growth("x" * 60_000, _PLAIN, messages, None)
    with pytest.raises(ValueError, match="renders 200000 characters of"):
        check_growth("x" * 200_000, _PLAIN, messages, None)
    check_growth("x" * 200_000, _PLAIN, messages, [{"name": "y" * 3000}])
