"""The models of a run and the worker states that use them, as two tables of plain data.

Building, the swap, the memory ledger, estimates and checkpoints iterate over the roles; which ranks share rows, which
pass runs and what the step line prints follow from the worker states. Another model or state is another entry here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

Rating = Literal["logprobs", "token_values", "row_values"]
"""What a head gives: the log-prob of each response token, a value before each of them, or one at each row's end."""


@dataclass(frozen=True)
class Role:
    """One model of a run."""

    name: str
    section: str
    """the section of the configuration that has its path and layout"""
    rating: Rating
    """what its training engine computes for each row"""
    presence: Literal["training", "stage"]
    """when its state is on the device: from the return after generation, which goes on beside other stages, to the next
    switch; or only inside the worker states that use it"""
    weights: str
    """the owner of its weights in the memory ledger, and their group in the swap"""
    base: str | None = None
    """the same of those of its weights that stay as they are beside adapters"""
    optimizer: str | None = None
    """the same of its optimizer state; None for a frozen model, which has neither gradients nor an optimizer"""
    checkpoint: str | None = None
    """the folder, inside a checkpoint, of its model and trainer state; None keeps nothing, as it can be loaded again"""
    engine: Literal["training", "generation"] = "training"
    """what runs it: a training engine, cut by an update layout, or a generation engine of each rank alone"""

    @property
    def is_trained(self) -> bool:
        return self.optimizer is not None


POLICY = Role(
    "policy", "model", "logprobs", "training",
    weights="update_weights", base="base_weights", optimizer="optimizer", checkpoint="",
)  # fmt: skip
"""The model that generates; the resharding flow also moves its weights to the generation engine."""
REFERENCE = Role("reference", "reference", "logprobs", "stage", weights="reference_weights")
"""The policy as the run began."""
CRITIC = Role(
    "critic", "critic", "token_values", "training",
    weights="critic_weights", optimizer="critic_optimizer", checkpoint="critic",
)  # fmt: skip
"""Predicts the return of each response token; there with a section `critic`."""

TEACHER = Role("teacher", "teacher", "logprobs", "stage", weights="teacher_weights")
"""A frozen model whose distribution the policy is drawn to; there where an algorithm reads what it makes."""

REWARD_MODEL = Role("reward_model", "reward.model", "row_values", "stage", weights="reward_model_weights")
"""A frozen model whose score of a whole response is a part of its reward; there with a section `reward.model`."""

JUDGE = Role("judge", "reward.judge", "logprobs", "stage", weights="judge_weights", engine="generation")
"""A frozen model that writes verdicts on responses; there with a section `reward.judge`."""

ROLES = (POLICY, REFERENCE, CRITIC, TEACHER, REWARD_MODEL, JUDGE)

Work = Literal["generate", "score", "train"]
"""What a worker state does with its model: responses, a number for each response token, or optimizer steps."""


class WorkerState(enum.Enum):
    """What a worker does with samples; each has its own controller (the paper's Figure 4).

    A member is its name in files, its name in the step line, its model (None where it needs none) and what it does with
    it. Where several states could run, the first one here does: rewards are waited for behind all that models score.
    """

    short_name: str
    role: Role | None
    work: Work | None

    GENERATION = "generation", "gen", POLICY, "generate"
    REWARD_MODEL = "reward_model", "rew", REWARD_MODEL, "score"
    JUDGE = "judge", "rew", JUDGE, "generate"
    REFERENCE = "reference", "ref", REFERENCE, "score"
    TEACHER_TOP = "teacher_top", "ref", TEACHER, "score"
    TEACHER = "teacher", "ref", TEACHER, "score"  # last, as it hides the model's name
    OLD_LOGPROBS = "old_logprobs", "lp", POLICY, "score"
    VALUES = "values", "lp", CRITIC, "score"
    REWARD = "reward", "rew", None, None
    RETURNS = "returns", "adv", None, None
    ADVANTAGE = "advantage", "adv", None, None
    CRITIC_UPDATE = "critic_update", "upd", CRITIC, "train"
    UPDATE = "update", "upd", POLICY, "train"

    def __new__(cls, name: str, short_name: str, role: Role | None, work: Work | None) -> WorkerState:
        state = object.__new__(cls)
        state._value_ = name
        state.short_name, state.role, state.work = short_name, role, work
        return state

    @property
    def uses_training_engine(self) -> bool:
        """Whether all ranks that share a copy's layers, tokens or matrices need the same rows."""
        return self.work in ("score", "train")
