"""Symptoms are named at once but not for ever, within ten steps of a bad run and never in a good one."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from spmdrl.nouns.settings.alert_rule import SYMPTOMS, AlertRule
from spmdrl.nouns.settings.log_config import LogConfig
from spmdrl.observability import alert_log, alerts
from spmdrl.observability.alert_log import ALERTS_FILE, AlertCommands, AlertLog
from spmdrl.observability.alerts import SYMPTOMS_FOUND, Alert, AlertWatch
from spmdrl.observability.health import counts_so_far, trouble_of
from spmdrl.observability.log import MetricsLog
from spmdrl.observability.trackers import check_backends
from tests.observability.test_health import GOOD, SKIPPED, STEADY

EMPTY = {"update/count": 2.0, "update/skipped": 2.0, "update/without_rows": 2.0}
IDLE = GOOD | {"frac_advantage_zero": 1.0, "reward": 0.0}


def _run(*steps: Mapping[str, float], watch: AlertWatch | None = None):
    """The metrics of the last step, and the lines after each."""
    metrics: Mapping[str, float] = {}
    lines: list[list[str]] = []
    watch = watch or AlertWatch()
    for step, own in enumerate(steps, 1):
        metrics = {**own, **counts_so_far(own, metrics)}
        lines.append([alert.line for alert in watch.alerts(step, metrics)])
    return metrics, lines


def test_a_skipped_update_is_warned_of_at_once_and_counted_to_the_end():
    metrics, warnings = _run(GOOD, SKIPPED, SKIPPED)
    assert [len(found) for found in warnings] == [0, 1, 0]
    assert warnings[1][0].startswith("WARNING: step 2: an update was SKIPPED (1 of 2 so far)")
    assert "gradient norm nan" in warnings[1][0] and "learning rate" in warnings[1][0]
    assert trouble_of(metrics) == ["2 of 3 updates were skipped: loss or gradient norm not finite"]


def test_steps_without_a_usable_reward_are_named_as_such():
    metrics, warnings = _run(EMPTY)
    assert len(warnings[0]) == 1 and "no row had a usable reward" in warnings[0][0]
    assert trouble_of(metrics) == ["2 of 2 updates were skipped: no row had a usable reward"]


def test_rows_that_the_algorithm_left_out_are_not_said_to_lack_a_reward():
    metrics, warnings = _run(EMPTY | {"select/dropped_rows": 8.0, "select/no_reward": 2.0})
    assert "the algorithm left out every prompt, so nothing is learnt; select/*" in warnings[0][0]
    assert trouble_of(metrics) == ["2 of 2 updates were skipped: the algorithm left out every prompt"]


def test_steps_that_could_not_be_filled_are_warned_of_rarely():
    unfilled = GOOD | {"refill/unfilled": 3.0, "refill/attempts": 5.0}
    _, warnings = _run(*[unfilled] * 12)
    assert [step for step, found in enumerate(warnings, 1) if found] == [1, 10]
    assert "3 prompts are missing of those that a step trains" in warnings[0][0] and "5 attempts" in warnings[0][0]


def test_several_steps_in_a_row_without_a_signal_are_warned_of():
    metrics, warnings = _run(IDLE, IDLE, GOOD, IDLE, IDLE, IDLE)
    assert [len(found) for found in warnings] == [0, 0, 0, 0, 0, 1]
    assert "0 in 3 steps in a row" in warnings[-1][0] and "(mean 0)" in warnings[-1][0]
    assert trouble_of(metrics) == ["5 of 6 steps taught nothing: all advantages were 0"]
    assert trouble_of(_run(GOOD, IDLE)[0]) == []


def test_other_metrics_that_are_not_finite_are_named_together_and_rarely():
    broken = GOOD | {"kl": math.inf, "entropy": math.nan}
    _, warnings = _run(*[broken] * 30)
    assert [step for step, found in enumerate(warnings, 1) if found] == [1, 10]
    assert warnings[0][0].startswith("WARNING: step 1: not finite: kl is inf, entropy is nan [")


def test_a_supervised_run_has_no_advantages_to_warn_of():
    supervised = {"update/count": 1.0, "update/skipped": 0.0, "loss": 1.0}
    metrics, warnings = _run(*[supervised] * 5)
    assert not any(warnings) and trouble_of(metrics) == [] and metrics["health/updates"] == 5


def test_a_run_whose_rate_broke_it_in_its_first_steps_does_not_blame_its_prompts():
    broken = IDLE | {"lr": 1e-3, "grad_norm": 30.0}
    metrics, warnings = _run(GOOD | {"reward": 0.4, "grad_norm": 0.4}, *[broken] * 5)
    assert "learning rate is too high (1.0e-3 now)" in warnings[3][0] and "all wrong" not in warnings[3][0]
    assert trouble_of(metrics, [STEADY, *[broken] * 8])[0].startswith(
        "5 of 6 steps taught nothing: all advantages were"
    )


def test_a_watch_remembers_the_ends_of_a_long_run_only(monkeypatch):
    kept = []
    monkeypatch.setattr(alerts, "likely_cause", lambda history: kept.append(list(history)) or "")
    _run(*[IDLE | {"reward": float(step)} for step in range(2000)])
    assert max(map(len, kept)) <= 200
    assert (kept[-1][0]["reward"], kept[-1][-1]["reward"]) == (0.0, 1999.0)


def test_every_symptom_has_its_rule_and_the_page_that_explains_it():
    assert set(SYMPTOMS) == {*SYMPTOMS_FOUND, "not-finite", "slow-ranks"}
    _, lines = _run(*[GOOD | {"completions/clipped_ratio": 0.93}] * 3)
    assert lines[2] == [
        "WARNING: step 3: 93% of the answers are cut at rollout.max_completion_length: raise it, or have answers end "
        "[completions/clipped_ratio > 0.75 for 3; docs/bad_run.md#answers-truncated]"
    ]


LEARNING = [
    GOOD | STEADY | {
        "reward": 0.3 + 0.05 * step, "reward_std": 0.46, "entropy": 0.6 - 0.03 * step, "frac_reward_zero_std": 0.3,
        "mismatch/abs_mean": 2e-3, "completions/mean_length": 200.0 + 5 * step, "grad_norm": 0.4, "loss": 0.01,
    }
    for step in range(10)
]  # fmt: skip


def _with(**series: Sequence[float]) -> list[dict[str, float]]:
    """The good run with other values of some metrics, whose `__` is a slash."""
    return [
        step | {name.replace("__", "/"): values[at] for name, values in series.items() if at < len(values)}
        for at, step in enumerate(LEARNING)
    ]


def _supervised(losses: Sequence[float]) -> list[dict[str, float]]:
    return [{"update/count": 1.0, "update/skipped": 0.0, "loss": loss, "lr": 1.0} for loss in losses]


BAD = {
    "learning-rate-too-high": _with(reward=[0.4, 0.38, 0.35, 0.2, 0.05, 0.02, 0.01, 0.0, 0.0, 0.0]),
    "learning-rate-too-high, supervised": _supervised([2.0, 2.0, 2.1, 2.6, 3.0, 3.5, 4.0, 4.0, 4.0, 4.0]),
    "learning-rate-too-high, pairs": _supervised([0.693, 1.279, 1.327, 1.214]),
    "rewards-all-tied": _with(frac_advantage_zero=[1.0] * 10),
    "answers-truncated": _with(completions__clipped_ratio=[0.8] * 10),
    "entropy-collapse": _with(
        entropy=[0.6, 0.5, 0.3, 0.1, 0.05] + [0.01] * 5, frac_reward_zero_std=[0.2, 0.3, 0.5, 0.7, 0.9] + [0.95] * 5
    ),
    "entropy-collapse, few prompts": _with(
        entropy=[2.8, 2.6, 2.0, 0.8, 0.6, 0.05, 0.02, 0.06, 0.0, 0.0], reward_std=[0.2] * 8 + [0.0, 0.2],
        frac_reward_zero_std=[0.0, 0.0, 0.0, 0.0, 0.1, 0.9, 1.0, 0.75, 1.0, 1.0],
    ),
    "rollout-mismatch": _with(mismatch__abs_mean=[0.2] * 10),
    "lengths-grow": _with(completions__mean_length=[100, 110, 120, 200] + [300] * 6, reward=[0.4] * 10),
    "eval-falls-while-reward-rises": _with(
        eval__reward=[0.5] + [math.nan] * 6 + [0.3], eval__reward_low=[0.45] + [math.nan] * 6 + [0.25],
        eval__reward_high=[0.55] + [math.nan] * 6 + [0.35],
    ),
    "updates-skipped": _with(update__skipped=[0.0, 1.0]),
    "steps-unfilled": _with(refill__unfilled=[2.0], refill__attempts=[3.0]),
    "not-finite": _with(kl=[math.nan]),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_each_symptom_is_found_within_ten_steps_and_alone(kind):
    symptom = kind.partition(",")[0]
    steps = [
        {name: value for name, value in step.items() if "eval/" not in name or value == value} for step in BAD[kind]
    ]
    watch = AlertWatch()
    found = [alert for at, step in enumerate(_counted(steps), 1) for alert in watch.alerts(at, step)]
    assert {alert.symptom for alert in found} == {symptom}
    assert all(alert.rule and alert.page.startswith("docs/") for alert in found)
    off = AlertWatch({symptom: "never"})
    assert [off.alerts(at, step) for at, step in enumerate(_counted(steps), 1)] == [[]] * len(steps)


def _counted(steps: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    found: list[Mapping[str, float]] = [{}]
    for own in steps:
        found.append({**own, **counts_so_far(own, found[-1])})
    return found[1:]


def test_a_good_run_has_no_alert():
    assert not any(_run(*LEARNING)[1])
    solved = [GOOD | STEADY | {"reward": 1.0, "reward_std": 0.0, "entropy": 0.6 / 2**at, "frac_reward_zero_std": 0.95}
              for at in range(10)]  # fmt: skip
    assert not any(_run(*solved)[1])
    greedy = [
        GOOD | STEADY | {"entropy": 1e-15 / 9**at, "frac_reward_zero_std": 0.9, "reward_std": 0.4} for at in range(9)
    ]
    assert not any(_run(*greedy)[1])
    shrinking = [{"update/count": 1.0, "loss": 2.0 - at / 10} for at in range(10)]
    assert not any(_run(*shrinking)[1])


def test_lengths_that_grow_with_the_reward_are_what_learning_looks_like():
    lengths = [100, 110, 120, 200] + [300] * 6
    assert not any(_run(*_with(completions__mean_length=lengths))[1])


def test_rewards_around_0_fall_by_chance():
    near = [
        GOOD | {"reward": reward, "reward_std": 1.0} for reward in (0.05, 0.02, 0.08, -0.1, -0.15, -0.05, -0.2, 0.0)
    ]
    assert not any(_run(*near)[1])
    assert any(_run(*near, *[GOOD | {"reward": -0.9, "reward_std": 0.4}] * 3)[1])


@pytest.mark.parametrize(
    ("text", "values", "fires"),
    [
        ("< 0.05", [0.1, 0.04, 0.04], [False, True, True]),
        ("> 0.2 for 3", [0.3, 0.1, 0.3, 0.3, 0.3], [False] * 4 + [True]),
        ("< 0.5 x first for 2", [1.0, 1.2, 0.8, 0.4, 0.4], [False] * 4 + [True]),
        ("> 0.1 and other < -1e-3", [0.2], [False]),
        ("> 0.1 and other > -1e-3", [0.2], [True]),
    ],
)
def test_rules_of_ones_own_are_texts(text, values, fires):
    rule, history = AlertRule.read("kl", text), []
    for value, expected in zip(values, fires, strict=True):
        history.append({"kl": value, "other": 0.0})
        assert rule.holds(history) == expected
    assert not rule.holds([*history, {"other": 1.0}]), "a step without the metric says nothing"


@pytest.mark.parametrize(
    ("alerts", "why"),
    [
        ({"kl": "0.2"}, "log.alerts.kl is '0.2', but must be a rule such as"),
        ({"kl": "> 0.2 for 0"}, "at most 100 steps"),
        ({"kl": "> 1.2.3"}, "no number"),
        ({"kl": "entropy > 1"}, "must be a rule"),
        ({"kl": "never"}, "there is no such symptom; the symptoms are learning-rate-too-high"),
        ({"answers-truncated": "> 0.9"}, "can only be switched off"),
    ],
)
def test_a_rule_that_cant_be_read_is_refused_with_the_form(alerts, why):
    with pytest.raises(ValueError, match="log.alerts") as refusal:
        LogConfig(alerts=alerts)
    assert why in str(refusal.value)


def test_a_rule_of_ones_own_names_value_rule_and_step():
    watch = AlertWatch({"kl": "> 0.2 for 2"})
    lines = [[alert.line for alert in watch.alerts(step, {"kl": 0.3})] for step in (1, 2, 3)]
    assert lines == [[], ["WARNING: step 2: kl is 0.3000 [kl > 0.2 for 2; docs/metrics.md#alerts]"], []]


def test_a_rule_whose_metric_nothing_records_names_the_nearest_one_once():
    watch = AlertWatch({"entropi": "< 0.05", "eval/accuracy": "< 0.5", "kl": "> 9"})
    found = [alert.line for step in range(1, 20) for alert in watch.alerts(step, {"entropy": 1.0, "kl": 0.1})]
    assert len(found) == 1 and found[0].startswith("WARNING: step 10: log.alerts has a rule of entropi, which no step")
    assert "did you mean entropy? [entropi < 0.05; docs/metrics.md]" in found[0]


def test_a_resumed_run_remembers_its_first_steps_and_drops_later_alerts(tmp_path: Path):
    config = LogConfig(alerts={"entropy": "< 0.5 x first"})
    metrics, log = MetricsLog(tmp_path, ["jsonl"]), AlertLog(tmp_path, config, last_step=-1)
    for step in range(1, 6):
        values = {"entropy": 1.0 if step < 4 else 0.4}
        metrics.write(step, values)
        log.after_step(step, values, [])
    metrics.close(), log.close()
    assert [json.loads(line)["step"] for line in (tmp_path / ALERTS_FILE).read_text().splitlines()] == [4]
    again = AlertLog(tmp_path, config, last_step=3)
    assert (tmp_path / ALERTS_FILE).read_text() == ""
    assert len(again.after_step(4, {"entropy": 0.4}, ["rank 1 is slow"])) == 2
    again.close()
    kept = [json.loads(line) for line in (tmp_path / ALERTS_FILE).read_text().splitlines()]
    assert [one["symptom"] for one in kept] == ["entropy", "slow-ranks"]


def test_a_run_without_alerts_has_no_file_of_them(tmp_path: Path):
    log = AlertLog(tmp_path, LogConfig(), last_step=-1)
    assert log.after_step(1, GOOD, []) == []
    log.close()
    assert list(tmp_path.iterdir()) == []


WRITES = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + '\\n')"


def test_the_command_gets_the_message_as_one_word_that_no_shell_reads(tmp_path: Path):
    out = tmp_path / "out"
    commands = AlertCommands([sys.executable, "-c", WRITES, str(out)])
    message = "step 3: $(touch here) `touch here`; touch here 'x' \"y\" \0 end"
    commands.start(message)
    commands.close()
    assert out.read_text() == message.replace("\0", " ") + "\n" and [path.name for path in tmp_path.iterdir()] == [
        "out"
    ]


def test_a_command_that_hangs_is_ended_with_its_children_and_holds_no_step_up(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(alert_log, "COMMAND_SECONDS", 0.2)
    monkeypatch.setattr(alert_log, "_LAST_SECONDS", 0.1)
    pids = tmp_path / "pids"
    commands = AlertCommands(["bash", "-c", f"sleep 99 & echo $! >> {pids}; sleep 99"])
    started = time.monotonic()
    for _ in range(6):
        commands.start("message")
    assert time.monotonic() - started < 2.0
    assert capsys.readouterr().err.count("isn't run for an alert") == 2
    while not pids.exists() or len(pids.read_text().split()) < 4:
        assert time.monotonic() - started < 20
        time.sleep(0.05)
    time.sleep(0.2)
    commands.end_late()
    assert capsys.readouterr().err.count("is ended, as it took over") == 4
    # A killed process may take a moment to go.
    while any(_runs(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() - started < 25
        time.sleep(0.05)
    commands.start("message")
    commands.close()
    assert time.monotonic() - started < 30


def _runs(pid: int) -> bool:
    """True unless the process is gone, or a zombie that its new parent hasn't waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_that_fails_is_a_warning(capsys):
    commands = AlertCommands([sys.executable, "-c", "raise SystemExit(3)"])
    commands.start("message")
    for _ in range(200):
        commands.end_late()
        if printed := capsys.readouterr().err:
            break
        time.sleep(0.05)
    assert "ended with 3" in printed
    AlertCommands(["/nowhere/at/all"]).start("message")
    assert "log.alert_command /nowhere/at/all can't start" in capsys.readouterr().err


def test_a_command_that_isnt_there_is_refused_before_the_run():
    with pytest.raises(ValueError, match="log.alert_command begins with '/nowhere', which is no program here"):
        check_backends(LogConfig(alert_command=("/nowhere", "x")))


def test_an_alert_is_one_line_however_it_was_made():
    assert Alert(3, "kl", "kl is 1", "kl > 0", "docs/x.md").line == "WARNING: step 3: kl is 1 [kl > 0; docs/x.md]"
