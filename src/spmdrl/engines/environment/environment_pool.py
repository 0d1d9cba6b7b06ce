"""Steps of an environment while other work goes on: submitted, taken in processes that can be killed, and collected."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from annotated_types import Ge, Interval

from spmdrl.engines.environment import environment_runner
from spmdrl.engines.environment.environment_runner import (
    KEY,
    StepResult,
    load_environment,
    read_step,
    take_step,
)
from spmdrl.engines.environment.episode import Episode
from spmdrl.engines.workers.call_pool import CallPool, Isolation, runs_inline
from spmdrl.engines.workers.call_queue import Call
from spmdrl.engines.workers.process import PendingCall, WorkerSetup
from spmdrl.engines.workers.strikes import Strikes, Subject
from spmdrl.engines.workers.verdict import Verdict


@dataclass(frozen=True)
class EnvironmentConfig:
    """What answers the model between its turns."""

    function: str | None = None
    """the environment: calculator, or a class pkg.mod:Name or file.py:Name with a method step(episode); null: none,
    each response is one turn"""
    return_after_steps: Annotated[int, Ge(0)] = 2
    """engine steps after which a row whose turn ended is continued. The number is fixed, so that a run repeats bit for
    bit; the engine waits where the environment takes longer, so a slow one wants more; 0: the engine waits for each
    step at once"""
    timeout_seconds: Annotated[float, Interval(gt=0, lt=math.inf)] = 15.0
    """a step of the environment that takes longer is killed, and its row has no reward; one that takes longer to be
    built is refused"""
    workers: Annotated[int, Ge(1)] = 1
    """environment processes per generation replica"""
    isolation: Isolation = "auto"
    """process: in child processes, which can be killed; inline: in the training process; auto: inline under pdb, else
    process"""
    memory_limit_gib: Annotated[float, Interval(gt=0, lt=math.inf)] | None = 4.0
    """memory in GiB that an environment process and all that it starts may hold, shared memory included; null: no
    limit"""
    variables: tuple[str, ...] = ()
    """environment variables passed to the processes beside the common ones, such as the key of a service"""


class EnvironmentPool:
    """Takes steps asynchronously: `submit` returns at once, `collect` waits.

    The constructor builds the environment, in a child unless inline, and raises ValueError where it can't be built.
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
            inline=None if environment is None else lambda message: take_step(environment, message),
            strikes=strikes,
        )

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, key: Hashable, episode: Episode, subject: Subject | None = None) -> None:
        """Ask for the step after a turn under a key of the caller's; `subject` is the row's prompt."""
        self._calls.submit([Call(key, asdict(episode), subject=subject)])

    def wait(self, keys: Sequence[Hashable], seconds: float | None = None) -> float | None:
        """The `time.perf_counter` at which the last of these results came; None if some haven't in so many seconds."""
        return self._calls.wait(keys, seconds)

    def collect(self, keys: Sequence[Hashable]) -> list[StepResult]:
        """Wait for the results of these steps and take them out, in the order of `keys`."""
        return self._calls.collect(keys)

    def close(self) -> None:
        """End the environment's processes with all that they started."""
        self._calls.close()


class _Steps:
    """The answers of an environment's calls."""

    def read(self, answer: Any, call: PendingCall) -> StepResult | None:
        return read_step(answer)

    def failed(self, call: PendingCall, verdict: Verdict, error: str) -> StepResult:
        return StepResult(verdict=verdict, error=error)
