"""The step line has its shape and width whatever the numbers; the console is silent where it should be."""

from __future__ import annotations

import fcntl
import io
import os
import re
import select
import struct
import termios
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.observability.terminal.console import MAX_COLUMNS, Console, summary_block
from spmdrl.observability.terminal.step_line import StepFacts, fitted_line, full_line
from spmdrl.observability.terminal.units import bytes_text, count, duration, fixed, scientific

METRICS = {
    "time/step": 8.4, "time/generation": 5.1, "time/reward": 0.3, "time/old_logprobs": 0.6, "time/update": 1.9,
    "time/resharding": 0.4, "time/update/forward": 0.9, "reward": 0.412, "reward_std": 0.21, "loss": 0.031,
    "frac_advantage_zero": 0.18, "completions/mean_length": 231.2, "completions/clipped_ratio": 0.02, "kl": 0.003,
    "lr": 1e-6,
    "entropy": 0.61, "grad_norm": 0.42, "mismatch/abs_mean": 1.2e-3, "perf/tokens_per_second": 14_200,
    "mem/generation_peak_gib": 61.0, "mem/update_peak_gib": 40.0, "mem/total_gib": 80.0,
}  # fmt: skip


NEVER_LEAVING = ("reward 0.412", "loss 0.031", "gnorm 0.42")


def test_a_files_line_has_the_fields_of_its_step_in_the_documented_order():
    assert full_line(StepFacts(12, METRICS, 200, "grpo"), set()) == (
        "grpo step 12/200 | 8.4s (gen 5.1 rew 0.3 lp 0.6 upd 1.9 reshard 0.4)"
        " | reward 0.412 +-0.21 | loss 0.031 | lr 1.0e-6 | gnorm 0.42 | zero-adv 18% | len 231 (cut 2%) | kl 0.003"
        " | ent 0.61 | mismatch 1.2e-3 | 14.2k tok/s | mem 61/80 GiB | eta 26m"
    )


def test_each_verb_has_the_fields_of_what_it_trains():
    def fields(**metrics: float) -> str:
        return full_line(StepFacts(1, {"loss": 0.5, "lr": 1e-5} | metrics), set())

    assert fields(answer_probability=0.53) == "step 1 | answer 53% | loss 0.500 | lr 1.0e-5"
    pairs = {"preference/accuracy": 0.67, "preference/margin": 0.12}
    assert fields(**pairs) == "step 1 | pairs 67% right (margin 0.120) | loss 0.500 | lr 1.0e-5"
    critic = {"critic/loss": 0.12, "critic/explained_variance": 0.45}
    assert fields(**critic) == "step 1 | loss 0.500 | value loss 0.120 (explains 45%) | lr 1.0e-5"
    assert fields(**{"environment/turns": 2.125}).endswith("lr 1.0e-5 | turns 2.1")


def test_prompts_without_advantage_are_those_whose_advantages_are_0():
    line = full_line(StepFacts(1, {"frac_reward_zero_std": 0.06, "frac_advantage_zero": 1.0}), set())
    assert line == "step 1 | zero-adv 100%"


@given(st.dictionaries(st.sampled_from([*METRICS, "time/a_new_stage"]), st.floats()), st.integers(0))
def test_a_file_keeps_the_fields_that_a_step_had_whatever_later_ones_have(metrics, step):
    def fields(line: str) -> list[str]:
        head, seconds, *rest = line.split(" | ")
        stages = seconds.partition(" (")[2].rstrip(")").split()[::2]
        return [head.split()[0], *stages, *("tok/s" if "tok/s" in part else part.split()[0] for part in rest)]

    known: set[str] = set()
    first = full_line(StepFacts(1, METRICS | {"time/a_new_stage": 1.0}, 200, "grpo"), known)
    assert fields(full_line(StepFacts(step, metrics, 5, "grpo"), known)) == fields(first)


def test_a_loop_may_have_a_line_for_its_first_step_and_for_some_of_the_others():
    stream = io.StringIO()
    console = Console(stream=stream)
    console.start(25, phase="sft", every=10)
    for step in range(1, 26):
        console.step(step, {"loss": 0.5})
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["1/25", "10/25", "20/25"]


def test_on_a_terminal_small_timings_leave_first_and_the_metrics_that_matter_never():
    trouble = {"time/reward": 0.1, "health/updates": 5.0, "health/updates_skipped": 4.0}
    facts = StepFacts(12, METRICS | trouble, 200, "ppo")
    lines = {width: fitted_line(facts, width) for width in (160, 120, 80)}
    assert "rew" not in lines[160].split("(")[1].split(")")[0] and "gen 5.1" in lines[160] and "lr 1.0e-6" in lines[160]
    for width, line in lines.items():
        assert len(line) <= width
        assert all(part in line for part in (*NEVER_LEAVING, "skipped 4/5", "ppo step 12/200"))


def test_what_leaves_a_terminals_line_makes_room_for_what_is_narrower():
    line = fitted_line(StepFacts(12, METRICS, 200, "ppo"), 120)
    assert all(part in line for part in ("gen 5.1", "upd 1.9", "zero-adv 18%")) and "mem" not in line, line


def test_on_a_terminal_only_what_the_step_has_is_shown():
    assert (
        fitted_line(StepFacts(3, {"loss": 1.25, "lr": 0.1}, phase="sft"), 99) == "sft step 3 | loss 1.250 | lr 1.0e-1"
    )
    assert fitted_line(StepFacts(3, {"time/generation": 5.1}), 160) == "step 3 | (gen 5.1)"


def test_the_pace_of_several_steps_decides_the_remaining_time():
    line = fitted_line(StepFacts(10, {"time/step": 1.0}, 20, seconds_per_step=6.0), 160)
    assert line == "step 10/20 | 1.0s | eta 1m00s"


@given(
    st.integers(0, 10**9),
    st.integers(1, 10**9),
    st.dictionaries(
        st.sampled_from([*METRICS, "health/updates", *(f"time/a_stage_of_number_{n}" for n in range(9))]), st.floats()
    ),
    st.integers(40, MAX_COLUMNS),
)
def test_no_terminals_line_is_wider_than_it(step, max_steps, metrics, width):
    line = fitted_line(StepFacts(step, metrics, max_steps, "grpo"), width)
    assert len(line) <= width and "\n" not in line and line.startswith(f"grpo step {step}/{max_steps}")


def test_a_stream_that_is_no_terminal_gets_plain_lines():
    stream = io.StringIO()
    console = Console(stream=stream)
    console.note("warm start: loss 0.31 [see log]")
    console.start(2, phase="sft")
    console.step(1, {"reward": 0.5, "time/step": 2.0})
    console.summary({"verdict": "ok", "steps": 2, "seconds": 4.0}, phase="sft")
    first, line, last = stream.getvalue().splitlines()
    assert first == "warm start: loss 0.31 [see log]" and last == "sft ok: 2 steps in 4.0s"
    assert line == "sft step 1/2 | 2.0s | reward 0.500 | eta 2.0s"


def test_a_terminal_gets_the_same_lines_and_a_bar():
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Screen()
    console = Console(stream=stream)
    console.start(2)
    console.step(1, {"reward": 0.5})
    console.step(2, {"reward": 0.6})
    console.close()
    assert "train step 1/2 | reward 0.500" in stream.getvalue()


def test_a_narrow_terminal_gets_narrow_lines():
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 76, 0, 0))
    with os.fdopen(leader, "rb", buffering=0) as screen, os.fdopen(follower, "w") as stream:
        console = Console(stream=stream)
        console.start(200, phase="grpo")
        console.step(12, METRICS)
        console.close()
        # A terminal hands out what was written in pieces.
        pieces = []
        while select.select([screen], [], [], 0.2)[0]:
            pieces.append(screen.read(65536))
        shown = b"".join(pieces).decode()
    [line] = re.findall(r"grpo step[^\r\n]*", shown)
    assert len(line) <= 76 and all(part in line for part in NEVER_LEAVING)


def test_other_ranks_say_nothing():
    stream = io.StringIO()
    console = Console(enabled=False, stream=stream)
    console.start(2)
    console.step(1, {"reward": 0.5})
    console.note("x")
    console.summary({"verdict": "ok"})
    assert stream.getvalue() == ""


def test_the_summary_shows_what_is_known():
    fields = {
        "verdict": "ok", "steps": 60, "seconds": 192.4, "reward_first": 0.21, "reward_last": 0.93, "reward_steps": 6,
        "reward_first_interval": [0.2, 0.22], "eval_num_samples": 1, "accuracy_rule": "share of right ones",
        "accuracy_before": 0.24, "accuracy_before_interval": [0.2, 0.29], "accuracy_after": 0.91,
        "checkpoint": "runs/x/model", "report": None, "pass_at_16_after": 0.95, "pass_at_8_after": 0.93,
        "pass_at_8_before": 0.5, "pass_at_8_before_interval": [0.4, 0.6],
    }  # fmt: skip
    assert summary_block(fields).splitlines() == [
        "ok: 60 steps in 3m12s",
        "  reward     0.210 [0.200, 0.220] -> 0.930 (sampled, first and last 6 steps)",
        "  accuracy   0.240 [0.200, 0.290] -> 0.910 (held-out, greedy; share of right ones)",
        "  pass@8     0.500 [0.400, 0.600] -> 0.930",
        "  pass@16    ? -> 0.950",
        "  checkpoint runs/x/model",
    ]


def test_the_summary_names_trouble_and_survives_values_that_are_no_numbers():
    fields = {
        "verdict": "done", "steps": 5, "seconds": 2.0, "reward_first": "Infinity", "reward_last": 1e308,
        "trouble": ["4 of 5 updates were skipped: loss not finite"], "accuracy_before_interval": ["NaN", 1],
    }  # fmt: skip
    assert summary_block(fields, phase="grpo").splitlines() == [
        "grpo done, but 4 of 5 updates were skipped: loss not finite (5 steps in 2.0s)",
        "  reward     inf -> 1.0e308",
    ]


def test_units_read_well():
    assert [duration(s) for s in (0.04, 8.44, 45, 192.4, 1580, 3900, 184_000)] == [
        "0.0s", "8.4s", "45s", "3m12s", "26m", "1h05m", "2d03h",
    ]  # fmt: skip
    assert [duration(s) for s in (9.99, 59.7, 599.6, 3599, 86_399)] == ["10s", "1m00s", "10m", "1h00m", "1d00h"]
    assert [count(n) for n in (0, 812, 999.9, 14_200, 3.1e6, 999_999)] == ["0", "812", "1.0k", "14.2k", "3.1M", "1.0M"]
    assert [bytes_text(n) for n in (512, 1.5 * 2**20, 61 * 2**30)] == ["512 B", "1.5 MiB", "61 GiB"]
    assert [fixed(v, 2) for v in (0.0, 0.42, 1e-4, 3e7, float("nan"))] == ["0.00", "0.42", "1.0e-4", "3.0e7", "nan"]
    assert scientific(0.0012) == "1.2e-3"


def test_a_log_names_what_takes_long_and_nothing_else():
    stream = io.StringIO()
    console = Console(stream=stream, silent_seconds=0.05)
    with console.doing("reading \x1b[2J"):
        pass
    assert stream.getvalue() == ""
    with console.doing("loading the weights"):
        time.sleep(0.2)
    assert stream.getvalue().splitlines() == ["loading the weights ...", "loading the weights: 0.2s"]
    with pytest.raises(KeyError), console.doing("starting"):
        raise KeyError("x")
    assert len(stream.getvalue().splitlines()) == 2


def test_a_terminal_shows_at_once_what_goes_on_beside_the_bar_and_before_it():
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Screen()
    console = Console(stream=stream)
    with console.doing("loading the weights"):
        time.sleep(0.3)
    assert "loading the weights 0." in stream.getvalue()
    console.start(2, phase="grpo")
    with console.stage("generation"):
        time.sleep(0.3)
    console.close()
    assert "generation 0." in stream.getvalue()
