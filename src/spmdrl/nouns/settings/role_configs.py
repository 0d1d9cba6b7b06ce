"""Settings of the models beside the policy: their weights, their layouts, and what each does."""

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
# Sums of a million squares still fit into float32.
MAX_MAGNITUDE = 1e15


@dataclass(frozen=True)
class ReferenceConfig:
    """The model that the run starts from, which KL terms compare the policy with."""

    layout: UpdateLayout | None = None
    """layout of its shards, over the same ranks; null: resources.update"""


@dataclass(frozen=True)
class BesideConfig(ReferenceConfig):
    """A model beside the policy with weights of its own."""

    section: ClassVar[str]
    path: str | None = None
    """folder of a Hugging Face model or of a run, whose newest checkpoint it is, or a hub name, with the policy's
    tokens; null: the policy's own model, which as a critic gets a new head, as other language models do, and as a
    teacher has the weights that each step begins with"""

    def __post_init__(self) -> None:
        if self.path is not None and not self.path.strip():
            raise ValueError(f"{self.section}.path is empty; give a model folder or hub name, or leave it out")


@dataclass(frozen=True)
class CriticConfig(BesideConfig):
    """A critic: a model of the policy's layers with a value head, trained to predict the return of each token."""

    section: ClassVar[str] = "critic"
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """the critic's own optimizer; its schedule counts the critic's steps"""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """steps at the start that train the critic alone and leave the policy as it is"""
    gamma: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """discount per token of the reward, which comes with a row's last token"""
    lam: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """lambda of the returns that values are drawn to, and of generalized advantage estimates (arXiv:1506.02438); 1: the
    whole return of the response; 0: the reward and the value of the next token"""
    truncation: Literal["terminal", "bootstrap"] = "terminal"
    """what follows a response that was cut by its length; terminal: nothing, as behind one that ended by itself;
    bootstrap: the critic's value of the state behind its last token"""
    clip: Annotated[float, Interval(gt=0, lt=math.inf)] | None = None
    """bound on how far an update may move a value from what it was before, in the value loss; null: none"""

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
    """A model that rates the policy's responses: a frozen one of any size, or the policy itself with more to go by."""

    section: ClassVar[str] = "teacher"
    prompt_column: str | None = None
    """column of the data with the teacher's prompt, text or messages, which may hold more than the policy's, such as
    the solution; null: the policy's prompt"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None and self.prompt_column is None:
            raise ValueError(
                "teacher has neither path nor prompt_column, so that it would be the policy itself and teach nothing; "
                "set teacher.path to a model, or teacher.prompt_column to a column of the data"
            )


MODEL_PART = "model"
"""the name of a reward model's part of the reward"""


@dataclass(frozen=True)
class ScorerConfig(BesideConfig):
    """A frozen model that scores whole responses."""

    section: ClassVar[str] = "reward.model"
    path: str | None = None
    """folder of a Hugging Face model for sequence classification with one label or of a run of the verb reward-model,
    or a hub name; its tokenizer must have the policy's tokens"""
    weight: Annotated[float, Interval(gt=-math.inf, lt=math.inf)] = 1.0
    """weight of its score in the sum that is the reward"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None:
            raise ValueError("reward.model has no path, and the policy gives no scores; set reward.model.path")


JUDGE_PART = "judge"
"""the name of the judge's part of the reward"""
_FIELD = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True)
class JudgeConfig:
    """A frozen language model that writes a verdict on each response, from which one more part of the reward is read.

    It writes the likeliest tokens, once the policy's responses have ended. Held-out rows are scored without it.
    """

    path: str
    """folder of a Hugging Face model or of a run, whose newest checkpoint it is, or a hub name; its tokenizer may
    differ from the policy's"""
    layout: GenerationLayout | None = None
    """layout of its generation shards; null: whole on each rank"""
    template: str = (
        "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{response}\n\n"
        "Rate the response from 0 (wrong) to 10 (right). Write the number alone."
    )
    """what it is asked, with {prompt}, {response} and {answer} in their places; it is put into the chat template of its
    tokenizer, where that has one"""
    max_tokens: Annotated[int, Ge(1)] = 16
    """most tokens of a verdict"""
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """regular expression whose first group is the number; a row has no reward where it isn't found in the verdict"""
    scale: Annotated[float, Interval(gt=0, lt=math.inf)] = 10.0
    """what the number is divided by"""
    weight: Annotated[float, Interval(gt=-math.inf, lt=math.inf)] = 1.0
    """weight of the judge in the sum that is the reward, beside those of reward.functions"""
    kv_cache_gib: Annotated[float, Gt(0)] = 1.0
    """size of its KV cache on an accelerator in GiB; where rows need more, some wait. A CPU's is as large as needed"""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError("reward.judge.path is empty; give a model folder or hub name")
        if "{response}" not in self.template:
            raise ValueError("reward.judge.template has no {response}, which the judge is to read; put it in its place")
        try:
            num_groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"reward.judge.pattern {self.pattern!r} is no regular expression: {error}") from None
        if num_groups == 0:
            raise ValueError(
                f"reward.judge.pattern {self.pattern!r} has no group; put parentheses around the number, as in (\\d+)"
            )

    def question(self, values: Mapping[str, str]) -> str:
        """The template with these values in the places that have their names; other braces stay as they are."""
        return _FIELD.sub(lambda field: values.get(field[1], field[0]), self.template)

    def score(self, verdict: str) -> float | None:
        """The number of a verdict, scaled; None where there is none that a reward can be."""
        found = re.search(self.pattern, verdict)
        try:
            score = float(found[1]) / self.scale if found and found[1] is not None else math.nan
        except ValueError:
            return None
        return score if abs(score) <= MAX_MAGNITUDE else None
