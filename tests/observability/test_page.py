"""The pages in a real browser: launch/test_page.sh installs one. SPMDRL_PICTURES=FOLDER keeps what it saw."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdrl.observability.log import MetricsLog, SamplesLog
from spmdrl.observability.report.report import _contents, write_report
from spmdrl.observability.report.server import Pages, ReportServer
from tests.observability.synthetic import _metrics, _sample, write_run
from tests.support.browser import CHROMIUM, Browser, browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing: launch/test_page.sh")]

ALERT = {
    "step": 31, "symptom": "answers-truncated", "text": "93% of the answers are cut at rollout.max_completion_length",
    "rule": "completions/clipped_ratio > 0.75 for 3", "page": "docs/bad_run.md#answers-truncated",
}  # fmt: skip
TURNS = [["<<12*3=", "36>>"], ["The answer is 36.", ""]]
PROMPT = (
    "<|im_start|>system\nUse the calculator.<|im_end|>\n<|im_start|>user\nWhat is 12 * 3?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("pages") / "runs"
    for number, lr in enumerate(("1.0e-06", "3.0e-06", "1.0e-05")):
        run = write_run(top / f"lr_{number}", num_steps=40 + 10 * number, num_ranks=2, seed=number)
        config = (run / "config.resolved.yaml").read_text().replace("1.0e-06", lr)
        (run / "config.resolved.yaml").write_text(config)
    (top / "lr_1" / "alerts.jsonl").write_text(json.dumps(ALERT) + "\n")
    lines = (top / "lr_0" / "samples.jsonl").read_text().splitlines()
    talk = json.loads(lines[-1]) | {"row": 99, "prompt": PROMPT, "turns": TURNS, "response": "".join(sum(TURNS, []))}
    (top / "lr_0" / "samples.jsonl").write_text("\n".join([*lines, json.dumps(talk, sort_keys=True)]) + "\n")
    return top


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def address(runs) -> Iterator[str]:
    with ReportServer(Pages([runs], _contents), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def keep_picture(tab: Browser, name: str) -> None:
    if folder := os.environ.get("SPMDRL_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        tab.picture(Path(folder) / f"{name}.png")


FACTS = "[...document.querySelectorAll('#sample-list .facts')].map((one) => one.innerText)"
NAMES = "[...document.querySelectorAll('#runs tbody a')].map((one) => one.textContent)"


def test_the_index_sorts_filters_groups_and_opens_a_run(tab, address):
    tab.open(address)
    tab.until(f"{NAMES}.length === 3")
    keep_picture(tab, "index")
    tab.click("#runs th button[data-column='step']")
    assert tab.value(NAMES) == ["lr_2", "lr_1", "lr_0"]
    tab.click("#runs th button[data-column='step']")
    assert tab.value(NAMES) == ["lr_0", "lr_1", "lr_2"]
    tab.click("#runs th button[data-column='optim.lr']")
    assert tab.value(NAMES) == ["lr_2", "lr_1", "lr_0"]
    assert "answers-truncated" in tab.value("document.querySelector('#runs').innerText")
    tab.choose("#group", "optim.lr")
    assert tab.value("[...document.querySelectorAll('.group')].map((one) => one.innerText)") == [
        "optim.lr: 1.0e-05 (1)", "optim.lr: 3.0e-06 (1)", "optim.lr: 1.0e-06 (1)",
    ]  # fmt: skip
    keep_picture(tab, "index_grouped")
    tab.type("#filter", "lr_1 done")
    assert tab.value(NAMES) == ["lr_1"] and tab.value("document.querySelector('#count').textContent") == "1 of 3 runs"
    tab.click("#runs tbody a")
    tab.until("document.title.startsWith('lr_1')")
    assert tab.value("document.querySelector('.alert').innerText").startswith(
        "answers-truncated, step 31: 93% of the answers"
    )
    assert tab.value("document.querySelector('.alert').getBoundingClientRect().bottom < 300")
    keep_picture(tab, "alert")
    tab.click("nav a")
    tab.until("location.pathname.split('/').length === 3 && document.querySelector('#filter') !== null")
    assert tab.problems == []


def test_a_step_appears_and_scroll_choices_and_open_parts_stay(tab, address, runs):
    import random

    tab.open(address + "run/lr_2/")
    tab.until("document.querySelectorAll('.chart svg').length > 10")
    tab.click("#time button[data-view='2']")
    tab.value("document.querySelector('#more details').open = true")
    tab.type("#sample-text", "so we think")
    tab.value("document.querySelector('#sample-list .tokens').open = true")
    tab.value("window.untouched = document.querySelector('#config pre'); 0")
    tab.value("document.querySelector('#memory').scrollIntoView(); 0")
    before = tab.value("document.querySelector('#memory').getBoundingClientRect().top")
    chance, log, samples = random.Random(1), MetricsLog(runs / "lr_2", ["jsonl"]), SamplesLog(runs / "lr_2")
    log.write(61, _metrics(61, 61, chance) | {"brand/new": 1.0})
    samples.write(_sample(61, row, chance) for row in range(8))
    log.close(), samples.close()
    tab.until("document.querySelector('#detail').innerText.includes('brand/new')")
    assert abs(tab.value("document.querySelector('#memory').getBoundingClientRect().top") - before) < 2
    assert tab.value("document.querySelector('#time button.on').dataset.view") == "2"
    assert tab.value("document.querySelector('#more details').open") is True
    assert tab.value("document.querySelector('#sample-text').value") == "so we think"
    assert tab.value("[...document.querySelector('#sample-step').options].some((one) => one.value === '61')")
    assert tab.value("document.querySelector('#config pre') === window.untouched")
    assert tab.value("document.querySelector('#curves .chart svg').dataset.steps") == "1 61"
    keep_picture(tab, "updated")
    assert tab.problems == []


def test_a_chart_shows_values_and_a_range_of_steps_after_an_update_too(tab, address):
    tab.open(address + "run/lr_0/")
    tab.until("!document.querySelector('#zoom').hidden")
    tab.choose("#zoom-from", "20", "change")
    assert tab.value("document.querySelector('.plot').classList.contains('cut')")
    x, y = tab.middle(".chart svg")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tab.until("!document.querySelector('#hover').hidden")
    assert tab.value("document.querySelector('#hover').innerText").startswith("step ")
    keep_picture(tab, "charts")
    assert tab.problems == []


def check_samples(tab: Browser) -> None:
    assert tab.value("[...document.querySelectorAll('.bubble h4')].map((one) => one.textContent)") == [
        "system", "user", "assistant", "environment", "assistant",
    ]  # fmt: skip
    tab.value("document.querySelector('.bubble').scrollIntoView({block: 'center'}); 0")
    keep_picture(tab, "conversation")
    tab.choose("#plot-x", "exact")
    assert tab.value("document.querySelector('#plot-r').textContent").endswith("correlation 1.00")
    tab.choose("#plot-x", "length")
    tab.choose("#sample-order", "worst first")
    rewards = [float(one.partition("reward ")[2].split()[0]) for one in tab.value(FACTS)]
    assert rewards == sorted(rewards) and len(rewards) == 9
    tab.value("document.querySelector('#samples').scrollIntoView(); 0")
    keep_picture(tab, "samples")
    prompt = tab.value("document.querySelector('#sample-prompt').options[1].value")
    tab.choose("#sample-order", "as written")
    tab.choose("#sample-prompt", prompt)
    assert tab.value("document.querySelector('#sample-step').value") == ""
    assert len({one.split()[1] for one in tab.value(FACTS)}) > 10
    keep_picture(tab, "one_prompt")


def test_samples_of_a_served_page_and_of_the_mailed_file_are_looked_through_in_the_same_way(
    tab, address, runs, tmp_path
):
    tab.open(address + "run/lr_0/")
    tab.until("document.querySelectorAll('#sample-list article').length > 0")
    check_samples(tab)
    path = write_report(runs / "lr_0", out=tmp_path / "mailed.html")
    tab.open(path.as_uri())
    tab.until("document.querySelectorAll('#sample-list article').length > 0")
    check_samples(tab)
    assert tab.problems == []
