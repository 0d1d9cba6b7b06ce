"""Settings of the models beside the policy: the critic, with the returns that it learns, and the teacher."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from spmdrl.nouns.settings.training_config import OptimConfig

END_VALUE = "end_value"


@dataclass(frozen=True)
class CriticConfig:
    """A critic: a model of the policy's layers with a value head, trained to predict the return of each token."""

    path: str | None = None
    """folder or hub name of a value model, or of a language model, which gets a new head; null: the policy's own
    model"""
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
        """What returns are made of beside rewards."""
        return frozenset({"values"} if self.lam < 1 else ()) | ({END_VALUE} if self.bootstraps else frozenset())

    @property
    def bootstraps(self) -> bool:
        """Whether cut responses are followed by a value."""
        return self.truncation == "bootstrap"

    def __post_init__(self) -> None:
        if self.path is not None and not self.path.strip():
            raise ValueError("critic.path is empty; give a model folder or hub name, or null for the model itself")


@dataclass(frozen=True)
class TeacherConfig:
    """A model that rates the policy's responses: a frozen one of any size, or the policy itself with more to go by."""

    path: str | None = None
    """folder of a Hugging Face model or of a run, whose newest checkpoint it is, or a hub name; its tokenizer must have
    the policy's tokens; null: the policy itself, with the weights that each step begins with"""
    prompt_column: str | None = None
    """column of the data with the teacher's prompt, text or messages, which may hold more than the policy's, such as
    the solution; null: the policy's prompt"""

    def __post_init__(self) -> None:
        if self.path is None and self.prompt_column is None:
            raise ValueError(
                "teacher has neither path nor prompt_column, so that it would be the policy itself and teach nothing; "
                "set teacher.path to a model, or teacher.prompt_column to a column of the data"
            )
        if self.path is not None and not self.path.strip():
            raise ValueError("teacher.path is empty; give a model folder or hub name")
