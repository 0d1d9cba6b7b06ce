"""A row's session lives in one worker from the first turn to the row's end, and comes back where it was lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.environment.environment_runner import MAX_CHARACTERS, StepResult
from spmdrl.engines.environment.episode import Episode, Observation, Row, Turn
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.runtime.workers.strikes import Strikes, Subject
from spmdrl.runtime.workers.verdict import Verdict

FILE = Path(__file__).with_name("sessions.py")


class Rows:
    """Rows of one environment, whose episodes grow by what they read."""

    def __init__(self, pool: EnvironmentPool, log: Path):
        self.pool, self.log = pool, log
        self.turns: dict[int, tuple[Turn, ...]] = {}

    def step(self, responses: dict[int, str], **columns: str) -> dict[int, StepResult]:
        """Take a step of each row."""
        for row, response in responses.items():
            columns = {"log": str(self.log), **columns}
            self.pool.submit(row, Episode(f"p{row}", columns, row, self.turns.get(row, ()), response))
        results = dict(zip(responses, self.pool.collect(list(responses)), strict=True))
        for row, result in results.items():
            if result.observation is not None:
                self.turns[row] = (*self.turns.get(row, ()), Turn(responses[row], result.observation.text))
        return results

    def logged(self, word: str = "") -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(word)]

    def wait_for(self, word: str, number: int) -> list[str]:
        deadline = time.monotonic() + 5.0
        while len(self.logged(word)) < number and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.logged(word)


def config_of(name: str = "Counting", **settings: object) -> EnvironmentConfig:
    given = {"isolation": "process", "timeout_seconds": 5.0, "open_timeout_seconds": 5.0, **settings}
    return EnvironmentConfig(f"{FILE}:{name}", **given)


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Rows]:
    with EnvironmentPool(config_of(workers=2, timeout_seconds=1.0)) as pool:
        yield Rows(pool, tmp_path / "log")


def texts(results: dict[int, StepResult]) -> list[str]:
    return [one.observation.text.strip() if one.observation else str(one.verdict) for one in results.values()]


def is_alive(pid: int) -> bool:
    """Its parent, which never asks for its end, keeps a killed one as a zombie."""
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def pids(lines: Sequence[str]) -> dict[str, set[str]]:
    """The processes that each row was in."""
    found: dict[str, set[str]] = {}
    for line in lines:
        found.setdefault(line.split()[1], set()).add(line.split()[2])
    return found


def test_a_session_keeps_its_state_in_one_of_the_workers_and_is_closed_once(rows):
    for count in (1, 2, 3):
        assert texts(rows.step(dict.fromkeys(range(5), "go"))) == [f"{count} of p{row}" for row in range(5)]
    of_rows = pids(rows.logged())
    assert all(len(found) == 1 for found in of_rows.values()), of_rows
    assert sorted(Counter(pid for found in of_rows.values() for pid in found).values()) == [2, 3]
    rows.pool.end([0, 1])
    assert {line.split()[1] for line in rows.wait_for("close", 2)} == {"0", "1"}
    assert texts(rows.step({4: "go"})) == ["4 of p4"]
    rows.pool.close()
    assert sorted(line.split()[1] for line in rows.logged("close")) == ["0", "1", "2", "3", "4"]
    assert len(rows.logged("open")) == 5


def test_inline_sessions_are_the_same_and_closed_as_well(tmp_path):
    with EnvironmentPool(config_of(isolation="inline")) as pool:
        rows = Rows(pool, tmp_path / "log")
        assert [texts(rows.step({0: "go", 1: "go"})) for _ in "ab"] == [["1 of p0", "1 of p1"], ["2 of p0", "2 of p1"]]
        assert rows.step({0: "raise"})[0].verdict is Verdict.CRASHED
        pool.end([0])
        assert len(rows.logged("open")) == 2 and len(rows.logged("close")) == 1
    assert len(rows.logged("close")) == 2


@pytest.mark.parametrize("name", ["Counting", "Restored"])
def test_a_step_that_kills_its_worker_costs_its_own_row_and_the_others_are_opened_again(tmp_path, name):
    with EnvironmentPool(config_of(name, workers=1)) as pool:
        rows = Rows(pool, tmp_path / "log")
        for count in (1, 2):
            assert texts(rows.step(dict.fromkeys(range(4), "go"))) == [f"{count} of p{row}" for row in range(4)]
        results = rows.step({0: "go", 1: "die", 2: "go", 3: "go"})
        assert [result.verdict for result in results.values()] == [None, Verdict.CRASHED, None, None]
        assert "lost in this call" in results[1].error and texts(results)[2:] == ["3 of p2", "3 of p3"]
        pool.end([1])
        assert texts(rows.step({0: "go", 2: "go"})) == ["4 of p0", "4 of p2"]
        if name == "Restored":
            assert rows.logged("restore")[0].startswith("restore:go>1 of p2+go>2 of p2 ")
            assert len(rows.logged("step:go")) == 4 + 4 + 3 + 2, "no step is taken twice"
        else:
            assert len(rows.logged("step:go")) == 4 + 4 + 3 + 2 + (2 + 2 + 3), "replayed"
        assert not [line for line in rows.logged("close") if line.split()[1] == "1"]


@pytest.mark.parametrize(
    ("poison", "verdict", "text"),
    [("raise", Verdict.CRASHED, "KeyError: 'nothing'"), ("text", Verdict.CRASHED, "open gave 'no session'"),
     ("die", Verdict.CRASHED, "as it opened a row"),
     ("hang", Verdict.TIMED_OUT, "as it opened a row: it was over environment.open_timeout_seconds = 0.5")],
    ids=["raise", "text", "die", "hang"],
)  # fmt: skip
def test_a_session_that_cannot_be_opened_ends_its_row_and_no_other(tmp_path, poison, verdict, text):
    strikes = Strikes()
    with EnvironmentPool(config_of(open_timeout_seconds=0.5), strikes=strikes) as pool:
        rows = Rows(pool, tmp_path / "log")
        rows.step({0: "go", 1: "go"})
        pool.submit(9, Episode("p", {"log": str(rows.log), "open": poison}, 9, (), "go"), Subject("9", "p"))
        (result,) = pool.collect([9])
        assert result.verdict is verdict and text in result.error, result
        assert [one.subject.name for one in strikes.take_new()] == ["9"] * (poison in ("die", "hang"))
        pool.end([9])
        assert texts(rows.step({0: "go", 1: "go"})) == ["2 of p0", "2 of p1"]
        with pytest.raises(ValueError, match="can't open a session for the first prompt"):
            pool.try_open(Row("p", {"log": str(rows.log), "open": poison}, 9))
        num_open = len(rows.logged("open"))
        pool.try_open(Row("p", {"log": str(rows.log)}, 10))
        assert len(rows.wait_for("close 10", 1)) == 1 and len(rows.logged("open")) == num_open + 1


def test_what_a_session_answers_is_checked_like_any_step(rows):
    results = rows.step(dict(enumerate(["huge", "bytes", "hang", "end"])))
    verdicts = [Verdict.MALFORMED, Verdict.MALFORMED, Verdict.TIMED_OUT, None]
    assert [one.verdict for one in results.values()] == verdicts and results[3].reward == 2.0


def test_any_text_up_to_the_limit_comes_back_letter_by_letter(rows):
    given = ["\0\x1b[2J\x7f", "\r\n\u2028\u0085", '"\\\\u0000', "\U0001f600\ue000\uffff", "x" * MAX_CHARACTERS]
    found = rows.step({row: f"echo:{text}" for row, text in enumerate(given)})
    assert [one.observation.text for one in found.values()] == given
    assert rows.step({9: "echo:" + "x" * (MAX_CHARACTERS + 1)})[9].verdict is Verdict.MALFORMED


@pytest.mark.parametrize("poison", ["raise", "hang", "die"])
def test_a_session_that_cannot_be_closed_costs_no_row(tmp_path, poison, capfd):
    with EnvironmentPool(config_of(timeout_seconds=0.5)) as pool:
        rows = Rows(pool, tmp_path / "log")
        rows.step({0: "go"}, close=poison)
        rows.step({1: "go"})
        pool.end([0])
        assert texts(rows.step({1: "go"})) == ["2 of p1"]
    said = capfd.readouterr().err
    assert ("couldn't be closed: environment.function: KeyError" if poison == "raise" else "as it closed a row") in said


def test_a_process_of_a_session_lives_until_no_session_is_left(tmp_path):
    with EnvironmentPool(config_of()) as pool:
        rows = Rows(pool, tmp_path / "log")
        child = int(texts(rows.step({0: "go"}, open="child"))[0].split()[-1])
        rows.step({0: "go", 1: "go"})
        assert is_alive(child)
        pool.end()
        rows.step({2: "go"})
        pool.end()
        deadline = time.monotonic() + 5.0
        while is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_alive(child)


def test_opening_again_has_time_for_the_turns_so_far(tmp_path):
    turns = tuple(Turn("go", "read") for _ in range(3))
    with EnvironmentPool(config_of(timeout_seconds=0.25, open_timeout_seconds=0.25)) as pool:
        pool.submit(0, Episode("p", {"log": str(tmp_path / "log"), "open": "hang"}, 0, turns, "go"))
        started = time.monotonic()
        (result,) = pool.collect([0])
        assert 1.0 <= time.monotonic() - started < 4.0
        limit = "environment.open_timeout_seconds = 0.25 and environment.timeout_seconds = 0.25 for each of 3 turns"
        assert result.error.endswith(limit)


def test_the_recorded_turns_stand_whatever_a_replay_answers(rows):
    rows.turns[0] = (Turn("go", "something else"),) * 2
    assert rows.step({0: "go"})[0] == StepResult(observation=Observation("3 of p0 "))


def test_an_environment_with_both_forms_is_refused():
    for isolation in ("inline", "process"):
        with pytest.raises(ValueError, match="has both open"):
            EnvironmentPool(config_of("Both", isolation=isolation))
