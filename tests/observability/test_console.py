"""The step line has its shape and width whatever the numbers; the console is silent where it should be."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from spmdrl.observability.console import MAX_COLUMNS, Console, step_line, summary_block
from spmdrl.observability.units import bytes_text, count, duration, fixed, scientific

METRICS = {
    "time/step": 8.4, "time/generation": 5.1, "time/reward": 0.3, "time/old_logprobs": 0.6, "time/update": 1.9,
    "time/resharding": 0.4, "time/update/forward": 0.9, "reward": 0.412, "reward_std": 0.21,
    "frac_reward_zero_std": 0.18, "completions/mean_length": 231.2, "completions/clipped_ratio": 0.02, "kl": 0.003,
    "entropy": 0.61, "grad_norm": 0.42, "mismatch/abs_mean": 1.2e-3, "perf/tokens_per_second": 14_200,
    "mem/generation_peak_gib": 61.0, "mem/update_peak_gib": 40.0, "mem/total_gib": 80.0,
}  # fmt: skip


def test_the_step_line_has_the_documented_shape():
    assert step_line(12, 200, METRICS) == (
        "step 12/200 | 8.4s (gen 5.1 rew 0.3 lp 0.6 upd 1.9 reshard 0.4) | reward 0.412 +-0.21 | len 231 (clip 2%)"
        " | kl 0.003 | mismatch 1.2e-3 | 14.2k tok/s | eta 26m"
    )


def test_every_part_appears_where_there_is_room():
    def line(*names: str) -> str:
        return step_line(12, 200, {name: METRICS[name] for name in names})

    assert line("frac_reward_zero_std", "entropy", "grad_norm") == "step 12/200 | zero-adv 18% | ent 0.61 | gnorm 0.42"
    assert line("mem/generation_peak_gib", "mem/update_peak_gib", "mem/total_gib") == "step 12/200 | mem 61/80 GiB"
    assert line("time/generation") == "step 12/200 | (gen 5.1)"
    assert step_line(3, None, {"loss": 1.25, "lr": 0.1}) == "step 3 | loss 1.250"


def test_the_pace_of_several_steps_decides_the_remaining_time():
    assert step_line(10, 20, {"time/step": 1.0}, seconds_per_step=6.0) == "step 10/20 | 1.0s | eta 1m00s"


@given(
    st.integers(0, 10**9),
    st.integers(1, 10**9),
    st.dictionaries(
        st.sampled_from([*METRICS, "loss", *(f"time/a_stage_of_number_{n}" for n in range(9))]), st.floats()
    ),
)
def test_no_step_line_is_wider_than_the_screen(step, max_steps, metrics):
    line = step_line(step, max_steps, metrics)
    assert len(line) <= MAX_COLUMNS and "\n" not in line and line.startswith(f"step {step}/{max_steps}")


def test_a_stream_that_is_no_terminal_gets_plain_lines():
    stream = io.StringIO()
    console = Console(stream=stream)
    console.note("warm start: loss 0.31 [see log]")
    console.start(2)
    console.step(1, {"reward": 0.5, "time/step": 2.0})
    console.summary({"verdict": "ok", "steps": 2, "seconds": 4.0}, next_command="spmdrl eval x")
    assert stream.getvalue().splitlines() == [
        "warm start: loss 0.31 [see log]",
        "step 1/2 | 2.0s | reward 0.500 | eta 2.0s",
        "ok: 2 steps in 4.0s",
        "  next       spmdrl eval x",
    ]


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
    assert "step 1/2 | reward 0.500" in stream.getvalue() and "train" in stream.getvalue()


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
        "verdict": "ok", "steps": 60, "seconds": 192.4, "reward_first": 0.21, "reward_last": 0.93,
        "accuracy_before": 0.24, "accuracy_before_interval": [0.2, 0.29], "accuracy_after": 0.91,
        "checkpoint": "runs/x/model", "report": None,
    }  # fmt: skip
    assert summary_block(fields).splitlines() == [
        "ok: 60 steps in 3m12s",
        "  reward     0.210 -> 0.930",
        "  accuracy   0.240 [0.200, 0.290] -> 0.910",
        "  checkpoint runs/x/model",
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
