"""The report is one safe, offline, bounded file, whatever a run left behind."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.observability.log import MetricsLog
from spmdrl.observability.report import sample_section
from spmdrl.observability.report.charts import Chart, Series, chart_svg, downsample, moving_mean, ticks
from spmdrl.observability.report.replay_section import ReplayedRow, ReplayedToken, replay_section
from spmdrl.observability.report.report import main, write_report
from spmdrl.observability.report.sample_section import fitting, repeats, sample_viewer
from spmdrl.observability.summary import provenance, write_summary
from tests.observability.synthetic import GIB, HOSTILE, write_run
from tests.support.jobs import ROOT

MAX_BYTES = 5_000_000
AXES = ("steps", "values")
PEAKS_AND_MOVES = {"m", "p"}


class _Page(HTMLParser):
    """The tags, links and scripts that a browser would see."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.events: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")]
        self.events += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.texts.append(data)
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "small", num_steps=12, num_ranks=2)


def test_rows_of_a_replay_lead_the_page_as_text_with_numbers_of_the_models_tokens_alone(small_run, tmp_path):
    tokens = [ReplayedToken(5, HOSTILE, -0.25, -0.5, 1.5, 1.0, 0.125, 2.5), ReplayedToken(6, "sunny")]
    row = ReplayedRow(
        step=3, row=7, prompt=HOSTILE, answer=None, response=HOSTILE, turns=[1, 0], is_finished=False, versions=[2],
        reward=0.5, verdict="scored", parts={"exact": 0.5}, group_rewards={6: 1.0, 7: 0.5},
        left_out="its advantage is 0", tokens=tokens, is_recorded=True, differences=["reward", "loss terms"],
    )  # fmt: skip
    page = _Page(write_report(small_run, out=tmp_path / "again.html", more=[replay_section([row])]).read_text())
    own, plain = _Page(write_report(small_run, out=tmp_path / "own.html").read_text()), " | ".join(page.texts)
    assert (page.scripts, page.events, page.links[0]) == (own.scripts, own.events, "#replay")
    assert page.texts.count(repr(HOSTILE)) == 2 and "1 [0.5]" in plain
    assert "DIFFERS from what the run recorded: reward, loss terms" in plain and "none: its advantage is 0" in plain
    cells = [text for text in page.texts if text.strip()]
    at = cells.index(repr("sunny"))
    assert cells[at - 8 : at - 2] == ["-0.25", "-0.5", "1.5", "1", "0.125", "2.5"] and cells[at + 1] == "Curves"


def test_the_page_shows_every_part(small_run: Path):
    text = write_report(small_run).read_text()
    for anchor in ("curves", "detail", "time", "memory", "samples", "data", "health", "more", "config"):
        assert f'<section id="{anchor}">' in text
    for fact in (
        "torch 2.13.0",
        "2 x cpu",
        "0.24 [0.2, 0.29] → 0.91 [0.88, 0.94]",
        "rank 1",
        "kv_cache",
        "Reward errors",
    ):
        assert fact in text
    assert '<span class="origin"># configs/debug/quickstart.yaml:2</span>' in text


def test_the_page_has_bytes_by_column_and_link_beside_the_papers_estimates(small_run: Path):
    text = write_report(small_run).read_text()
    lines = [re.findall(r"<td>(.*?)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", text)]
    # Of 12 steps, the heaviest column first; no column was put over the other links.
    assert ["response_ids", "6.9 MiB", "4.6 MiB", "", "11 MiB"] in lines
    assert ["all columns", "6.9 MiB", "4.6 MiB", "234 KiB", "12 MiB"] in lines
    measured = {line[0][:5]: line[1:] for line in lines if line and line[0].startswith("Eq.")}
    assert measured["Eq. 1"] == ["0.001", f"{6e5 / 2**30:.4g}", f"{6e2 / 2**30 * 1e6:.4g}"]
    assert measured["Eq. 4"][1] == f"{(1.02e6 + 512) / 2 / 2**30:.4g}"


def test_the_page_has_a_runs_plan_beside_what_it_measured(small_run: Path, tmp_path):
    run = shutil.copytree(small_run, tmp_path / "planned")
    assert '<section id="plan">' not in write_report(run).read_text()
    fuller, other = ({"update": {"optimizer": size, "rows": GIB}, "switch": {"bucket": GIB}} for size in (2 * GIB, GIB))
    ranks = [{"rank": 1, "peak_bytes": 3 * GIB, "slots": fuller}, {"rank": 0, "peak_bytes": 2 * GIB, "slots": other}]
    times = {"stages": {"generation": 4.0, "swap": 1.0}, "step_seconds": 5.0, "tokens_per_second_per_device": 7.0}
    plan = {"fits": True, "device": "h100", "device_bytes": 80 * GIB, "ranks": ranks}
    log = MetricsLog(run, ["jsonl"])
    log.write(13, {"mem/update_peak_gib": 4.5, "time/step": 6.0})
    log.close()
    text = []
    for one in (plan, plan | times):
        (run / "plan.json").write_text(json.dumps(one))
        text.append(write_report(run).read_text())
    assert all("Planned: fits: 3.0 GiB of 80 GiB on h100, in the update of rank 1" in page for page in text)
    lines = [[re.findall(r"<td>(.*?)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", page)] for page in text]
    rows = [{line[0]: line[1:] for line in page if line and line[0].endswith((", seconds", "GiB"))} for page in lines]
    peak = {"update, peak in GiB": ["3", "4.5", "1.5"]}
    assert rows[0] == peak and rows[1].keys() == {"generation, seconds", "step, seconds", *peak}
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = median(one["time/generation"] for one in steps if 1 < one["step"] < 13)
    assert rows[1]["generation, seconds"] == ["4", f"{measured:.4g}", f"{measured / 4:.4g}"]


def test_the_page_has_what_resharding_moved_by_link_and_the_peaks_at_each_boundary(small_run: Path):
    text = write_report(small_run).read_text()
    lines = [re.findall(r"<td>(.*?)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", text)]
    # 12 steps of 2 ranks; the second takes twice as long as the first.
    rate = 2**30 / 1e9
    assert ["across nodes", "24 GiB", "2.0 GiB", f"{rate / 0.3:.4g}", f"{rate / 0.4:.4g} (rank 1)"] in lines
    assert ["same node", "48 GiB", "4.0 GiB", f"{2 * rate / 0.3:.4g}", f"{2 * rate / 0.4:.4g} (rank 1)"] in lines
    assert ["to the host", "288 GiB", "24 GiB", f"{30 * rate:.4g}", f"{30 * rate:.4g} (rank 0)"] in lines
    assert "resharding, step 12, rank 1: " in text and "; to the host: 12 GiB at 32.21 GB/s" in text
    owners = re.search(r"<tr><th>until the end of</th>(.*?)</tr>", text)
    shown = re.findall("<th>(.*?)</th>", owners[1])
    [resharding] = [dict(zip(shown, line[1:], strict=True)) for line in lines if line and line[0] == "resharding"]
    assert {owner: peak for owner, peak in resharding.items() if peak} == {
        "generation_weights": "8.0 GiB", "kv_cache": "12 GiB", "update_weights": "4.0 GiB", "bucket": "1.0 GiB",
        "all together": "21 GiB",
    }  # fmt: skip


def test_a_run_whose_files_have_no_peaks_and_moved_nothing_has_no_such_tables(tmp_path: Path):
    run = write_run(tmp_path / "run", num_steps=3, num_ranks=1)
    path = run / "timeline" / "rank_00000.jsonl"
    old = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps({k: v for k, v in line.items() if k not in PEAKS_AND_MOVES}) + "\n" for line in old)
    )
    text = write_report(run).read_text()
    assert "On the device" in text and "kv_cache" in text
    assert "Peaks on the device" not in text and "Resharding by link" not in text


def _cells(text: str) -> dict[str, list[str]]:
    lines = [re.findall(r"<td>(.*?)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", text)]
    return {line[0]: line[1:] for line in lines if line}


def test_checkpoints_are_listed_by_their_own_steps_with_the_last_one(tmp_path: Path):
    run = write_run(tmp_path / "run", num_steps=25, num_ranks=1)
    (run / "checkpoints" / "step_000025").mkdir(parents=True)
    with (run / "checkpoints.jsonl").open("a") as file:
        file.write('{"step": 26, "error": "disk full", "folder": null}\n')
    found = _cells(write_report(run).read_text())["Checkpoints written"]
    assert found == ["3", "step 10, 20, 25; still there: 25; FAILED: 26; the last holds 11 MiB"]


def test_health_counts_warnings_idle_steps_and_settings_that_changed_on_resume(tmp_path: Path):
    log = MetricsLog(tmp_path, ["jsonl"])
    for step in range(1, 9):
        idle = {"frac_advantage_zero": 1.0} if step in (3, 4) else {"frac_advantage_zero": 0.2}
        log.write(step, {"reward": step / 10, "update/skipped": float(step == 7), **idle} | {"log/warnings": step // 7})
    log.close()
    (tmp_path / "config.resolved.step_000002.yaml").write_text("optim:\n  lr: 0.001  # default\n")
    (tmp_path / "config.resolved.yaml").write_text("optim:\n  lr: 0.1  # command line\n")
    text = write_report(tmp_path).read_text()
    cells = _cells(text)
    assert cells["Warnings"] == ["2", "step 7, 8"] and cells["Skipped updates"] == ["1", "step 7"]
    assert cells["Steps in which all advantages were 0"] == ["2", "step 3, 4"]
    assert cells["Settings changed on resume"] == ["1", "after step 2: optim.lr 0.001 → 0.1"]
    [chart] = re.findall(r"(?s)<figure[^>]*><figcaption>Reward .*?</figure>", text)
    assert chart.count('class="mark"') == 1


def test_the_start_flattens_no_curve_and_is_shown_on_its_own(tmp_path: Path):
    log = MetricsLog(tmp_path, ["jsonl"])
    for step in range(6):
        log.write(step, {"time/step": 2.0 + step / 10 if step else 500.0, "eval/accuracy": 0.5})
    log.close()
    write_summary(tmp_path, verdict="done", startup_seconds=490.0)
    text = write_report(tmp_path).read_text()
    assert "<dt>Start-up</dt><dd>8m10s</dd>" in text and "<dt>Per step</dt><dd>2.3s (median)</dd>" in text
    [chart] = re.findall(r"(?s)<figure[^>]*><figcaption>Seconds per step.*?</figure>", text)
    assert "500" not in re.findall(r'class="ty"[^>]*>([^<]*)<', chart) and 'data-steps="1 5"' in chart


def test_what_stages_waited_for_stands_beside_what_others_hid_of_it(tmp_path: Path):
    log = MetricsLog(tmp_path, ["jsonl"])
    for step in (1, 2, 3):
        waits = {"fusion/waited_seconds/reward": 8.0 + step, "fusion/hidden_seconds/reward": 4.0}
        log.write(step, {**waits, "fusion/hidden_share": 0.4})
    log.close()
    text = write_report(tmp_path).read_text()
    [section] = re.findall(r'(?s)<section id="time">.*?</section>', text)
    titles = re.findall("<figcaption>(.*?)(?: <small>|</figcaption>)", section)
    assert titles == ["Waits of reward", "Waits that other stages hid"]
    assert "hidden by other stages" in section and "fusion/" not in text


def test_the_contents_lead_to_every_section_that_is_there(small_run: Path):
    text = write_report(small_run).read_text()
    assert _Page(text).links == [f"#{anchor}" for anchor in re.findall('<section id="(.*?)">', text)]


def test_a_run_says_by_what_command_where_when_and_of_which_source_it_was_made(tmp_path: Path):
    write_summary(tmp_path, verdict="done", parameters=1_234_000, **provenance())
    text = write_report(tmp_path).read_text()
    for name in ("Command", "Host", "Started"):
        assert re.search(f"<dt>{name}</dt><dd>.+?</dd>", text)
    assert "<dd>1.2M parameters</dd>" in text


def test_charts_that_are_zero_throughout_are_only_named(tmp_path: Path):
    log = MetricsLog(tmp_path, ["jsonl"])
    for step in (1, 2, 3):
        log.write(step, {"reward": step / 4, "kl": 0.0, "a/zero": 0.0, "a/number": 1.0})
    log.close()
    text = write_report(tmp_path).read_text()
    titles = re.findall("<figcaption>(.*?)(?: <small>|</figcaption>)", text)
    assert "Reward" in titles and "a/number" in titles and not {"a/zero", "KL to the reference"} & set(titles)
    assert "0 throughout: a/zero." in text and "0 throughout: KL to the reference." in text


def test_a_metric_that_is_new_to_the_report_is_drawn_under_its_name(tmp_path: Path):
    old, new = MetricsLog(tmp_path / "old", ["jsonl"]), MetricsLog(tmp_path / "new", ["jsonl"])
    for step in (1, 2):
        old.write(step, {"reward": step / 4, "mem/new_gib": 2.0, "select/filtered": 3.0})
        new.write(step, {"judge/loss": 1.0, "judge/deep/er": 2.0, "select/filtered": 0.0, "own": 1.0 / step})
    old.close(), new.close()
    text = write_report(tmp_path / "old", others=[tmp_path / "new"]).read_text()
    section_of = dict(re.findall(r'(?s)<section id="(\w+)">(.*?)</section>', text))
    shown = {name: re.findall("<figcaption>(.*?)<", body) for name, body in section_of.items()}
    assert shown["detail"] == ["judge/deep/er", "judge/loss", "own", "select/filtered"]
    assert shown["more"] == ["mem/new_gib"] and "<details>" in section_of["more"]


def test_passes_are_drawn_in_the_order_of_k_with_their_intervals(tmp_path: Path):
    log = MetricsLog(tmp_path, ["jsonl"])
    for step in (0, 1):
        values = {f"eval/pass_at_{k}": k / 100 for k in (16, 4, 8)}
        log.write(step, values | {"eval/pass_at_8_low": 0.01, "eval/pass_at_8_high": 0.2})
    log.close()
    write_summary(tmp_path, pass_at_8_before=0.25, pass_at_8_after=0.5, pass_at_8_after_interval=[0.375, 0.625])
    assert _evaluation_titles(tmp_path) == ["pass@4", "pass@8", "pass@16"]
    text = write_report(tmp_path).read_text()
    assert text.count('class="band"') == 1 and re.search(r"pass@8.{0,80}0\.25.{0,20}0\.5", text, re.DOTALL)


def _evaluation_titles(run: Path, *others: Path) -> list[str]:
    return re.findall("<figcaption>Evaluation: (.*?)<", write_report(run, others=others).read_text())


def test_evaluations_whose_rewards_are_all_0_or_1_are_drawn_once(tmp_path: Path):
    for name, best in (("verdicts", 1.0), ("shaped", 1.5)):
        log = MetricsLog(tmp_path / name, ["jsonl"])
        log.write(0, {"eval/accuracy": 0.25, "eval/reward": 0.25 * best, "eval/reward_low": 0.2})
        log.close()
    verdicts, shaped = tmp_path / "verdicts", tmp_path / "shaped"
    assert _evaluation_titles(verdicts) == ["accuracy and reward"]
    assert _evaluation_titles(shaped) == _evaluation_titles(verdicts, shaped) == ["accuracy", "reward"]


@pytest.mark.parametrize(("ends", "has_band"), [((0.0, 1.0), False), ((0.25, 1.0), True)])
def test_percentiles_of_zeros_and_ones_are_no_band(tmp_path: Path, ends: tuple[float, float], has_band: bool):
    log = MetricsLog(tmp_path, ["jsonl"])
    for step in (1, 2, 3):
        log.write(step, {"reward": 0.5 + step / 10, "reward_p10": ends[0], "reward_p90": ends[1]})
    log.close()
    assert ('class="band"' in write_report(tmp_path).read_text()) == has_band


def test_the_page_holds_what_choosing_a_range_of_steps_needs(small_run: Path):
    page = _Page(text := write_report(small_run).read_text())
    figures = re.findall(r'(?s)<figure class="chart">(.*?)</figure>', text)
    data = [series for charts in json.loads(page.scripts[-2]).values() for series in charts]
    assert len(figures) == len(data) > 10
    for figure, series in zip(figures, data, strict=True):
        assert [one["label"] for one in series] == (re.findall("</i>(.*?)</span>", figure) or ["small"])
        (first, last), (low, high) = (map(float, re.search(f'data-{name}="(.*?)"', figure)[1].split()) for name in AXES)
        assert all(first <= x <= last for one in series for x in one["x"])
        assert all(low <= y <= high for one in series for y in one["y"] if one["x"])
        assert '<g class="axes">' in figure and re.search('<svg class="plot" [^>]*viewBox="52 10 378 176"><g>', figure)
    for name in ("zoom", "zoom-from", "zoom-to", "zoom-reset"):
        assert f'id="{name}"' in text and f'byId("{name}")' in page.scripts[-1]


def test_the_caption_names_percentiles_only_where_the_chart_has_them(tmp_path: Path):
    log = MetricsLog(tmp_path, ["jsonl"])
    log.write(1, {"reward": 0.5})
    log.close()
    assert "10th to 90th" not in write_report(tmp_path).read_text()


def test_the_slowest_steps_are_none_of_the_first_and_last(tmp_path: Path):
    text = write_report(write_run(tmp_path / "run", num_steps=6, num_ranks=1)).read_text()
    slow = {int(step) for step in re.findall(r">slow: (\d+) ", text)}
    assert slow == {3, 4}


def test_of_steps_that_take_too_much_room_the_last_keeps_as_many_samples_as_fit():
    samples = [{"step": step, "response": "x" * 90} for step in (1, 2) for _ in range(50)]
    kept = fitting(samples, 2000)
    assert 10 < len(kept) < 20 and {one["step"] for one in kept} == {2}


def test_other_steps_than_the_first_slowest_and_last_can_be_looked_at(tmp_path: Path):
    text = write_report(write_run(tmp_path / "run", num_steps=60, num_ranks=1)).read_text()
    views = re.findall(r'<button type="button" data-view="\d+"[^>]*>(.*?)</button>', text)
    assert len([view for view in views if re.fullmatch(r"step \d+", view)]) == 2 * 8


def test_settings_that_differ_between_runs_are_named(tmp_path: Path):
    runs = [write_run(tmp_path / name, num_steps=2, num_ranks=1) for name in ("one", "two")]
    path = runs[1] / "config.resolved.yaml"
    path.write_text(
        path.read_text().replace(
            "lr: 1.0e-06", "lr: 2.0e-06  # command line\n  warmup_steps: 5  # command line\n  betas: [1]"
        )
    )
    cells = _cells(write_report(runs[0], others=runs[1:]).read_text())
    assert cells["optim.lr"] == ["1.0e-06", "2.0e-06"] and cells["optim.warmup_steps"] == ["not set", "5"]
    assert "model.path" not in cells


def test_hostile_text_stays_text(small_run: Path):
    page = _Page(text := write_report(small_run).read_text())
    assert text.count("</script>") == page.tags.count("script") == 3
    assert "img" not in page.tags and page.events == []
    # Not even `<!--` or `<script `, which make a browser overlook the true end of a script.
    assert all("<" not in script for script in page.scripts[:-1])
    assert "alert(" not in page.scripts[-1] and "<i>run" not in text
    samples = next(json.loads(script) for script in page.scripts if "12 + 0?" in script)
    shown = samples[0]["response"]
    assert shown == HOSTILE


def test_hostile_names_of_runs_metrics_stages_and_settings_stay_text(tmp_path: Path, small_run: Path):
    hostile = """'"><img src=x onerror=alert(1)>&amp;"""
    run = tmp_path / hostile
    log = MetricsLog(run, ["jsonl"])
    names = ("reward", f"time/{hostile}", f"dock/put_bytes/{hostile}/node", f"reward/errors/{hostile}", hostile)
    log.write(1, dict.fromkeys(names, 1.0) | {f"{hostile}/zero": 0.0})
    log.close()
    (run / "config.resolved.yaml").write_text(f"{hostile}: {hostile}  # {hostile}\n")
    span = {"step": 1, "s": [hostile, 0, 10**6], "e": hostile}
    held = {"step": 1, "h": [hostile, 10**6, 0], "d": {hostile: 1}}
    (run / "timeline").mkdir()
    (run / "timeline" / "rank_00000.jsonl").write_text(json.dumps(span) + "\n" + json.dumps(held) + "\n")
    write_summary(run, verdict=hostile, command=hostile, sample_flow={hostile: 1.0, "eq1_gib": 1.0})
    page = _Page(write_report(run, others=[small_run]).read_text())
    assert "img" not in page.tags and page.events == [] and page.tags.count("script") == 2
    assert sum(hostile in text for text in page.texts) > 20


def test_nothing_is_fetched(small_run: Path):
    text = write_report(small_run).read_text()
    # Within the page only.
    assert all(re.fullmatch(r"#\w+", link) for link in _Page(text).links)
    assert not re.search(
        r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", re.sub(r"(?s)<script type=.*?</script>", "", text)
    )
    assert "default-src &#39;none&#39;" in text and "@import" not in text and "url(" not in text


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "samples.jsonl", "summary.json", "config.resolved.yaml", "timeline/rank_00001.jsonl"]
)
def test_a_report_is_made_of_cut_and_missing_files(tmp_path: Path, name: str):
    run = write_run(tmp_path / "run", num_steps=3, num_ranks=2, samples_per_step=1)
    whole = (run / name).read_bytes()
    (run / name).write_bytes(whole[: len(whole) * 2 // 3])
    assert "</html>" in write_report(run).read_text()
    (run / name).unlink()
    assert "</html>" in write_report(run).read_text()


def test_an_empty_folder_has_a_report_that_says_it_is_unfinished(tmp_path: Path):
    assert "unfinished: killed, it ended without a message" in write_report(tmp_path).read_text()


def test_odd_values_break_no_chart(tmp_path: Path):
    lines = [
        '{"step": 1, "reward": "NaN", "loss": 1e308}', '{"step": 2, "reward": "Infinity", "loss": -1e308}',
        '{"step": 3, "reward": 5e-324}', '{"step": 4, "reward": null, "kl": [1], "x": true}',
        '{"step": 6, "dock/put_bytes/reward/node": "NaN", "dock/get_bytes/reward/node": 3}', '{"step": "5"}', "[1]",
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "row": NaN, "prompt": [1], "reward": "NaN", "parts": 3}\n{}')
    (tmp_path / "summary.json").write_text('{"sample_flow": {"eq1_gib": 0, "eq2_gib": "NaN", "num_warehouses": 0}}')
    text = write_report(tmp_path).read_text()
    assert "Loss or gradient not finite" in text and not re.search(r'(cx|cy|x1|y1|d)="[^"]*(nan|inf)', text)


def test_runs_are_compared_and_the_verb_says_where(tmp_path: Path, small_run: Path, capsys):
    other = write_run(tmp_path / "other", num_steps=5, num_ranks=1, seed=1)
    out, trace = tmp_path / "both.html", tmp_path / "trace.json"
    assert main([str(small_run), str(other), "--output", str(out), "--perfetto", str(trace)]) == 0
    assert f"report: {out}" in capsys.readouterr().out
    assert '<section id="runs">' in out.read_text() and out.read_text().count("</i>other</span>") > 5
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("flag", ["--output", "--perfetto"])
def test_a_place_that_cant_be_written_is_refused_before_the_work(tmp_path: Path, small_run: Path, capsys, flag):
    for place in (tmp_path, tmp_path / "nowhere" / "page.html"):
        with pytest.raises(SystemExit) as ended:
            main([str(small_run), flag, str(place)])
        assert ended.value.code == 2 and f"{place} can't be written" in capsys.readouterr().err


def test_a_comparison_leaves_the_runs_own_report_alone_and_prints_a_table(tmp_path: Path, capsys):
    runs = [write_run(tmp_path / name, num_steps=5, num_ranks=1, seed=1) for name in ("one", "second")]
    own = write_report(runs[0]).read_bytes()
    assert main(list(map(str, runs))) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert last == f"report: {runs[0] / 'report_compare.html'}" and (runs[0] / "report.html").read_bytes() == own
    assert re.split("  +", head)[:4] == ["run", "steps", "reward, sampled", "held-out reward"]
    assert [re.split("  +", row)[:3] for row in rows] == [[name, "5", "0.21 → 0.93"] for name in ("one", "second")]
    assert all("0.24 [0.2, 0.29] → 0.91 [0.88, 0.94]" in row for row in rows)


def test_a_missing_folder_is_one_clear_message(tmp_path: Path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


def test_a_folder_of_other_files_gets_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "passwd").touch()
    assert main([str(tmp_path)]) == 2
    assert "is no run's folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["passwd"]


@pytest.mark.slow
def test_a_thousand_steps_on_eight_ranks_stay_below_five_megabytes(tmp_path: Path):
    run = write_run(tmp_path / "large", num_steps=1000, num_ranks=8)
    assert write_report(run).stat().st_size <= MAX_BYTES


def test_samples_never_outgrow_their_share():
    samples = [{"step": step, "response": "\u00e9" * 500} for step in range(200)]
    kept = fitting(samples, 100_000)
    assert len(json.dumps(kept)) <= 100_000 + len(kept)
    assert kept[-1]["step"] == 199 and len(kept) > 15
    assert fitting(samples, 10) == []


@given(st.lists(st.floats(), min_size=1, max_size=300), st.integers(20, 60))
def test_downsampling_keeps_the_ends_and_the_extremes(values, limit):
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = downsample(points, limit)
    finite = [y for y in values if math.isfinite(y)]
    assert len(kept) <= limit and kept[0] is points[0] and kept[-1] is points[-1]
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    if finite:
        shown = [y for _, y in kept if math.isfinite(y)]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_values_that_differ_by_rounding_have_an_axis_whose_labels_differ():
    svg = chart_svg(Chart("judged", [Series("a", [(1.0, 0.5), (2.0, 0.5 + 3e-8)])]))
    labels = re.findall(r'class="ty"[^>]*>([^<]+)<', svg)
    assert len(set(labels)) == len(labels) >= 2


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
def test_ticks_are_few_and_lie_on_the_axis(low, width):
    width = max(width, 1e-6 * abs(low))
    found = ticks(low, low + width)
    assert 1 <= len(found) <= 7
    assert all(low - 1e-6 * width <= tick <= low + width + 1e-6 * width for tick in found)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats()), min_size=1, max_size=30))
def test_any_series_gives_a_chart_with_finite_coordinates(points):
    figure = chart_svg(Chart("x", [Series("a", sorted(points))]))
    assert "<svg" in figure and not re.search(r'(cx|cy|x1|y1|d)="[^"]*(nan|inf)', figure)


def test_a_long_noisy_curve_gets_its_moving_mean():
    points = [(float(x), float(x % 2)) for x in range(1000)] + [(1000.0, math.nan)]
    means = moving_mean(points)
    assert means[0][0] == 0 and means[-1][0] == 999 and all(abs(y - 0.5) < 0.03 for _, y in means)
    assert moving_mean([(0.0, math.nan)]) == []
    figure = chart_svg(Chart("x", [Series("a", [(float(x), 1e308) for x in range(200)])]))
    assert 'class="raw"' in figure and "nan" not in figure


def test_what_an_environment_wrote_is_apart_from_the_models_words():
    record = {"step": 1, "row": 0, "prompt": "p", "response": "<<1+1=2>>2", "tokens": []}
    assert _shown(record | {"turns": [["<<1+1=", "2>>"], ["2", ""]]})["turns"] == [["<<1+1=", "2>>"], ["2", ""]]
    assert _shown(record | {"turns": [["cut"], "off", ["</script>", 3]]})["turns"] == [["</script>", "3"]]
    assert "turns" not in _shown(record)


def test_of_a_setting_that_runs_lack_only_a_given_value_differs(tmp_path: Path):
    made, read = (write_run(tmp_path / name, num_steps=2, num_ranks=1) for name in ("made", "read"))
    sizes = "model:\n  make:\n    hidden_size: 64  # run.yaml:3\n    bias: true  # default\n"
    (made / "config.resolved.yaml").write_text(f"{sizes}critic: null  # default\n")
    (read / "config.resolved.yaml").write_text("model:\n  make: null  # command line\ncritic: {}  # command line\n")
    cells = _cells(write_report(made, others=[read]).read_text())
    assert cells["model.make.hidden_size"] == ["64", "not set"] and cells["critic"] == ["null", "{}"]
    assert "model.make.bias" not in cells


def test_parts_of_the_reward_and_pairs_have_charts_of_their_own_names(tmp_path: Path):
    log = MetricsLog(tmp_path, ["jsonl"])
    pairs = {"preference/accuracy": 0.6, "preference/margin": 0.1}
    log.write(1, {"reward": 0.5, "rewards/exact/mean": 0.5, "rewards/a b/c/mean": 0.25} | pairs)
    log.close()
    text = write_report(tmp_path).read_text()
    [curves] = re.findall(r'(?s)<section id="curves">(.*?)</section>', text)
    titles = re.findall("<figcaption>(.*?)(?: <small>|</figcaption>)", curves)
    assert titles == ["Reward", "Reward: a b/c", "Reward: exact", "Pairs in order", "Margin of the pairs"]


def test_alerts_lead_the_page_as_text_the_newest_of_each_symptom(tmp_path: Path):
    log = MetricsLog(tmp_path, ["jsonl"])
    log.write(1, {"reward": 0.5})
    log.close()
    kinds = [("kl", 2, "earlier one"), ("kl", 9, HOSTILE), ("answers-truncated", 5, "cut")]
    lines = [{"step": step, "symptom": kind, "text": text, "rule": "r", "page": "p"} for kind, step, text in kinds]
    (tmp_path / "alerts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": []}]))
    page = _Page(text := write_report(tmp_path).read_text())
    assert re.findall('<p class="alert">.*?, step (.*?):', text) == ["9", "5", "[]"]
    assert text.index('class="alert"') < text.index("<dl>") and "earlier one" not in text and page.events == []


def test_repeats_are_counted_in_sequences_of_four():
    assert repeats("a b c d".split()) == repeats([]) == 0.0
    assert repeats("a b c d a b c d".split()) == 0.2 and repeats(["x"] * 103) == 0.99


def test_held_out_answers_to_the_first_prompts_are_there_after_each_evaluation(tmp_path: Path):
    run = write_run(tmp_path / "run", num_steps=2, num_ranks=1)
    (run / "eval").mkdir()
    for step in (0, 2):
        turn = {"response": f"<<1+1= {step}", "observation": "2>>"}
        same = {"response": "r" * 900, "answer": None, "reward": 0.5, "verdict": "scored", "num_tokens": 7}
        records = [same | {"row": row, "prompt": f"p{row}", "turns": [turn]} for row in range(400)]
        (run / "eval" / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    [part] = sample_viewer(run)
    found = [one for one in part.samples if one["kind"] == "held-out"]
    assert [(one["prompt"], one["step"]) for one in found[:4]] == [("p0", 0), ("p0", 2), ("p1", 0), ("p1", 2)]
    assert 20 < len(found) < 400 and found[0]["turns"] == [["<<1+1= 0", "2>>"]] and found[0]["length"] == 7


def test_samples_of_a_long_run_are_read_without_parsing_all_of_them(tmp_path: Path, monkeypatch):
    line = {"row": 0, "prompt": '"step": 5', "response": "x" * 2000, "parts": {"step": 1.0}, "tokens": []}
    lines = [json.dumps({**line, "step": step, "verdict": "scored"}, sort_keys=True) for step in range(1, 2001)]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\nbroken")
    parsed = []
    read = sample_section.objects_of
    monkeypatch.setattr(sample_section, "objects_of", lambda some: read(parsed.append(1) or some))
    [part] = sample_viewer(tmp_path)
    assert 500 < len(parsed) < 1000 and part.samples[-1]["step"] == 2000
    assert f"{len(part.samples)} of 2000 samples" in part.note


_DOM = """
const make = (tag, kind, text) => ({tag, kind, text, parts: [], append(...more) { this.parts.push(...more); }});
const part = () => {};
"""
_SHOWN = """
const flat = (box) => box.parts.map((one) => [one.kind, one.parts[0].text, one.parts[1].text]);
console.log(JSON.stringify([flat(turnTexts([["<<1+1=", "2>>"], ["</pre>", ""]])), flat(promptTexts(PROMPT))]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node")
def test_a_conversation_is_shown_by_its_roles():
    script = (ROOT / "src/spmdrl/observability/report/assets/samples.js").read_text()
    patterns = (r"  const (?:ROLE|END) = .*?;$", r"  const bubble.*?^  };$", r"  function (?:prompt|turn)Texts.*?^  }$")
    functions = "\n".join(one for pattern in patterns for one in re.findall(pattern, script, re.DOTALL | re.MULTILINE))
    prompt = json.dumps(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    program = _DOM + functions + _SHOWN.replace("PROMPT", prompt)
    turns, roles = json.loads(
        subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True).stdout
    )
    assert turns == [
        ["bubble assistant", "assistant", "<<1+1="], ["bubble environment", "environment", "2>>"],
        ["bubble assistant", "assistant", "</pre>"],
    ]  # fmt: skip
    assert roles == [["bubble system", "system", "Be brief."], ["bubble user", "user", "1+1?"]]


def _shown(record: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "samples.jsonl").write_text(json.dumps(record, sort_keys=True) + "\n")
        [part] = sample_viewer(Path(folder))
    [sample] = part.samples
    return sample
