"""The models of a run and the worker states that use them, as two tables of plain data.

Building, the swap, the memory ledger, estimates and checkpoints iterate over the roles; the worker states determine
which ranks share rows, which passes run and the step line's parts. A new model or state is a new entry here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

Rating = Literal["logprobs", "token_values", "row_values"]
"""Output of a head: each response token's log-prob, a value before each of them, or one at each row's end."""


@dataclass(frozen=True)
class Role:
    """One model of a run."""

    name: str
    section: str
    """section of the configuration with its path and layout"""
    rating: Rating
    """output of its training engine for each row"""
    presence: Literal["training", "stage"]
    """time of its state on the device: from the return after generation, which overlaps with other stages, to the next
    switch; or only inside the worker states that use it"""
    weights: str
    """owner of its weights in the memory ledger, and their group in the swap"""
    base: str | None = None
    """the same for weights that stay fixed beside adapters"""
    optimizer: str | None = None
    """the same for its optimizer state; None for a frozen model"""
    checkpoint: str | None = None
    """folder of its model and trainer state inside a checkpoint; None: not kept, as it can be loaded again"""
    engine: Literal["training", "generation"] = "training"
    """engine that runs it: a training engine, cut by an update layout, or a generation engine of each rank alone"""

    @property
    def is_trained(self) -> bool:
        return self.optimizer is not None


POLICY = Role(
    "policy", "model", "logprobs", "training",
    weights="update_weights", base="base_weights", optimizer="optimizer", checkpoint="",
)  # fmt: skip
"""The model that generates; the resharding flow also moves its weights to the generation engine."""
REFERENCE = Role("reference", "reference", "logprobs", "stage", weights="reference_weights")
"""The policy as it was at the run's start."""
CRITIC = Role(
    "critic", "critic", "token_values", "training",
    weights="critic_weights", optimizer="critic_optimizer", checkpoint="critic",
)  # fmt: skip
"""A model that predicts the return of each response token; loaded with a section `critic`."""

TEACHER = Role("teacher", "teacher", "logprobs", "stage", weights="teacher_weights")
"""A frozen model whose distribution the policy learns; loaded only when the algorithm reads its columns."""

REWARD_MODEL = Role("reward_model", "reward.model", "row_values", "stage", weights="reward_model_weights")
"""A frozen model whose score of a whole response is a part of its reward; loaded with a section `reward.model`."""

JUDGE = Role("judge", "reward.judge", "logprobs", "stage", weights="judge_weights", engine="generation")
"""A frozen model that writes verdicts on responses; loaded with a section `reward.judge`."""

ROLES = (POLICY, REFERENCE, CRITIC, TEACHER, REWARD_MODEL, JUDGE)

Work = Literal["generate", "score", "train"]
"""Use of a worker state's model: responses, a number for each response token, or optimizer steps."""


class WorkerState(enum.Enum):
    """One kind of work on samples, with its own controller (the paper's Figure 4).

    A member has its name in files, its name in the step line, its model (None if it needs none) and the use of it.
    Where several states could run, the first one here does: rewards are awaited after all model scores.
    """

    short_name: str
    role: Role | None
    work: Work | None

    GENERATION = "generation", "gen", POLICY, "generate"
    REWARD_MODEL = "reward_model", "rew", REWARD_MODEL, "score"
    JUDGE = "judge", "rew", JUDGE, "generate"
    REFERENCE = "reference", "ref", REFERENCE, "score"
    TEACHER_TOP = "teacher_top", "ref", TEACHER, "score"
    TEACHER = "teacher", "ref", TEACHER, "score"  # last, as it shadows the model's name
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
    def is_of_generation(self) -> bool:
        """True if the ranks that generate have this state where others train."""
        return self in (WorkerState.GENERATION, WorkerState.REWARD)

    @property
    def uses_training_engine(self) -> bool:
        """True if all ranks that share a copy's layers, tokens or matrices need the same rows."""
        return self.work in ("score", "train")
