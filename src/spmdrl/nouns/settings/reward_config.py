"""Settings of rewards, the environment, and the processes that run the user's functions."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from spmdrl.nouns.settings.role_configs import JUDGE_PART, MODEL_PART, JudgeConfig, ScorerConfig
from spmdrl.runtime.workers.isolation import Isolation, is_debugged


def function_names(specs: Sequence[str]) -> tuple[str, ...]:
    """Return each function's short name for metrics, or its whole spec where two would share one."""
    short = [spec.rpartition(":")[2] for spec in specs]
    return tuple(name if short.count(name) == 1 else spec for name, spec in zip(short, specs, strict=True))


CODE, GYM = "code", "reasoning_gym"
"""names of the rewards"""


@dataclass(frozen=True)
class CodeConfig:
    """Score of the program in a response, and limits of its resources."""

    score: Literal["share", "all"] = "share"
    """score of a row; share: the share of its tests that pass; all: 1 if every test passes, else 0"""
    test_seconds: Annotated[float, Interval(gt=0, lt=math.inf)] = 4.0
    """time limit of each test, after which the program is killed"""
    row_seconds: Annotated[float, Interval(gt=0, lt=math.inf)] = 12.0
    """time limit of all tests of a row; tests not reached count as failed. reward.timeout_seconds covers the rest of a
    call"""
    memory_gib: Annotated[float, Interval(ge=0.125, lt=math.inf)] = 1.0
    """limit of a program's address space in GiB"""
    readable: tuple[str, ...] = ()
    """folders that programs may read and import from, beside Python's own library"""

    def __post_init__(self) -> None:
        if self.test_seconds > self.row_seconds:
            raise ValueError(
                f"reward.code.test_seconds {self.test_seconds:g} is more than reward.code.row_seconds "
                f"{self.row_seconds:g}; a row's tests end together, so lower the first"
            )
        for folder in self.readable:
            if not os.path.isabs(folder) or folder != os.path.normpath(folder):
                raise ValueError(
                    f"reward.code.readable has {folder!r}; give absolute paths, without .. or a / at the end"
                )


@dataclass(frozen=True, kw_only=True)
class ProcessesConfig:
    """Child processes that run a user's functions."""

    timeout_seconds: Annotated[float, Interval(gt=0, lt=math.inf)] = 15.0
    """time limit of one call, which is then killed and leaves its rows without a reward; the reward code gets
    reward.code.row_seconds per row on top; an environment that takes longer to build is refused"""
    workers: Annotated[int, Ge(1)] = 1
    """number of processes: per rank for rewards, per generation replica for environments"""
    isolation: Isolation = "auto"
    """place of the calls; process: in child processes, which can be killed; inline: in the training process; auto:
    inline under pdb, else process"""
    memory_limit_gib: Annotated[float, Interval(gt=0, lt=math.inf)] | None = 4.0
    """memory limit in GiB of a process and all its children, shared memory included; null: no limit"""
    variables: tuple[str, ...] = ()
    """environment variables passed to the processes beside the common ones, such as the key of a service"""


CallLevel = Literal["response", "group"]


@dataclass(frozen=True)
class RewardConfig(ProcessesConfig):
    """Computation of rewards."""

    functions: tuple[str, ...] = ("math",)
    """reward functions: exact (equal text), number (plain numbers), choice (letters), math (math-verify), code (the
    response's program against the row's tests), reasoning_gym (the scorer of a row's task), pkg.mod:fn or file.py:fn"""
    weights: tuple[float, ...] | None = None
    """weights of the functions in the reward, which is their sum; null: 1 each"""
    model: ScorerConfig | None = None
    """reward model, whose score of a whole response is one more part of the reward, named model; reward.functions may
    then be []; null: none"""
    code: CodeConfig = field(default_factory=CodeConfig)
    """settings of the reward code, which runs programs"""
    special_tokens: Literal["keep", "skip"] = "keep"
    """special tokens (as <think> may be) in the text of a response that functions, judges, environments and records
    get: keep or skip them; stop tokens and padding are always skipped"""
    judge: JudgeConfig | None = None
    """frozen language model that judges responses, beside the functions; null: none"""
    call_level: CallLevel = "response"
    """responses per call; response: scored as they finish, those of one prompt that finish in one engine step together;
    group: all responses to a prompt, once the last has finished, for functions that compare them"""
    max_error_rate: Annotated[float, Interval(ge=0, le=1)] = 0.05
    """largest share of a step's rows that may fail to be scored; beyond it the run stops"""

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError(
                "reward.functions is empty, and there is no reward.model or reward.judge; name at least one function, "
                "such as math"
            )
        if self.model is not None and MODEL_PART in function_names(self.functions):
            raise ValueError(
                f"reward.functions has one named {MODEL_PART}, as the part of the reward that reward.model gives; "
                "rename the function"
            )
        if len(set(self.functions)) != len(self.functions):
            raise ValueError(f"reward.functions {list(self.functions)} names a function twice; use reward.weights")
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} values, but reward.functions has {len(self.functions)}; "
                "give one weight per function, or leave reward.weights out"
            )
        if self.weights is not None and not all(map(math.isfinite, self.weights)):
            raise ValueError(f"reward.weights is {list(self.weights)}, but every weight must be finite")
        if self.judge is not None and JUDGE_PART in function_names(self.functions):
            raise ValueError(
                f"reward.functions has one named {JUDGE_PART}, as the part of the reward that reward.judge gives; "
                "rename the function"
            )
        if self.isolation == "inline" and "math" in self.functions and not is_debugged():
            raise ValueError(
                "reward.isolation is inline, but the reward math needs a process that can be killed (simplifying a "
                "formula may have no end); set reward.isolation to auto, which is inline under pdb"
            )

    @property
    def parts_beside(self) -> dict[str, float]:
        """Parts of the reward that models give, with their weights."""
        of_model = {} if self.model is None else {MODEL_PART: self.model.weight}
        return of_model if self.judge is None else of_model | {JUDGE_PART: self.judge.weight}

    @property
    def function_weights(self) -> tuple[float, ...]:
        """Weight of each function."""
        return self.weights or (1.0,) * len(self.functions)

    @property
    def part_weights(self) -> tuple[float, ...]:
        """The weight of each part of the reward."""
        return (*self.function_weights, *self.parts_beside.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the reward's parts, the functions first."""
        return (*function_names(self.functions), *self.parts_beside)


@dataclass(frozen=True)
class EnvironmentConfig(ProcessesConfig):
    """The environment, which answers the model between its turns."""

    function: str | None = None
    """environment: calculator, or a class pkg.mod:Name or file.py:Name with a method open(row), which returns an object
    for the row's turns, or step(episode), without state; null: none, each response is one turn"""
    tools: tuple[str, ...] = ()
    """functions that the model may call, pkg.mod:name or file.py:name, in TRL's form: a row goes on until a turn has no
    call. In place of function"""
    factory: str | None = None
    """class pkg.mod:Name or file.py:Name in the form of TRL's environment_factory: an object per row, begun by
    reset(**row), whose public methods the model may call, and get_reward. In place of function"""
    mcp: tuple[str, ...] = ()
    """server whose tools the model may call (Model Context Protocol): [its URL], or its command with arguments, which
    each process runs once. In place of function"""
    skyrl: str | None = None
    """environment of SkyRL-gym: a registered name, or a class pkg.mod:Name or file.py:Name. In place of function"""
    gymnasium: str | None = None
    """environment of gymnasium with numbers or text as actions: a registered id, or a class pkg.mod:Name or
    file.py:Name. In place of function"""
    program: str | tuple[str, ...] | None = None
    """program per row that asks the model for its turns by OpenAI's API, at OPENAI_BASE_URL with OPENAI_API_KEY: a
    command as a list, or a function pkg.mod:name or file.py:name of the row, whose value is the reward. In place of
    function"""
    on_fork: Literal["keep", "refuse", "split"] = "keep"
    """answer to a chat template that writes a turn otherwise once a message follows, such as without its thought, for
    environments with tools or whose turns are read; keep: train on turns as they were written, with a warning at the
    start; refuse: don't start; split: where the conversation as the template writes it, or a program's request, doesn't
    continue a row's tokens, it is read anew, and what follows is trained as a row of its own"""
    open_timeout_seconds: Annotated[float, Interval(gt=0, lt=math.inf)] = 60.0
    """time limit of open(row), or of a program's time to its first request; to open a row again adds timeout_seconds
    for each of its turns"""
    return_after_steps: Annotated[int, Ge(0)] = 2
    """engine steps between the end of a row's turn and its continuation; fixed, so that a run repeats bit for bit. The
    engine waits for an environment that takes longer; a slow one needs more; 0: wait for each step at once"""

    def __post_init__(self) -> None:
        if len(self._named) > 1:
            raise ValueError(f"{' and '.join(self._named)} are set, but a run has one environment; leave one of them")
        if self.program and self.isolation == "inline":
            raise ValueError(
                "environment.isolation is inline, but environment.program has processes of its own; set it to auto"
            )

    @property
    def _named(self) -> dict[str, tuple[str, ...]]:
        one_each = {
            "function": self.function,
            "factory": self.factory,
            "skyrl": self.skyrl,
            "gymnasium": self.gymnasium,
        }
        named = {name: (spec,) for name, spec in one_each.items() if spec is not None}
        program = (self.program,) if isinstance(self.program, str) else self.program or ()
        several: dict[str, tuple[str, ...]] = {"tools": self.tools, "mcp": self.mcp, "program": program}
        several = {name: specs for name, specs in several.items() if specs}
        return {f"environment.{name}": specs for name, specs in (named | several).items()}

    @property
    def key(self) -> str | None:
        """Key that names the environment; None without one."""
        return next(iter(self._named), None)

    @property
    def specs(self) -> tuple[str, ...]:
        """Functions or classes that it names."""
        return next(iter(self._named.values()), ())

    def __str__(self) -> str:
        return f"{self.key} is {', '.join(self.specs)}"
