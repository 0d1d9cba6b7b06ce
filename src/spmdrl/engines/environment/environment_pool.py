"""Asynchronous environment steps: submitted, run in processes that can be killed, and collected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from spmdrl.engines.environment import environment_runner, program_runner
from spmdrl.engines.environment.environment_runner import (
    OPENS,
    SESSION,
    EnvironmentFacts,
    StepResult,
    Steps,
    load_environment,
    name_of_tool,
    read_step,
)
from spmdrl.engines.environment.episode import Episode, Row, Turn
from spmdrl.engines.environment.journal import Journal
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.runtime.workers.call_pool import CallPool
from spmdrl.runtime.workers.call_queue import Call
from spmdrl.runtime.workers.isolation import runs_inline
from spmdrl.runtime.workers.process import PendingCall, WorkerSetup
from spmdrl.runtime.workers.strikes import Strikes, Subject
from spmdrl.runtime.workers.verdict import Verdict

_OF_TURN = [field.name for field in fields(Turn) if field.name != "observation"]


class EnvironmentPool:
    """Pool that runs steps asynchronously: `submit` returns at once, `collect` waits.

    The constructor builds the environment, in a child unless inline, and raises ValueError if it can't be built.
    `close` leaves no process behind.

    A session lives in one worker from its row's first step to `end`. Wherever it isn't any more, it is opened again.
    """

    def __init__(
        self, config: EnvironmentConfig, num_workers: int | None = None, strikes: Strikes | None = None,
        journal: Journal | None = None,
    ):  # fmt: skip
        """`journal` has answers to calls that an earlier job of the run made."""
        assert config.key is not None, "the run has no environment"
        setup = WorkerSetup(
            section="environment",
            functions_key=config.key,
            variables_key="environment.variables",
            runner=(program_runner if config.program else environment_runner).__name__,
            functions=config.specs,
            environment=config.variables,
            memory_limit_gib=config.memory_limit_gib,
            settings={
                "timeout_seconds": config.timeout_seconds,
                "open_timeout_seconds": config.open_timeout_seconds,
                "memory_limit_gib": config.memory_limit_gib,
                "key": config.key,
                "is_command": not isinstance(config.program, str),
                "on_fork": config.on_fork,
            },
        )
        inline = runs_inline(config.isolation) and not config.program
        steps = Steps(load_environment(config.key, config.specs), config.key) if inline else None
        self._config = config
        self._journal = journal
        self._open: set[Hashable] = set()
        """rows with a session"""
        self._called: dict[Hashable, set[str]] = {}
        """tools that the turns under way called"""
        self._figures = defaultdict[str, list[float]](list)
        self._calls = CallPool(
            setup,
            self,
            num_workers=num_workers or config.workers,
            timeout_seconds=config.timeout_seconds,
            inline=None if steps is None else lambda call: self._kept(call.key, steps.answer(call.message)),
            strikes=strikes,
        )
        self.facts = steps.facts if steps is not None else EnvironmentFacts(**self._calls.facts)
        self._tools = set(map(name_of_tool, self.facts.tools or ()))

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, key: Hashable, row: Row, subject: Subject | None = None) -> None:
        """Request the step after an episode's turn, or the opening of a row, under a key of the caller's.

        `subject` is the row's prompt.
        """
        message = asdict(row)
        if isinstance(row, Episode):
            self._called[key] = self._tools.intersection(call.name for call in row.calls)
        if self._journal is not None and (known := self._journal.find(key, message)) is not None:
            self._calls.deliver(key, self._counted(key, known))
            return
        if not self.facts.has_sessions:
            self._calls.submit([Call(key, message, subject=subject)])
            return
        self._open.add(key)
        step: dict[str, Any] = {SESSION: key}
        if isinstance(row, Episode):
            step |= {name: message.pop(name) for name in _OF_TURN}
        else:
            step, message = step | {OPENS: True}, {**message, "turns": ()}
        opening = self._opening(key, message, subject)
        self._calls.submit([Call(key, step, subject=subject, affinity=key, opening=opening)])

    def _opening(self, row: Hashable, begun: dict[str, Any], subject: Subject | None) -> Call:
        """Return the call that opens a row's session, with time to repeat the turns so far."""
        config, num_turns = self._config, len(begun["turns"])
        limit = f"environment.open_timeout_seconds = {config.open_timeout_seconds:g}"
        if num_turns:
            limit += f" and environment.timeout_seconds = {config.timeout_seconds:g} for each of {num_turns} turns"
        seconds = config.open_timeout_seconds + num_turns * config.timeout_seconds
        return Call(None, {SESSION: row, **begun}, seconds=seconds, subject=subject, limit=limit)

    def try_open(self, row: Row) -> None:
        """Open a row's session, if the environment has any, and close it. Raises ValueError if it can't be opened."""
        if not self.facts.has_sessions:
            return
        opening = self._opening(SESSION, {**asdict(row), "turns": ()}, None)
        self._calls.submit([replace(opening, key=SESSION, affinity=SESSION)])
        (result,) = self._calls.collect([SESSION])
        self._calls.submit([Call(None, {SESSION: SESSION}, affinity=SESSION)])
        if result.verdict is not None:
            key, spec = self._config.key, ", ".join(self._config.specs)
            reason = str(result.error).removeprefix(f"{key}: ")
            raise ValueError(f"{key}: '{spec}' can't open a session for the first prompt: {reason}")

    def end(self, keys: Iterable[Hashable] | None = None) -> None:
        """Close the sessions of these rows, or of all, without waiting."""
        for key in self._open.copy() if keys is None else self._open.intersection(keys):
            self._open.remove(key)
            self._calls.submit([Call(None, {SESSION: key}, affinity=key)])

    def wait(self, keys: Sequence[Hashable], seconds: float | None = None) -> float | None:
        """Return the `time.perf_counter` of the last of these results; None if some are missing after `seconds`."""
        return self._calls.wait(keys, seconds)

    def collect(self, keys: Sequence[Hashable]) -> list[StepResult]:
        """Wait for the results of these steps and take them out, in the order of `keys`."""
        return self._calls.collect(keys)

    def take_figures(self) -> Mapping[str, Sequence[float]]:
        """Return figures of the steps and openings since the last call of this, by their metrics' names.

        `seconds` are of answered ones; `errors/{tool}` has 1 for a step that called the tool and failed, else 0.
        """
        taken, self._figures = self._figures, defaultdict(list)
        return taken

    def close(self) -> None:
        """End the environment's processes with all that they started."""
        self.end()
        self._calls.close()
        if self._journal is not None:
            self._journal.close()

    def read(self, answer: Any, call: PendingCall, seconds: float) -> StepResult | None:
        """Return the result in a worker's message; None if something else wrote it."""
        tools = self._called.get(call.key)
        kinds = [] if tools is None else ["seconds", *(f"seconds/{tool}" for tool in tools)]
        for kind in ["open_seconds"] if call.key is None and not call.is_last else kinds:
            self._figures[kind].append(seconds)
        result = read_step(answer)
        return result and self._kept(call.key, result)

    def failed(self, call: PendingCall, verdict: Verdict, error: str) -> StepResult:
        """Return the result of a step whose process was lost."""
        return self._kept(call.key, StepResult(verdict=verdict, error=error))

    def _kept(self, key: Hashable, result: StepResult) -> StepResult:
        if self._journal is not None and key is not None:
            self._journal.add(key, result)
        return self._counted(key, result)

    def _counted(self, key: Hashable, result: StepResult) -> StepResult:
        errors = getattr(result.observation, "errors", ())
        for tool in self._called.pop(key, ()):
            self._figures[f"errors/{tool}"].append(float(result.verdict is not None or tool in errors))
        return result
