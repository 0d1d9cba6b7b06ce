"""A worker process's side of an environment: builds it and runs step after step."""

from __future__ import annotations

import bdb
import numbers
import reprlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from spmdrl.engines.environment.calculator import Calculator
from spmdrl.engines.environment.episode import End, Environment, Episode, Observation, Turn
from spmdrl.nouns.settings.role_configs import MAX_MAGNITUDE
from spmdrl.runtime.workers.loading import Loaded, explain, load_attribute
from spmdrl.runtime.workers.verdict import Verdict
from spmdrl.runtime.workers.worker import no_terminal

KEY = "environment.function"
MAX_CHARACTERS = 1 << 20
"""limit of an observation"""
BUILT_IN: dict[str, type[Environment]] = {"calculator": Calculator}


@dataclass(frozen=True)
class StepResult:
    """Outcome of one step; `verdict` is None if it succeeded."""

    observation: Observation | None = None
    """text that the model reads; None if the row has ended"""
    reward: float | None = None
    verdict: Verdict | None = None
    error: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> StepResult:
        """Build from JSON of `asdict`'s result. Raises KeyError, TypeError or ValueError for anything else."""
        verdict = None if fields["verdict"] is None else Verdict(fields["verdict"])
        observation = None if fields["observation"] is None else Observation(**fields["observation"])
        return cls(observation, fields["reward"], verdict, fields["error"])


def load_environment(spec: str, alarm_seconds: float = 0.0) -> Environment:
    """Build `calculator`, `pkg.mod:Name` or `file.py:Name`. Raises ValueError if it can't be built.

    After `alarm_seconds` of building, not counting imports, this process gets a SIGALRM.
    """
    kind = BUILT_IN[spec] if spec in BUILT_IN else load_attribute(spec, KEY, BUILT_IN, kind="class")
    try:
        signal.setitimer(signal.ITIMER_REAL, alarm_seconds)
        environment = kind()
    except bdb.BdbQuit:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{KEY}: '{spec}' can't be built: {explain(error)}") from error
    if not callable(getattr(environment, "step", None)):
        raise ValueError(f"{KEY}: '{spec}' has no method step(episode); docs/environments.md has an example")
    return environment


def load(specs: Sequence[str], settings: Mapping[str, Any]) -> Loaded:
    """Build the environment within the time of `settings`, and return its message handler. Raises ValueError."""

    def is_late(*_: object) -> NoReturn:
        raise TimeoutError(f"it takes longer than environment.timeout_seconds = {settings['timeout_seconds']:g}")

    signal.signal(signal.SIGALRM, is_late)
    environment = load_environment(specs[0], settings["timeout_seconds"])
    signal.setitimer(signal.ITIMER_REAL, 0)

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        try:
            return asdict(take_step(environment, message))
        except BaseException as error:
            return asdict(StepResult(verdict=Verdict.CRASHED, error=f"{KEY}: {explain(error)}"))

    return Loaded(answer)


def take_step(environment: Environment, message: dict[str, Any]) -> StepResult:
    """Run one step of the environment and check its outcome; an exception becomes the verdict `CRASHED`."""
    turns = tuple(Turn(**turn) for turn in message["turns"])
    try:
        outcome = environment.step(Episode(**{**message, "turns": turns}))
    except bdb.BdbQuit:
        return StepResult(verdict=Verdict.CRASHED, error=f"{KEY}: {no_terminal('a debugger', 'environment')}")
    except (Exception, SystemExit) as error:
        return StepResult(verdict=Verdict.CRASHED, error=f"{KEY}: {explain(error)}")
    if isinstance(outcome, Observation) and is_observation(outcome):
        return StepResult(observation=outcome)
    if isinstance(outcome, End):
        if outcome.reward is None:
            return StepResult()
        if is_reward(outcome.reward):
            return StepResult(reward=float(outcome.reward))
    # reprlib copies a huge text only if it is alone.
    shown = f"Observation({reprlib.repr(outcome.text)})" if isinstance(outcome, Observation) else reprlib.repr(outcome)
    problem = (
        f"step gave {shown}, but must give Observation(text, before, after) of at most {MAX_CHARACTERS} "
        "characters that UTF-8 has, End() or End(reward=a finite number)"
    )
    return StepResult(verdict=Verdict.MALFORMED, error=f"{KEY}: {problem}")


def is_reward(value: Any) -> bool:
    """Return True if a value is a number that can be a row's reward."""
    try:
        return isinstance(value, numbers.Real) and abs(float(value)) <= MAX_MAGNITUDE
    except OverflowError:
        return False


def is_observation(value: Any) -> bool:
    """Return True if a value is an observation whose texts a tokenizer takes in acceptable time."""
    if not isinstance(value, Observation):
        return False
    texts = (value.before, value.text, value.after)
    if not all(isinstance(text, str) for text in texts) or sum(map(len, texts)) > MAX_CHARACTERS:
        return False
    return not any("\ud800" <= letter <= "\udfff" for text in texts for letter in text)


def read_step(answer: Any) -> StepResult | None:
    """Return the result in a worker's message; None if something other than `take_step` wrote it."""
    try:
        result = StepResult.of(answer)
    except (KeyError, TypeError, ValueError):
        return None
    is_sound = (
        (result.observation is None or is_observation(result.observation))
        and (result.reward is None or is_reward(result.reward))
        and isinstance(result.error, str | None)
        and (result.verdict is None or not result.verdict.has_reward)
    )
    return result if is_sound else None
