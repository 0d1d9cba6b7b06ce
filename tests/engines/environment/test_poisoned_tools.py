"""A tool's step comes back in time with an explicit verdict, whatever the tool does."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.environment.environment_runner import MAX_CHARACTERS, StepResult, read_step, take_step
from spmdrl.engines.environment.episode import Episode, Observation
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.runtime.workers.strikes import Strikes, Subject
from spmdrl.runtime.workers.verdict import Verdict

TOOLS = Path(__file__).with_name("poisoned_tools.py")
TIMEOUT_SECONDS = 1.0


@pytest.fixture(scope="module")
def pool():
    config = EnvironmentConfig(
        f"{TOOLS}:Poisoned", timeout_seconds=TIMEOUT_SECONDS, memory_limit_gib=0.2, isolation="process"
    )
    with EnvironmentPool(config) as pool:
        yield pool


def step(pool: EnvironmentPool, response: str, subject: Subject | None = None) -> StepResult:
    pool.submit("row", Episode("prompt", {}, 0, (), response), subject)
    return pool.collect(["row"])[0]


VERDICTS = {
    "stuck": Verdict.TIMED_OUT, "loop": Verdict.TIMED_OUT, "raise": Verdict.CRASHED, "exit": Verdict.CRASHED,
    "die": Verdict.CRASHED, "segfault": Verdict.CRASHED, "hog": Verdict.CRASHED, "huge": Verdict.MALFORMED,
    "half a pair": Verdict.MALFORMED, "bytes": Verdict.MALFORMED, "text": Verdict.MALFORMED,
    "nothing": Verdict.MALFORMED, "class": Verdict.MALFORMED, "no length": Verdict.CRASHED, "NaN": Verdict.MALFORMED,
    "huge reward": Verdict.MALFORMED, "text reward": Verdict.MALFORMED, "prints": None, "orphan": None,
    "input": Verdict.CRASHED, "interrupt": Verdict.CRASHED, "infinite turn": Verdict.MALFORMED,
    "text for a turn": Verdict.MALFORMED, "a turn by numpy": None,
}  # fmt: skip


@pytest.mark.parametrize("poison", VERDICTS)
def test_a_poisoned_step_has_its_verdict_in_time_and_the_next_step_is_taken(pool, poison):
    assert step(pool, "fine") == StepResult(observation=Observation("fine"))
    started = time.monotonic()
    result = step(pool, poison)
    assert time.monotonic() - started < TIMEOUT_SECONDS + 4
    assert result.verdict is VERDICTS[poison], result
    assert (result.error is None) == (result.verdict is None) and len(result.error or "") < 2000
    assert step(pool, "fine") == StepResult(observation=Observation("fine"))


def test_an_observation_comes_back_with_what_stands_around_it():
    given = Observation("a</s>", before="</s>[", after="]")
    result = take_step(SimpleNamespace(step=lambda episode: given), asdict(Episode("prompt", {}, 0, (), "")))
    assert read_step(json.loads(json.dumps(asdict(result)))) == StepResult(observation=given)
    for broken in ({"text": 7}, {"text": "a", "after": None}, {"text": "a", "before": "1" * MAX_CHARACTERS}, "text"):
        assert read_step(asdict(result) | {"observation": broken}) is None


def test_what_a_step_raises_is_named(pool):
    assert "environment.function: KeyboardInterrupt: stop" in step(pool, "interrupt").error


def test_an_environment_has_the_time_of_a_step_to_be_built():
    config = EnvironmentConfig(f"{TOOLS}:SlowToBuild", timeout_seconds=0.5, isolation="process")
    with pytest.raises(ValueError, match="can't be built: .* takes longer than environment.timeout_seconds = 0.5"):
        EnvironmentPool(config)


def test_of_a_huge_text_only_what_is_shown_is_read():
    class Tool:
        def step(self, episode):
            return Observation("1" * (MAX_CHARACTERS + 1))

    result = take_step(Tool(), asdict(Episode("prompt", {}, 0, (), "")))
    assert result.verdict is Verdict.MALFORMED and "step gave Observation('111" in result.error


def test_a_row_that_costs_two_workers_gets_no_third():
    config = EnvironmentConfig(f"{TOOLS}:Poisoned", timeout_seconds=0.3, isolation="process")
    strikes, bad, good = Strikes(), Subject("7", "bad"), Subject("8", "good")
    with EnvironmentPool(config, strikes=strikes) as pool:
        assert [step(pool, what, bad).verdict for what in ("stuck", "raise", "die")] == [
            Verdict.TIMED_OUT, Verdict.CRASHED, Verdict.CRASHED,
        ]  # fmt: skip
        third = step(pool, "stuck", bad)
        assert third.verdict is Verdict.QUARANTINED and "cost 2 workers" in third.error
        pool.submit("refused", Episode("prompt", {}, 0, (), "stuck"), bad)
        pool.submit("behind it", Episode("prompt", {}, 0, (), "fine"), good)
        assert pool.wait(["refused", "behind it"], 10.0) is not None, "others don't wait for what is never made"
        assert [one.verdict for one in pool.collect(["refused", "behind it"])] == [Verdict.QUARANTINED, None]
    assert [strike.subject.name for strike in strikes.take_new()] == ["7", "7"], "to raise costs no worker"
