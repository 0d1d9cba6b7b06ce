"""Everything that can be refused before ranks communicate and before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.algorithms.table import build_algorithm
from spmdrl.config.config import Config, OfflineConfig
from spmdrl.config.reader import LoadedConfig, resolved_yaml, start_up
from spmdrl.dataflow.data.data_rows import RowNeeds, SourceRows, read_rows, rows_of_prompts
from spmdrl.dataflow.data.records import BadRows
from spmdrl.dataflow.data.synthetic import SCHEME
from spmdrl.dataflow.samples.schema import COPIES, needs_by_state, rule_of
from spmdrl.dataflow.stages.reward import SCORE_COLUMNS
from spmdrl.dataflow.stages.rows import ROUTED_EXPERTS, TURNS
from spmdrl.dataflow.stages.schedule import Slot, schedule
from spmdrl.dataflow.stages.update import Agreement, update_columns
from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.generation.native.graph_steps import wants_graphs
from spmdrl.engines.reward.functions import needs_answer
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.job.run.best_checkpoint import EVALUATIONS
from spmdrl.job.start.model_checks import (
    check_batch_invariant,
    check_generation_fits,
    check_model_fits,
    check_vllm,
    check_vllm_is_there,
    decoder_at_hand,
)
from spmdrl.nouns.batch import CreditSettings, WorkerState
from spmdrl.nouns.roles import POLICY, REFERENCE, ROLES, TEACHER, Rating, Role
from spmdrl.nouns.settings.training_config import OptimConfig
from spmdrl.observability.log import check_backends
from spmdrl.resources.device import find_device
from spmdrl.resources.layout import GenerationLayout, UpdateLayout, check_generation_layout, fit_update_layout
from spmdrl.runtime.launch import LaunchEnvironment, read_launch_environment
from spmdrl.runtime.screen import waiting

Verb = Literal["train", "sft", "preferences", "reward-model", "eval", "generate"]
ON_PAIRS = ("preferences", "reward-model")
"""the verbs whose rows are pairs of responses"""
_OF_TEACHER = tuple(state for state in WorkerState if state.role is TEACHER)
_OF_TEMPLATES = {"tools", "chat_template_kwargs"}
_WITH_ROLES = ("train", "preferences")
_TRAINED = ("train", "sft", *ON_PAIRS)


@dataclass(frozen=True)
class CheckedRun:
    """A config that passed all checks before ranks meet; identical on every rank."""

    verb: Verb
    config: Config
    resolved_config: str
    layout: UpdateLayout
    algorithm: Algorithm
    needs: dict[WorkerState, frozenset[str]]
    """what each worker state reads; its keys are the states that this run has"""
    train_rows: list[SourceRows]
    eval_rows: list[SourceRows]
    base_model: str
    """what the model comes from, whatever a warm start makes of it"""
    own_layouts: Mapping[Role, UpdateLayout] = field(default_factory=dict)
    """layouts of the run's models that aren't cut by `layout`"""
    columns_taken: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """by reward function, its parameters for columns of the data"""

    @property
    def phase(self) -> str:
        """What the steps do: the verb that trains on data alone, or the algorithm's name."""
        return self.config.algo.name if self.offline is None else self.verb

    @property
    def offline(self) -> OfflineConfig | None:
        """The section of a verb that trains on data alone; None where responses are generated."""
        config = self.config
        sections = {"sft": config.sft, "preferences": config.preferences, "reward-model": config.reward_model}
        return sections.get(self.verb)

    @property
    def section(self) -> str:
        """The name of that section."""
        return self.verb.replace("-", "_")

    @property
    def prompts_are_messages(self) -> bool:
        """Return True if no prompt of the run is text."""
        sources = (*self.train_rows, *self.eval_rows)
        return not any(isinstance(row.prompt, str) for source in sources for row in source.rows)

    @property
    def rows_per_step(self) -> int:
        """Rows of `data.train` that a step takes."""
        return self.offline.rows_per_step if self.offline else self.config.rollout.prompts_per_step

    @property
    def optim(self) -> OptimConfig:
        """The optimizer of the model being trained."""
        return (self.offline or self.config).optim

    @property
    def num_steps(self) -> int:
        return (self.offline or self.config.train).max_steps

    def rating(self, role: Role) -> Rating:
        """What a model of the run is to give: the policy's place is that of the model being trained."""
        return "row_values" if role is POLICY and self.verb == "reward-model" else role.rating

    @property
    def roles(self) -> tuple[Role, ...]:
        """The run's models: those that its worker states use; without training on rewards the policy, mostly alone."""
        used: set[Role | None] = {self.role_of(state) for state in self.needs} if self.verb == "train" else {POLICY}
        if self.verb == "preferences" and not self.config.preferences.reference_free:
            used.add(self.role_of(WorkerState.REFERENCE))
        return tuple(role for role in ROLES if role in used)

    @cached_property
    def slots(self) -> list[Slot]:
        """The worker states of a step, in their order."""
        return schedule(
            self.needs, {state: self.role_of(state) for state in self.needs}, fuse=self.config.dock.fuse,
            refills=bool(self.algorithm.max_refills), has_turns=self.config.environment.function is not None,
        )  # fmt: skip

    def layout_of(self, role: Role) -> UpdateLayout:
        """How a model is cut."""
        return self.own_layouts.get(role, self.layout)

    def layout_key(self, role: Role) -> str:
        """Where the config has that layout."""
        return f"{role.section}.layout" if role in self.own_layouts else "resources.update"

    @property
    def judge_layout(self) -> GenerationLayout:
        """How the judge is cut."""
        judge = self.config.reward.judge
        return (judge and judge.layout) or GenerationLayout()

    def role_of(self, state: WorkerState) -> Role | None:
        """The model that a worker state uses: beside adapters, the policy without them is the reference.

        The policy is its own teacher where none is named.
        """
        teacher = self.config.teacher
        is_policys = state.role is REFERENCE and self.config.lora is not None
        is_policys = is_policys or (state.role is TEACHER and teacher is not None and teacher.path is None)
        return POLICY if is_policys else state.role


def check_run(
    loaded: LoadedConfig[Config], verb: Verb, prompts: Sequence[str] = (), launch: LaunchEnvironment | None = None
) -> CheckedRun:
    """Check layout, algorithm, data and reward functions. Raises ConfigError; no rank has communicated yet.

    `prompts` take the place of the rows of `data.eval`. `launch` is another job than this one to check for.
    """
    config, own = loaded.value, read_launch_environment(os.environ)
    with start_up(), waiting("checking settings and data", enabled=own.rank == 0):
        layout = _check_layouts(config, verb, launch or own, is_here=launch is None)
        algorithm = build_algorithm(config.algo)
        needs = states_of(config, algorithm)
        if verb == "reward-model" and config.lora is not None:
            raise ValueError(
                "lora is set, but a reward model's head is trained too, which adapters would leave at 0; leave out lora"
            )
        if verb == "train":
            check_sizes(config, algorithm)
            _check_judge(config, algorithm)
            if (conflict := algorithm.conflict(credit_settings_of(config))) is not None:
                raise ValueError(conflict)
        train_rows, eval_rows, columns = _checked_rows(config, verb, prompts)
        if verb in _TRAINED:
            check_best(config)
        text, base_model = resolved_yaml(loaded), config.model.path or "random weights (model.make)"
        checked = CheckedRun(
            verb, config, text, layout, algorithm, needs, train_rows, eval_rows, base_model, columns_taken=columns
        )
        if checked.offline is not None and checked.num_steps < 1:
            key = f"{checked.section}.max_steps"
            raise ValueError(f"{key} is 0, so the {verb} verb has nothing to do; set it to the number of steps")
        return replace(checked, own_layouts=_own_layouts(checked, (launch or own).world_size))


def _own_layouts(checked: CheckedRun, world_size: int) -> dict[Role, UpdateLayout]:
    """The layouts of models that aren't cut like the policy. Raises ValueError for those of models that aren't there.

    A verb that has but the policy leaves them alone, so that it takes the config of a training run.
    """
    fitted: dict[Role, UpdateLayout] = {}
    beside = checked.config.beside if checked.verb in _WITH_ROLES else {}
    given = {role: section.layout for role in ROLES if (section := beside.get(role.name))}
    for role, layout in given.items():
        if layout is None:
            continue
        key = f"{role.section}.layout"
        if role not in checked.roles:
            raise ValueError(f"there is {key}, but this run has no {role.name} with weights of its own; leave it out")
        if checked.verb == "preferences":
            raise ValueError(
                f"there is {key}, but preferences rates the rows of a step with policy and {role.name} together, which "
                "needs one layout; leave it out"
            )
        if isinstance(layout, UpdateLayout):
            fitted[role] = fit_update_layout(layout, world_size, key)
        else:
            check_generation_layout(layout, world_size, key)
    return fitted


def _check_layouts(config: Config, verb: Verb, launch: LaunchEnvironment, *, is_here: bool) -> UpdateLayout:
    """The update layout of a job; a layout for another job may be checked where its devices and packages aren't."""
    layout = fit_update_layout(config.resources.update, launch.world_size)
    check_generation_layout(config.resources.generation, launch.world_size)
    is_trained = verb in _TRAINED
    device = find_device(config.resources.device, launch.device_index) if is_here else None
    if (decoder := decoder_at_hand(config)) is not None:
        check_generation_fits(config, decoder)
        if device is not None and config.rollout.engine != "vllm":
            wants_graphs(config.rollout, decoder, config.resources.generation, device.torch_device)
        if is_trained:
            check_model_fits(config, decoder, layout)
    if config.debug.batch_invariant:
        check_batch_invariant(config, layout, find_device(config.resources.device, launch.device_index).kind)
    if config.rollout.engine == "vllm":
        check_vllm(config)
        if is_here:
            check_vllm_is_there()
    if is_here and is_trained:
        check_backends(config.log)
    return layout


def _checked_rows(
    config: Config, verb: Verb, prompts: Sequence[str]
) -> tuple[list[SourceRows], list[SourceRows], Mapping[str, Sequence[str]]]:
    """The rows to train on and to evaluate, and by reward function its parameters for their columns."""
    # `generate` judges nothing, and `sft` only what it evaluates.
    are_judged = verb in ("train", "eval") or (verb == "sft" and config.data.eval is not None)
    answers = are_judged and needs_answer(config.reward.functions)
    train_needs = RowNeeds(answer=answers and verb != "sft", completion=verb == "sft" or config.sft.max_steps > 0)
    eval_needs = RowNeeds(answer=answers)
    if verb in ON_PAIRS:
        margin_key = config.reward_model.margin_key if verb == "reward-model" else None
        train_needs = eval_needs = RowNeeds(pair=True, margin_key=margin_key)
    train_rows = _train_rows(config, verb, train_needs) if verb in _TRAINED else []
    eval_rows: list[SourceRows] = []
    columns: Mapping[str, Sequence[str]] = {}
    if prompts:
        eval_rows = [rows_of_prompts(prompts)]
    elif verb == "generate" and config.data.eval is None:
        raise ValueError(
            "there is nothing to answer: set data.eval to a data file, or write prompt='...' (- is standard input)"
        )
    elif config.data.eval is not None or verb == "eval":
        if are_judged and not config.reward.functions:
            raise ValueError(
                f"data.eval is {config.data.eval}, but reward.functions is empty, and evaluations judge by functions "
                "alone; name one, such as math, or set data.eval to null"
            )
        eval_rows = read_rows(config.data.eval, config.data, needs=eval_needs, key="data.eval")
    if are_judged:
        # Loads the functions in a child and ends it: a missing file or name is refused before the first rollout.
        with RewardPool(config.reward, 1) as pool:
            judged = train_rows if verb == "train" else []
            columns = pool.columns_taken()
            check_columns(columns, [*judged, *eval_rows])
    if config.environment.function is not None and (are_judged or verb == "generate"):
        check_environment(config)
    return train_rows, eval_rows, columns


def _train_rows(config: Config, verb: Verb, needs: RowNeeds) -> list[SourceRows]:
    """The rows of `data.train`; where none of them is what the verb needs, the error names verbs that take them."""
    try:
        return read_rows(config.data.train, config.data, needs=needs)
    except BadRows as bad:
        others = {"preferences": RowNeeds(pair=True), "sft": RowNeeds(completion=True), "train": RowNeeds(answer=True)}
        found: dict[str, SourceRows] = {}
        for other in others if bad.has_all else ():
            with suppress(ValueError):
                found = found or {other: read_rows(config.data.train, config.data, needs=others[other])[0]}
        advice = [f"\n`spmdrl check {other}` takes these rows: {part.summary}" for other, part in found.items()]
        raise ValueError(f"{bad}{''.join(advice)}") from bad


def unread_columns(checked: CheckedRun) -> list[str]:
    """Columns of the data that neither prompt, answer nor reward functions read; none where it can't be decided."""
    config = checked.config
    taken = {name.removesuffix("=") for names in checked.columns_taken.values() for name in names}
    if "**" in taken or config.environment.function is not None or config.teacher is not None:
        return []
    taken |= _OF_TEMPLATES | ({config.reward_model.margin_key or ""} if checked.verb == "reward-model" else set())
    unread: dict[str, None] = {}
    for part in (*checked.train_rows, *checked.eval_rows):
        if (part.source.format or config.data.format) == "auto" and not part.source.path.startswith(SCHEME):
            # As in "prompt in 'reward_model.ground_truth'".
            keys = {name.split("'")[1] for name in part.found}
            read = taken | keys | {key.partition(".")[0] for key in keys} | {"answer"}
            read |= {"input"} if "instruction" in keys else set()
            unread |= dict.fromkeys(name for row in part.rows for name in row.columns if name not in read)
    return [*unread]


def check_columns(taken: Mapping[str, Sequence[str]], sources: Sequence[SourceRows]) -> None:
    """Refuse reward functions that need a column which no row of a source has. Raises ValueError."""
    for source in sources:
        # Every row has an `answer`, be it None.
        there = {name for row in source.rows for name, value in row.columns.items() if value is not None}
        for function, columns in taken.items():
            lacking = [name for name in columns if name.isidentifier() and name not in there]
            if lacking:
                raise ValueError(
                    f"reward.functions: {function} needs the columns {', '.join(lacking)}, which no row of "
                    f"{source.source.path} has; its columns are {', '.join(sorted(there)) or 'none'}: rename one, or "
                    "give the parameter a default"
                )


def states_of(config: Config, algorithm: Algorithm) -> dict[WorkerState, frozenset[str]]:
    """The worker states that make the algorithm's columns. Raises ValueError for a column that no state makes."""
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
    turns = {TURNS} if config.environment.function is not None else set()
    copies = {COPIES} if algorithm.draws_rows else set()
    reads = {"prompt_ids", "response_ids", *columns, *replayed, *turns, *copies}
    scores = {SCORE_COLUMNS[part] for part in config.reward.parts_beside}
    credit = {"reward", "response_ids", *turns, *algorithm.columns_for_credit()}
    of_rows = {state: turns for state in WorkerState if state.work == "score" or state is WorkerState.RETURNS}
    generated = set() if agreement_of(config) == "measured" else {"rollout_logprobs", "versions"}
    of_rows[WorkerState.OLD_LOGPROBS] = turns | replayed | generated
    if config.critic is not None:
        of_rows[WorkerState.VALUES] = turns | ({"finished"} if config.critic.bootstraps else set())
        of_rows[WorkerState.RETURNS] = turns | algorithm.columns_for_returns() | config.critic.columns_for_returns
    # The critic learns from the rows that the algorithm keeps, so it waits for their advantages.
    of_critic = {"values", "returns", "advantages", *turns, *copies}
    also_trained = {} if config.critic is None else {WorkerState.CRITIC_UPDATE: of_critic}
    return needs_by_state(
        reads, {WorkerState.ADVANTAGE: credit, WorkerState.REWARD: scores, **of_rows}, also_trained=also_trained
    )


def _check_teacher(config: Config, columns: frozenset[str]) -> None:
    """Refuse an algorithm that reads what a teacher makes, without one, and a teacher that nothing is read of."""
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


def _check_judge(config: Config, algorithm: Algorithm) -> None:
    """Refuse a judge where rewards are needed before the policy has left the device, or where rows have turns."""
    if config.reward.judge is None:
        return
    if algorithm.max_refills:
        raise ValueError(
            f"algo.max_refills is {algorithm.max_refills}, but reward.judge reads responses once all are generated, "
            "too late to generate more by its scores; set algo.max_refills to 0"
        )
    if config.environment.function is not None:
        raise ValueError(
            f"environment.function is {config.environment.function}, but reward.judge reads responses of one turn; "
            "leave out one of them"
        )


def check_environment(config: Config) -> None:
    """Build the environment in a child and end it. Raises ValueError where it can't be built or no turn would end."""
    if config.rollout.ignore_eos:
        raise ValueError(
            f"environment.function is {config.environment.function}, but rollout.ignore_eos lets no turn end; set it "
            "to false"
        )
    EnvironmentPool(config.environment, 1).close()


def agreement_of(config: Config) -> Agreement:
    """What the update may rely on between generator and trainer."""
    if not config.debug.batch_invariant:
        return "measured"
    # A response begun in an earlier step has log-probs of that step's weights.
    return "used" if config.rollout.partial_max_rounds == 1 else "checked"


def credit_settings_of(config: Config) -> CreditSettings:
    """What algorithms credit rewards by, beside their own settings."""
    return CreditSettings(
        config.reward.names, config.reward.part_weights, config.rollout.max_completion_length, config.seed
    )


def check_best(config: Config) -> None:
    """Refuse to keep checkpoints by a metric of evaluations that aren't made between steps. Raises ValueError."""
    metric = config.checkpoint.best_metric
    if metric is None or not metric.startswith(EVALUATIONS):
        return
    lacking = "data.eval is not set" if config.data.eval is None else "eval.interval is 0"
    if config.data.eval is None or config.eval.interval == 0:
        key = "keep_best" if config.checkpoint.best is None else "best"
        raise ValueError(
            f"checkpoint.{key} is {getattr(config.checkpoint, key)}, which keeps the best checkpoints by {metric}, but "
            f"{lacking}, so that steps aren't evaluated; set data.eval and eval.interval, or checkpoint.best to a "
            "metric of every step, such as reward"
        )


def check_sizes(config: Config, algorithm: Algorithm) -> None:
    """Relations between sizes that a training run needs."""
    rollout, train = config.rollout, config.train
    if rollout.temperature == 0:
        raise ValueError("rollout.temperature is 0, but training needs sampled responses; 1.0 is usual")
    if train.updates_per_step > rollout.prompts_per_step:
        raise ValueError(
            f"train.updates_per_step is {train.updates_per_step}, but a step has rollout.prompts_per_step = "
            f"{rollout.prompts_per_step} prompts, which can't be split so often; lower train.updates_per_step"
        )
    if rollout.num_generations < algorithm.min_responses:
        raise ValueError(
            f"rollout.num_generations is {rollout.num_generations}, but {config.algo.name} compares the responses to "
            f"one prompt; set it to {algorithm.min_responses} or more (8 is usual)"
        )
    if algorithm.max_refills and rollout.partial_max_rounds > 1:
        raise ValueError(
            f"algo.max_refills is {algorithm.max_refills}, but rollout.partial_max_rounds is "
            f"{rollout.partial_max_rounds}: a step that leaves responses to later ones lacks the rewards by which "
            "prompts are replaced; set algo.max_refills to 0, or rollout.partial_max_rounds to 1"
        )
    if algorithm.max_refills and config.reward.model is not None:
        raise ValueError(
            f"algo.max_refills is {algorithm.max_refills}, but there is a reward.model, which scores "
            "responses only once generation has ended, and prompts are replaced by rewards before that; set "
            "algo.max_refills to 0"
        )
    if config.debug.rollouts_from and config.data.eval is not None:
        raise ValueError(
            "debug.rollouts_from replays recorded responses, but evaluations need a model that answers; "
            "set data.eval to null"
        )
    key = next((key for key in ("rollouts_from", "rollouts_to") if getattr(config.debug, key)), None)
    if key is not None and rollout.partial_max_rounds > 1:
        raise ValueError(
            f"rollout.partial_max_rounds is {rollout.partial_max_rounds}, but debug.{key} is about steps whose "
            f"responses are all of that step; set partial_max_rounds to 1 or leave out debug.{key}"
        )
    if key is not None and train.routing.replay == "rollout":
        raise ValueError(
            f"train.routing.replay is rollout, but the files of debug.{key} hold no experts; set train.routing.replay "
            f"to none or leave out debug.{key}"
        )
