"""Nothing that comes from outside can steer a terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.config.config import RunConfig
from spmdrl.observability.terminal.console import Console
from spmdrl.runtime.screen import safe_text, show, waiting
from tests.support.jobs import environment, job_command

HOSTILE = "a\x1b]0;owned\x07\x1b[2Jb\rc\x9b31md\u202ee\u2066f\u2028g\udc00\x7f"


@given(st.text())
def test_no_text_reaches_a_terminal_with_a_control_or_a_turn_of_direction(text):
    safe = safe_text(text)
    assert all(letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cs", "Zl", "Zp") for letter in safe)
    assert not any(unicodedata.bidirectional(letter) in ("LRO", "RLO", "LRE", "RLE", "PDF", "LRI", "RLI", "FSI", "PDI")
                   for letter in safe)  # fmt: skip
    assert safe_text(safe) == safe and len(safe) >= len(text)


def test_escapes_are_shown_and_ordinary_text_of_all_languages_stays():
    assert safe_text("\x1b[1m\x07 \u202e \x9b") == "\\x1b[1m\\x07 \\u202e \\x9b"
    plain = "naïve 数学 עברית नहीं 👩\u200d🔬\n\tπ ≈ 3.14"
    assert safe_text(plain) == plain


def test_the_console_escapes_notes_step_names_and_summaries():
    stream = io.StringIO()
    console = Console(stream=stream)
    console.note(HOSTILE)
    console.start(1, phase=HOSTILE)
    console.step(1, {})
    console.summary({"verdict": HOSTILE, "report": HOSTILE})
    assert not set(stream.getvalue()) & set("\x1b\x07\r\x9b\u202e\u2066\u2028\x7f")


def test_a_stream_without_unicode_gets_escapes_instead_of_an_error():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    show("π \udc00", stream=stream)
    assert raw.getvalue() == b"\\u03c0 \\udc00\n"


@pytest.mark.parametrize("name", ["", ".", "..", "../../etc", "a/b", "a\\b", "a\x1b[2J", "a\nb", " a", "a" * 201])
def test_a_run_is_named_like_a_folder_of_its_own(name: str):
    with pytest.raises(ValueError, match="run.dir takes a path") as error:
        RunConfig(name=name)
    assert safe_text(str(error.value)) == str(error.value)


def test_a_run_may_have_any_plain_name():
    assert str(RunConfig(name="grpo 7B, 2nd try (数学)").folder) == "runs/grpo 7B, 2nd try (数学)"


def test_refusals_and_tracebacks_of_the_command_line_are_escaped(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"id": HOSTILE, "prompt": 3, "answer": "4"}) + "\n")
    refused = job_command("check", "model.make={}", f"data.train={rows}", f"run.name=x{chr(27)}[2J")
    raises = [sys.executable, "-c", "import runpy, sys, spmdrl.cli.command_line as c\n"
              "def main(): raise RuntimeError('\\x1b[2J')\n"
              "c.main = main; sys.argv = ['spmdrl']; runpy.run_module('spmdrl', run_name='__main__')"]  # fmt: skip
    for command, code in ((refused, 2), (raises, 1)):
        job = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
        assert job.returncode == code and "\\x1b[2J" in job.stderr and "\x1b" not in job.stdout + job.stderr


def test_a_terminal_counts_the_seconds_of_what_takes_long_and_is_cleared_after_it(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, enabled in ((Terminal(), True), (Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        with waiting("reading \x1b[2J", enabled=enabled):
            time.sleep(1.2)
        written = stream.getvalue()
        if stream.isatty() and enabled:
            assert written.startswith("\rreading \\x1b[2J ... 0s\rreading") and written.endswith("\r\x1b[2K")
        else:
            assert not written
