"""What a model writes is shown as text by the report and the console, whatever it is."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from spmdrl.observability.jsonl import read_jsonl
from spmdrl.observability.log import SampleRecord, SamplesLog, SampleToken
from spmdrl.observability.report.report import write_report
from spmdrl.observability.terminal.console import Console
from spmdrl.runtime.screen import show
from tests.observability.test_report import _Page

COMPLETIONS = {
    "a script": "<script>alert(1)</script>",
    "the end of a script": "</script><script>alert(1)</script>",
    "a script that hides its end": "<!--<script>",
    "an event": '<img src=x onerror="alert(1)">',
    "an event in an attribute": "\" onmouseover='alert(1)' x=\"",
    "a link that runs": '<a href="javascript:alert(1)">here</a> javascript:alert(1)',
    "a frame": "<iframe srcdoc='<script>alert(1)</script>'></iframe><base href=//x>",
    "a drawing": "<svg/onload=alert(1)><foreignObject><script>alert(1)</script>",
    "a style": "</style><style>*{display:none}</style><p style='position:fixed;inset:0;background:url(//x)'>",
    "a template": "{{ 7*7 }} {% raw %} ${7*7} #{7*7} {{ config }}",
    "entities": "&lt;script&gt; &#x3c;b&#x3e; &amp;amp;",
    "JSON": '"}],"x":[{"y":"\\u003c/script\\u003e',
    "escapes of a terminal": "\x1b[2J\x1b[1;31mred\x1b[0m\x1b[6n\x9b31m",
    "a title and the clipboard": "\x1b]0;owned\x07\x1b]52;c;cm0gLXJmIH4=\x07\x1bP+q\x1b\\",
    "a link of a terminal": "\x1b]8;;file:///etc/passwd\x1b\\here\x1b]8;;\x1b\\",
    "carriage returns and backspaces": "right\rwrong\x08\x08\x7f\x0b\x0c",
    "turned text": "\u202egnorw\u202c \u2066a\u2069 \u200f\u061c \u2028 \u2029",
    "hidden text": "a\u200bb\u2060c\ufeff\U000e0041\U000e0042\u00ad",
    "NULs and halves of pairs": "a\x00b\ud800c\udfff\ufffe",
    "formats and markup": "%s %n %(x)s {0} {x!r} [link=file:///etc]here[/link] [bold red]x[/] =CALL(1) @SUM(1)",
    "one long line": "A" * 200_000,
    "marks without end": "e" + "\u0301" * 5000,
}  # fmt: skip
HARMLESS = "12 + 30 = 42"


def report_of(folder: Path, text: str) -> str:
    log = SamplesLog(folder)
    sample = SampleRecord(
        step=1, row=0, prompt=text, response=text, answer=text, reward=1.0, parts={"exact": 1.0}, verdict="scored",
        advantage=0.0, mismatch=0.0, version=0, tokens=[SampleToken(text, 0.0, 0.0)],
    )  # fmt: skip
    log.write([sample])
    log.close()
    return write_report(folder).read_text()


@pytest.fixture(scope="module")
def harmless(tmp_path_factory) -> _Page:
    return _Page(report_of(tmp_path_factory.mktemp("harmless"), HARMLESS))


@pytest.mark.parametrize("kind", COMPLETIONS)
def test_the_report_shows_a_completion_as_text(kind, tmp_path, harmless):
    text = COMPLETIONS[kind]
    page = _Page(html := report_of(tmp_path, text))
    # Nothing but the data differs from the page of a harmless completion.
    assert page.tags == harmless.tags and page.events == [] and page.links == harmless.links
    assert len(page.scripts) == len(harmless.scripts)
    assert not set(html) & set("\x00\x07\x08\x1b\r\x7f\x9b\u202e\u2028\ud800"), "data is written as ASCII"
    data = next(script for script in page.scripts if '"response":' in script and script.lstrip()[:1] == "[")
    (shown,) = json.loads(data)
    assert shown["response"] == text if len(text) < 3000 else "characters left out" in shown["response"]
    assert len(html) < len(report_of(tmp_path / "other", HARMLESS)) + 100_000
    (kept,) = read_jsonl(tmp_path / "samples.jsonl")
    assert kept["response"] == text, "the file has all of it"


@pytest.mark.parametrize("kind", COMPLETIONS)
def test_the_console_shows_a_completion_as_text(kind):
    text, stream = COMPLETIONS[kind], io.StringIO()
    console = Console(stream=stream)
    console.note(text)
    show(text, stream=stream)
    written = stream.getvalue()
    assert not set(written) & set(
        "\x00\x07\x08\x0b\x0c\x1b\r\x7f\x9b\u00ad\u061c\u200b\u200f\u202e\u2028\u2066\ufeff\ud800"
    )
    # Markup isn't read: it stands there.
    assert text[:9] in written or any(letter in text[:9] for letter in "\x00\x1b\x9b\u200b\u202e\r")


def test_an_override_of_direction_ends_with_its_token():
    style = (Path(__file__).parents[2] / "src/spmdrl/observability/report/assets/report.css").read_text()
    assert ".sample span, .sample b { unicode-bidi: isolate; }" in style
