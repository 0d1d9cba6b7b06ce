"""Settings of the models beside the policy: weights, layouts and roles."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Interval

from spmdrl.nouns.settings.layout_config import GenerationLayout, UpdateLayout
from spmdrl.nouns.settings.training_config import OptimConfig

END_VALUE = "end_value"
# A sum of a million squares still fits into float32.
MAX_MAGNITUDE = 1e15


@dataclass(frozen=True)
class ReferenceConfig:
    """The run's first policy, with which KL terms compare the policy."""

    layout: UpdateLayout | None = None
    """layout of its shards, over the same ranks; null: resources.update"""


@dataclass(frozen=True)
class BesideConfig(ReferenceConfig):
    """A model beside the policy with weights of its own."""

    section: ClassVar[str]
    path: str | None = None
    """folder of a Hugging Face model or of a run (its newest checkpoint), or a hub name, with the policy's tokens;
    null: the policy's model, which gets a new head as a critic, as other language models do, and as a teacher has the
    weights that each step begins with"""

    def __post_init__(self) -> None:
        if self.path is not None and not self.path.strip():
            raise ValueError(f"{self.section}.path is empty; give a model folder or hub name, or leave it out")


@dataclass(frozen=True)
class CriticConfig(BesideConfig):
    """A critic: a model of the policy's layers with a value head, trained to predict the return of each token."""

    section: ClassVar[str] = "critic"
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """optimizer of the critic; its schedule counts the critic's steps"""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """number of first steps that train only the critic"""
    gamma: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """discount of rewards per token; an environment's reward of a turn comes with the turn's last token, the rest of a
    row's reward with the row's"""
    lam: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """lambda of the critic's target returns and of generalized advantage estimates (arXiv:1506.02438); 1: the whole
    return of the response; 0: the reward and the value of the next token"""
    truncation: Literal["terminal", "bootstrap"] = "terminal"
    """value behind a response that was cut by its length; terminal: 0, as for one that ended by itself; bootstrap: the
    critic's value of the state after its last token"""
    clip: Annotated[float, Interval(gt=0, lt=math.inf)] | None = None
    """bound of the value loss on a value's distance from its value before the update; null: none"""

    @property
    def columns_for_returns(self) -> frozenset[str]:
        """Inputs of returns beside rewards."""
        return frozenset({"values"} if self.lam < 1 else ()) | ({END_VALUE} if self.bootstraps else frozenset())

    @property
    def bootstraps(self) -> bool:
        """True if a value follows cut responses."""
        return self.truncation == "bootstrap"


@dataclass(frozen=True)
class TeacherConfig(BesideConfig):
    """A model that rates the policy's responses: a frozen one of any size, or the policy itself with a fuller
    prompt."""

    section: ClassVar[str] = "teacher"
    prompt_column: str | None = None
    """data column with the teacher's prompt, text or messages, which may contain more than the policy's, such as the
    solution; null: the policy's prompt"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None and self.prompt_column is None:
            raise ValueError(
                "teacher has neither path nor prompt_column, so that it would be the policy itself and teach nothing; "
                "set teacher.path to a model, or teacher.prompt_column to a column of the data"
            )


MODEL_PART = "model"
"""name of a reward model's part of the reward"""


@dataclass(frozen=True)
class ScorerConfig(BesideConfig):
    """A frozen model that scores whole responses."""

    section: ClassVar[str] = "reward.model"
    path: str | None = None
    """folder of a Hugging Face model for sequence classification with one label or of a run of the verb reward-model,
    or a hub name; its tokenizer must have the policy's tokens"""
    weight: Annotated[float, Interval(gt=-math.inf, lt=math.inf)] = 1.0
    """weight of its score in the reward"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None:
            raise ValueError("reward.model has no path, and the policy gives no scores; set reward.model.path")


JUDGE_PART = "judge"
"""name of the judge's part of the reward"""
_FIELD = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True)
class JudgeConfig:
    """A frozen language model that writes a verdict on each response, from which one more part of the reward is read.

    It decodes greedily, once the policy's responses have ended. Held-out rows are scored without it.
    """

    path: str
    """folder of a Hugging Face model or of a run (its newest checkpoint), or a hub name; its tokenizer may differ from
    the policy's"""
    layout: GenerationLayout | None = None
    """layout of its generation shards; null: a whole copy on each rank"""
    template: str = (
        "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{response}\n\n"
        "Rate the response from 0 (wrong) to 10 (right). Write the number alone."
    )
    """question to the judge, with {prompt}, {response} and {answer} filled in; rendered by its tokenizer's chat
    template, if any"""
    max_tokens: Annotated[int, Ge(1)] = 16
    """largest number of tokens in a verdict"""
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """regular expression whose first group is the number; a row whose verdict doesn't match has no reward"""
    scale: Annotated[float, Interval(gt=0, lt=math.inf)] = 10.0
    """divisor of the number"""
    weight: Annotated[float, Interval(gt=-math.inf, lt=math.inf)] = 1.0
    """weight of the judge in the reward, beside reward.functions"""
    kv_cache_gib: Annotated[float, Gt(0)] = 1.0
    """size of its KV cache on an accelerator in GiB; rows beyond it wait. On a CPU, as large as needed"""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError("reward.judge.path is empty; give a model folder or hub name")
        if "{response}" not in self.template:
            raise ValueError("reward.judge.template has no {response}, so the judge wouldn't see it; add it")
        try:
            num_groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"reward.judge.pattern {self.pattern!r} is no regular expression: {error}") from None
        if num_groups == 0:
            raise ValueError(
                f"reward.judge.pattern {self.pattern!r} has no group; put parentheses around the number, as in (\\d+)"
            )

    def question(self, values: Mapping[str, str]) -> str:
        """Return the template with these values filled in by name; other braces stay."""
        return _FIELD.sub(lambda field: values.get(field[1], field[0]), self.template)

    def score(self, verdict: str) -> float | None:
        """Return the scaled number of a verdict; None if there is none or it can't be a reward."""
        found = re.search(self.pattern, verdict)
        try:
            score = float(found[1]) / self.scale if found and found[1] is not None else math.nan
        except ValueError:
            return None
        return score if abs(score) <= MAX_MAGNITUDE else None
