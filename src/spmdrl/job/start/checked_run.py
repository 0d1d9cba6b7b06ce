"""The run that all checks before the first collective passed: its settings, layouts, worker states and rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.config.config import Config, OfflineConfig
from spmdrl.dataflow.data.data_rows import SourceRows
from spmdrl.dataflow.samples.schema import COPIES, SCORE_COLUMNS, needs_by_state, rule_of
from spmdrl.dataflow.stages.rows import ROUTED_EXPERTS, TURN_REWARDS, TURNS
from spmdrl.dataflow.stages.schedule import Slot, schedule
from spmdrl.dataflow.stages.update import Agreement, update_columns
from spmdrl.engines.environment.environment_runner import EnvironmentFacts
from spmdrl.nouns.batch import CreditSettings, WorkerState
from spmdrl.nouns.roles import CRITIC, POLICY, REFERENCE, ROLES, TEACHER, Rating, Role
from spmdrl.nouns.settings.training_config import OptimConfig
from spmdrl.resources.layout import GenerationLayout, UpdateLayout

Verb = Literal["train", "sft", "preferences", "reward-model", "eval", "generate"]
ON_PAIRS: tuple[Verb, ...] = ("preferences", "reward-model")
"""verbs whose rows are pairs of responses"""
TRAINED: tuple[Verb, ...] = ("train", "sft", *ON_PAIRS)
_OF_TEACHER = tuple(state for state in WorkerState if state.role is TEACHER)


@dataclass(frozen=True)
class CheckedRun:
    """A config that passed all checks before ranks meet; identical on every rank."""

    verb: Verb
    config: Config
    resolved_config: str
    layout: UpdateLayout
    algorithm: Algorithm
    needs: dict[WorkerState, frozenset[str]]
    """columns that each worker state reads; its keys are the run's states"""
    train_rows: list[SourceRows]
    eval_rows: list[SourceRows]
    base_model: str
    """original model, whatever a warm start makes of it"""
    own_layouts: Mapping[Role, UpdateLayout] = field(default_factory=dict)
    """layouts of models that differ from `layout`"""
    columns_taken: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """by reward function, its parameters for columns of the data; empty but on the first rank of a node"""
    environment: EnvironmentFacts | None = None
    """facts about the environment; None if none answers"""

    @property
    def phase(self) -> str:
        """Kind of the steps: the verb that trains on data alone, or the algorithm's name."""
        return self.config.algo.name if self.offline is None else self.verb

    @property
    def offline(self) -> OfflineConfig | None:
        """Section of a verb that trains on data alone; None if responses are generated."""
        config = self.config
        sections = {"sft": config.sft, "preferences": config.preferences, "reward-model": config.reward_model}
        return sections.get(self.verb)

    @property
    def section(self) -> str:
        """Name of that section."""
        return self.verb.replace("-", "_")

    @property
    def prompts_are_messages(self) -> bool:
        """Return True if no prompt of the run is text."""
        sources = (*self.train_rows, *self.eval_rows)
        return not any(isinstance(row.prompt, str) for source in sources for row in source.rows)

    @property
    def rows_per_step(self) -> int:
        """Rows of `data.train` per step."""
        return self.offline.rows_per_step if self.offline else self.config.rollout.prompts_per_step

    @property
    def optim(self) -> OptimConfig:
        """Optimizer of the model being trained."""
        return (self.offline or self.config).optim

    def optim_of(self, role: Role) -> OptimConfig:
        """Return the optimizer of a trained model."""
        critic = self.config.critic
        return critic.optim if critic is not None and role is CRITIC else self.optim

    @property
    def num_steps(self) -> int:
        """Steps of the run; of epochs only once their rows are `counted`."""
        return (self.offline or self.config.train).num_steps

    @property
    def _epochs(self) -> float | None:
        """Epochs that decide the number of steps."""
        section = self.offline or self.config.train
        return None if section.max_steps else section.epochs

    @property
    def length(self) -> str:
        """Length of the run as text."""
        return f"{self.num_steps} steps" if self._epochs is None else f"{self._epochs:g} epochs"

    def counted(self, num_rows: int) -> CheckedRun:
        """Return the run with its number of steps, if that depends on the number of rows to train on."""
        section, epochs = self.offline or self.config.train, self._epochs
        if epochs is None:
            return self
        # A product of decimals may be slightly more than a whole number.
        num_steps = max(1, math.ceil(round(epochs * num_rows / self.rows_per_step, 6)))
        counted: dict[str, Any] = {self.section: replace(section, max_steps=num_steps)}
        return replace(self, config=replace(self.config, **counted))

    def rating(self, role: Role) -> Rating:
        """Return the rating that a model must give: the policy's place is that of the model being trained."""
        return "row_values" if role is POLICY and self.verb == "reward-model" else role.rating

    @property
    def roles(self) -> tuple[Role, ...]:
        """The run's models, used by its worker states; without training on rewards mostly the policy alone."""
        used: set[Role | None] = {self.role_of(state) for state in self.needs} if self.verb == "train" else {POLICY}
        if self.verb == "preferences" and not self.config.preferences.reference_free:
            used.add(self.role_of(WorkerState.REFERENCE))
        return tuple(role for role in ROLES if role in used)

    @cached_property
    def slots(self) -> list[Slot]:
        """The worker states of a step, in order."""
        return schedule(
            self.needs, {state: self.role_of(state) for state in self.needs}, fuse=self.config.dock.fuse,
            refills=bool(self.algorithm.max_refills), has_turns=self.config.environment.key is not None,
            apart=self.config.resources.ranks.generation > 0,
        )  # fmt: skip

    def sets_of(self, num_ranks: int) -> tuple[range, range]:
        """Return the ranks that train and those that generate, of a job of this many; in most runs all do both."""
        return self.config.resources.ranks.split(num_ranks) if self.verb == "train" else (range(num_ranks),) * 2

    def layout_of(self, role: Role) -> UpdateLayout:
        """Return the layout of a model."""
        return self.own_layouts.get(role, self.layout)

    def layout_key(self, role: Role) -> str:
        """Return the config key of that layout."""
        return f"{role.section}.layout" if role in self.own_layouts else "resources.update"

    @property
    def judge_layout(self) -> GenerationLayout:
        """Layout of the judge."""
        judge = self.config.reward.judge
        return (judge and judge.layout) or GenerationLayout()

    def role_of(self, state: WorkerState) -> Role | None:
        """Return the model that a worker state uses: with adapters, the policy without them is the reference.

        The policy is its own teacher if none is named.
        """
        teacher = self.config.teacher
        is_policys = state.role is REFERENCE and self.config.lora is not None
        is_policys = is_policys or (state.role is TEACHER and teacher is not None and teacher.path is None)
        return POLICY if is_policys else state.role


def agreement_of(config: Config) -> Agreement:
    """Return the agreement between generator and trainer that the update may rely on."""
    if not config.debug.batch_invariant:
        return "measured"
    # A response begun in an earlier step has log-probs of that step's weights.
    return "used" if config.rollout.partial_max_rounds == 1 and config.rollout.lag == 0 else "checked"


def credit_settings_of(config: Config) -> CreditSettings:
    """Return the settings by which algorithms credit rewards, beside their own."""
    return CreditSettings(
        config.reward.names, config.reward.part_weights, config.rollout.max_completion_length, config.seed
    )


def states_of(config: Config, algorithm: Algorithm) -> dict[WorkerState, frozenset[str]]:
    """Return the worker states that make the algorithm's columns. Raises ValueError for a column that none makes."""
    num_updates = config.train.updates_per_step * config.train.epochs_per_step
    # Passes over the policy's rows send tokens to the experts that generation chose; other routers never saw them.
    replayed = {ROUTED_EXPERTS} if config.train.routing.replay == "rollout" else set()
    columns = update_columns(algorithm.columns_for_loss(num_updates), agreement_of(config))
    if config.critic is None and "values" in algorithm.columns_for_credit():
        raise ValueError(
            f"algo.name is {config.algo.name}, whose advantages are made of a critic's values, but there is no critic; "
            "set critic={} for one that begins as the model itself, or critic.path to a value model"
        )
    _check_teacher(config, algorithm.columns_for_credit() | columns)
    turns = {TURNS} if config.environment.key is not None else set()
    copies = {COPIES} if algorithm.draws_rows else set()
    reads = {"prompt_ids", "response_ids", *columns, *replayed, *turns, *copies}
    scores = {SCORE_COLUMNS[part] for part in config.reward.parts_beside}
    credit = {"reward", "response_ids", *turns, *algorithm.columns_for_credit()}
    of_rows = {state: turns for state in WorkerState if state.work == "score" or state is WorkerState.RETURNS}
    generated = set() if agreement_of(config) == "measured" else {"rollout_logprobs", "versions"}
    of_rows[WorkerState.OLD_LOGPROBS] = turns | replayed | generated
    if config.critic is not None:
        of_rows[WorkerState.VALUES] = turns | ({"finished"} if config.critic.bootstraps else set())
        of_turns = turns | {TURN_REWARDS} if turns else turns
        of_rows[WorkerState.RETURNS] = of_turns | algorithm.columns_for_returns() | config.critic.columns_for_returns
    # The critic learns from the rows that the algorithm keeps, so it waits for their advantages.
    of_critic = {"values", "returns", "advantages", *turns, *copies}
    also_trained = {} if config.critic is None else {WorkerState.CRITIC_UPDATE: of_critic}
    return needs_by_state(
        reads, {WorkerState.ADVANTAGE: credit, WorkerState.REWARD: scores, **of_rows}, also_trained=also_trained
    )


def _check_teacher(config: Config, columns: frozenset[str]) -> None:
    """Refuse an algorithm that reads a teacher's columns without one, and a teacher that isn't read."""
    made = {name for name in columns if rule_of(name).made_by in _OF_TEACHER}
    if made and config.teacher is None:
        raise ValueError(
            f"algo.name is {config.algo.name}, which distils a teacher, but there is none; set teacher.path to a model "
            "with the same tokenizer, or teacher.prompt_column for the policy itself with other prompts"
        )
    if config.teacher is not None and not made:
        raise ValueError(
            f"there is a section teacher, but algo.name {config.algo.name} distils no teacher; set "
            "algo.name to opd or gkd, or leave teacher out"
        )


def check_judge(checked: CheckedRun) -> None:
    """Refuse a judge if rewards are needed before the policy has left the device, or if rows have turns."""
    config, algorithm = checked.config, checked.algorithm
    if config.reward.judge is None:
        return
    if algorithm.max_refills:
        raise ValueError(
            f"algo.max_refills is {algorithm.max_refills}, but reward.judge reads responses once all are generated, "
            "too late to generate more by its scores; set algo.max_refills to 0"
        )
    if config.environment.key is not None:
        raise ValueError(f"{config.environment}, but reward.judge reads responses of one turn; leave out one of them")


def check_credit(checked: CheckedRun) -> None:
    """Refuse settings by which the algorithm can't credit rewards."""
    if (conflict := checked.algorithm.conflict(credit_settings_of(checked.config))) is not None:
        raise ValueError(conflict)
