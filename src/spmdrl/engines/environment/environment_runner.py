"""A worker process's side of an environment: builds it, holds its sessions, and runs step after step."""

from __future__ import annotations

import bdb
import json
import numbers
import reprlib
import signal
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn

from spmdrl.engines.environment.calculator import Calculator
from spmdrl.engines.environment.episode import (
    End,
    Environment,
    Episode,
    Observation,
    Opening,
    Reply,
    Row,
    Session,
    Tokens,
    Turn,
    fields_of,
)
from spmdrl.engines.environment.gym_classes import GymnasiumEnvironment, SkyrlEnvironment
from spmdrl.engines.environment.mcp import load_mcp
from spmdrl.engines.environment.trl import load_factory, load_tools
from spmdrl.nouns.settings.role_configs import MAX_MAGNITUDE
from spmdrl.runtime.screen import show
from spmdrl.runtime.workers.loading import Loaded, explain, load_attribute, load_registered
from spmdrl.runtime.workers.verdict import Verdict
from spmdrl.runtime.workers.worker import no_terminal

KEY = "environment.function"
MAX_CHARACTERS = 1 << 20
"""limit of an observation"""
SESSION = "session"
"""key of the row in messages to sessions"""
OPENS = "opens"
"""key in messages that ask a session for its opening"""
BUILT_IN: dict[str, type[Environment]] = {"calculator": Calculator}


def load_class(key: str, specs: Sequence[str]) -> Callable[[], Any]:
    """Load `calculator` or an environment's class."""
    (spec,) = specs
    kind: Callable[[], Any] = BUILT_IN[spec] if spec in BUILT_IN else load_attribute(spec, key, BUILT_IN, kind="class")
    return kind


FORMS: dict[str, Callable[[str, Sequence[str]], Callable[[], Any]]] = {
    KEY: load_class,
    "environment.tools": load_tools,
    "environment.factory": load_factory,
    "environment.mcp": load_mcp,
    "environment.skyrl": partial(load_registered, SkyrlEnvironment, "skyrl_gym", "skyrl-gym"),
    "environment.gymnasium": partial(load_registered, GymnasiumEnvironment, "gymnasium", "gymnasium"),
}
"""loaders of environments, by the key that names them"""


@dataclass(frozen=True)
class EnvironmentFacts:
    """Facts about an environment, from the process that built it."""

    has_sessions: bool
    tools: list[dict[str, Any]] | None
    """schemas of functions that the model may call; None leaves turns unread"""
    has_openings: bool = False
    """True if sessions add to the prompt's last message"""
    has_own_prompts: bool = False
    """True if openings are whole conversations, in place of the data's prompts"""

    @classmethod
    def of(cls, environment: Any, key: str) -> EnvironmentFacts:
        """Read the attributes of an environment. Raises ValueError for tools that aren't schemas."""
        tools = getattr(environment, "tools", None)
        try:
            if tools is not None and not all(isinstance(name_of_tool(tool), str) for tool in tools):
                raise TypeError
            tools = json.loads(json.dumps(tools))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(
                f"{key}: the environment's tools are {tools!r:.200}, but must be a list of JSON schemas of functions, "
                "such as transformers.utils.get_json_schema(function) gives"
            ) from None
        opens = getattr(environment, "has_openings", False) is True
        return cls(callable(getattr(environment, "open", None)), tools, opens)


def name_of_tool(tool: Mapping[str, Any]) -> Any:
    """Return the name of a function from its schema."""
    return tool.get("function", tool)["name"]


@dataclass(frozen=True)
class StepResult:
    """Outcome of one step; `verdict` is None if it succeeded."""

    observation: Observation | Reply | Tokens | None = None
    """text, messages or tokens that the model reads; None if the row has ended"""
    reward: float | None = None
    verdict: Verdict | None = None
    error: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> StepResult:
        """Build from JSON of `asdict`'s result. Raises KeyError, TypeError or ValueError for anything else."""
        verdict = None if fields["verdict"] is None else Verdict(fields["verdict"])
        read = fields["observation"] or {}
        kinds: dict[str, type[Any]] = {"tools": Opening, "messages": Reply, "token_ids": Tokens, "text": Observation}
        kind = next((kind for name, kind in kinds.items() if name in read), Observation)
        return cls(kind(**read) if read else None, fields["reward"], verdict, fields["error"])


def load_environment(key: str, specs: Sequence[str], alarm_seconds: float = 0.0) -> Any:
    """Build the environment that a key's functions or classes make. Raises ValueError if it can't be built.

    After `alarm_seconds` of building, not counting imports, this process gets a SIGALRM.
    """
    build, spec = FORMS[key](key, specs), ", ".join(specs)
    try:
        signal.setitimer(signal.ITIMER_REAL, alarm_seconds)
        environment = build()
    except bdb.BdbQuit:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{key}: '{spec}' can't be built: {explain(error)}") from error
    opens, steps = (callable(getattr(environment, name, None)) for name in ("open", "step"))
    if not (opens or steps):
        raise ValueError(f"{key}: '{spec}' has no method step(episode) nor open(row); see docs/environments.md")
    if opens and steps:
        raise ValueError(
            f"{key}: '{spec}' has both open(row) and step(episode); leave step(turn) to the session that open returns, "
            "or remove open if steps need no state of a row"
        )
    return environment


def load(specs: Sequence[str], settings: Mapping[str, Any]) -> Loaded:
    """Build the environment within the time of `settings`, and return its message handler. Raises ValueError."""

    def is_late(*_: object) -> NoReturn:
        raise TimeoutError(f"it takes longer than environment.timeout_seconds = {settings['timeout_seconds']:g}")

    signal.signal(signal.SIGALRM, is_late)
    key = settings["key"]
    environment = load_environment(key, specs, settings["timeout_seconds"])
    steps, keeps = Steps(environment, key), getattr(environment, "keeps_processes", False)
    signal.setitimer(signal.ITIMER_REAL, 0)

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        try:
            return asdict(steps.answer(message))
        except BaseException as error:
            return asdict(StepResult(verdict=Verdict.CRASHED, error=f"{key}: {explain(error)}"))

    return Loaded(answer, asdict(steps.facts), lambda: keeps or bool(steps.sessions))


class Steps:
    """Steps of an environment, with the sessions that this process holds."""

    def __init__(self, environment: Any, key: str = KEY):
        self._environment, self._key = environment, key
        self.facts = EnvironmentFacts.of(environment, key)
        self.sessions: dict[Hashable, Session] = {}
        self._unopened: dict[Hashable, StepResult] = {}
        """failures of rows that couldn't be opened"""

    def answer(self, message: dict[str, Any]) -> StepResult:
        """Open a row's session, take a step or close it; an exception becomes the verdict `CRASHED`."""
        if not self.facts.has_sessions:
            return take_step(self._environment, message, self._key)
        row = message[SESSION]
        if OPENS in message:
            return self._unopened.get(row) or result_of(
                lambda: Observation(getattr(self.sessions[row], "opening", "")), self._key
            )
        if "response" in message:
            turn = Turn.of({name: value for name, value in message.items() if name != SESSION})
            return self._unopened.get(row) or result_of(lambda: self.sessions[row].step(turn), self._key)
        self._close(row)
        return self._open(row, message) if "turns" in message else StepResult()

    def _open(self, row: Hashable, message: Mapping[str, Any]) -> StepResult:
        turns = tuple(map(Turn.of, message["turns"]))

        def begin() -> End:
            session = self._environment.open(Row(message["prompt"], message["columns"], message["seed"]))
            if not callable(getattr(session, "step", None)):
                raise TypeError(f"open gave {reprlib.repr(session)}, which has no method step(turn)")
            self.sessions[row] = session
            if turns and callable(restore := getattr(session, "restore", None)):
                restore(turns)
            else:
                # What was answered then stands; this only brings the session there.
                for turn in turns:
                    session.step(replace(turn, observation=""))
            return End()

        result = self._unopened[row] = result_of(begin, self._key)
        if result.verdict is None:
            del self._unopened[row]
        return result

    def _close(self, row: Hashable) -> None:
        self._unopened.pop(row, None)
        close = getattr(self.sessions.pop(row, None), "close", None)
        if callable(close):
            result = result_of(lambda: (close(), End())[1], self._key)
            if result.verdict is not None:
                show(f"a session couldn't be closed: {result.error}", stream=sys.stderr)


def take_step(environment: Environment, message: dict[str, Any], key: str = KEY) -> StepResult:
    """Run one step of the environment and check its outcome; an exception becomes the verdict `CRASHED`."""
    episode = Episode(**{**fields_of(message), "turns": tuple(map(Turn.of, message["turns"]))})
    return result_of(lambda: environment.step(episode), key)


def result_of(step: Callable[[], object], key: str) -> StepResult:
    """Check what a step gives."""
    try:
        outcome = step()
    except bdb.BdbQuit:
        return StepResult(verdict=Verdict.CRASHED, error=f"{key}: {no_terminal('a debugger', 'environment')}")
    except (Exception, SystemExit) as error:
        return StepResult(verdict=Verdict.CRASHED, error=f"{key}: {explain(error)}")
    if isinstance(outcome, Observation | Reply | Tokens) and is_observation(outcome):
        return StepResult(observation=replace(outcome, reward=float(outcome.reward)))
    if isinstance(outcome, End):
        if outcome.reward is None:
            return StepResult()
        if is_reward(outcome.reward):
            return StepResult(reward=float(outcome.reward))
    # reprlib copies a huge text only if it is alone.
    shown = f"Observation({reprlib.repr(outcome.text)})" if isinstance(outcome, Observation) else reprlib.repr(outcome)
    problem = (
        f"step gave {shown}, but must give Observation(text, before, after, reward) or Reply(messages, reward) of at "
        f"most {MAX_CHARACTERS} characters that UTF-8 has, End() or End(reward); rewards are finite numbers"
    )
    return StepResult(verdict=Verdict.MALFORMED, error=f"{key}: {problem}")


def is_reward(value: Any) -> bool:
    """Return True if a value is a number that can be a reward."""
    try:
        return isinstance(value, numbers.Real) and abs(float(value)) <= MAX_MAGNITUDE
    except OverflowError:
        return False


def is_observation(value: Any) -> bool:
    """Return True if a value is an observation or reply whose texts a tokenizer takes in acceptable time."""
    if not isinstance(value, Observation | Reply | Tokens) or not is_reward(value.reward):
        return False
    if isinstance(value, Tokens):
        ids = value.token_ids
        return len(ids) <= MAX_CHARACTERS and all(type(one) is int and one >= 0 for one in ids)
    if isinstance(value, Reply):
        try:
            written = json.dumps([value.messages, getattr(value, "tools", None)], ensure_ascii=False)
            are_objects = all(isinstance(message, Mapping) for message in value.messages)
            are_names = all(isinstance(name, str) for name in value.errors)
            return are_objects and are_names and len(written) <= MAX_CHARACTERS and bool(written.encode())
        except (TypeError, ValueError, RecursionError):
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
