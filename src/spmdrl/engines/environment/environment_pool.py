"""Asynchronous environment steps: submitted, run in processes that can be killed, and collected."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict
from typing import Any

from spmdrl.engines.environment import environment_runner
from spmdrl.engines.environment.environment_runner import (
    KEY,
    StepResult,
    load_environment,
    read_step,
    take_step,
)
from spmdrl.engines.environment.episode import Episode
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.runtime.workers.call_pool import CallPool
from spmdrl.runtime.workers.call_queue import Call
from spmdrl.runtime.workers.isolation import runs_inline
from spmdrl.runtime.workers.process import PendingCall, WorkerSetup
from spmdrl.runtime.workers.strikes import Strikes, Subject
from spmdrl.runtime.workers.verdict import Verdict


class EnvironmentPool:
    """Pool that runs steps asynchronously: `submit` returns at once, `collect` waits.

    The constructor builds the environment, in a child unless inline, and raises ValueError if it can't be built.
    `close` leaves no process behind.
    """

    def __init__(self, config: EnvironmentConfig, num_workers: int | None = None, strikes: Strikes | None = None):
        assert config.function is not None, f"without {KEY} there is no environment"
        setup = WorkerSetup(
            section="environment",
            functions_key=KEY,
            variables_key="environment.variables",
            runner=environment_runner.__name__,
            functions=[config.function],
            environment=config.variables,
            memory_limit_gib=config.memory_limit_gib,
            settings={"timeout_seconds": config.timeout_seconds},
        )
        environment = load_environment(config.function) if runs_inline(config.isolation) else None
        self._calls = CallPool(
            setup,
            _Steps(),
            num_workers=num_workers or config.workers,
            timeout_seconds=config.timeout_seconds,
            inline=None if environment is None else lambda call: take_step(environment, call.message),
            strikes=strikes,
        )

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, key: Hashable, episode: Episode, subject: Subject | None = None) -> None:
        """Request the step after a turn under a key of the caller's; `subject` is the row's prompt."""
        self._calls.submit([Call(key, asdict(episode), subject=subject)])

    def wait(self, keys: Sequence[Hashable], seconds: float | None = None) -> float | None:
        """Return the `time.perf_counter` of the last of these results; None if some are missing after `seconds`."""
        return self._calls.wait(keys, seconds)

    def collect(self, keys: Sequence[Hashable]) -> list[StepResult]:
        """Wait for the results of these steps and take them out, in the order of `keys`."""
        return self._calls.collect(keys)

    def close(self) -> None:
        """End the environment's processes with all that they started."""
        self._calls.close()


class _Steps:
    """Reader of an environment's workers: their messages as step results."""

    def read(self, answer: Any, call: PendingCall) -> StepResult | None:
        return read_step(answer)

    def failed(self, call: PendingCall, verdict: Verdict, error: str) -> StepResult:
        return StepResult(verdict=verdict, error=error)
