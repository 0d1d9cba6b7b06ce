"""A run as one tree of frozen dataclasses, each owned by what it configures."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Interval

from spmdrl.algorithms.outside import outside_config
from spmdrl.algorithms.settings.algo_config import AlgoConfig
from spmdrl.algorithms.settings.choices import ALGO_CONFIGS
from spmdrl.algorithms.settings.policy_configs import GrpoConfig
from spmdrl.algorithms.settings.preference_configs import PreferenceConfig
from spmdrl.config.aliases import ADVICE, ALIASES, NEEDLESS
from spmdrl.config.given import Given, find
from spmdrl.config.key_schema import ChosenBy
from spmdrl.config.reader import ConfigError, LoadedConfig, read_config
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig
from spmdrl.nouns.settings.data_config import DataConfig
from spmdrl.nouns.settings.flow_config import DockConfig, ReshardConfig
from spmdrl.nouns.settings.log_config import LogConfig
from spmdrl.nouns.settings.model_config import LoraConfig, ModelConfig
from spmdrl.nouns.settings.reward_config import EnvironmentConfig, RewardConfig
from spmdrl.nouns.settings.role_configs import CriticConfig, JudgeConfig, ReferenceConfig, TeacherConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.nouns.settings.training_config import Epochs, OptimConfig, TrainingConfig
from spmdrl.resources.layout import ResourcesConfig
from spmdrl.runtime.screen import safe_text


@dataclass(frozen=True)
class OfflineConfig:
    """Steps of a verb that trains on data alone."""

    max_steps: Annotated[int, Ge(0)] = 0
    """number of optimizer steps; 0: as epochs says; in `train`, either of sft's is supervised training before the first
    step"""
    epochs: Epochs | None = None
    """number of passes over the rows of data.train, in whole steps, the last one filled up with rows of the next pass;
    max_steps, where it is set too, decides"""
    rows_per_step: Annotated[int, Ge(1)] = 64
    """number of rows, or pairs, per optimizer step, over all ranks"""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """the optimizer"""

    @property
    def trains(self) -> bool:
        """True if there are steps."""
        return self.max_steps > 0 or self.epochs is not None

    @property
    def num_steps(self) -> int:
        """Number of steps, if no epochs decide it."""
        return self.max_steps


@dataclass(frozen=True)
class SftConfig(OfflineConfig):
    """Supervised training: the `sft` verb, and `train` before its first step if `max_steps` or `epochs` is set."""

    rows_per_step: Annotated[int, Ge(1)] = 256
    turns: Literal["last", "all"] = "last"
    """messages of a conversation to learn, in the chat template; last: the last one; all: every message of the
    assistant, with the token that ends its turn"""
    stop_at_probability: Annotated[float, Interval(gt=0, le=1)] | None = None
    """mean probability of whole reference answers at which to stop; null: run all max_steps"""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """the optimizer of the supervised steps; reinforcement learning starts with a fresh one"""


@dataclass(frozen=True)
class PreferencesConfig(PreferenceConfig, OfflineConfig):
    """DPO on the pairs of `data.train`, by the `preferences` verb."""


@dataclass(frozen=True)
class RewardModelConfig(OfflineConfig):
    """Training of a model to score the better response of a pair higher, by the `reward-model` verb."""

    centring: Annotated[float, Ge(0)] = 0.0
    """weight of the square of both scores' sum, which keeps scores around 0 (arXiv:2312.09244; 0.01 there)"""
    margin_key: str | None = None
    """column with the margin by which a row's better response should score higher (arXiv:2307.09288); null: 0"""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))


@dataclass(frozen=True)
class EvalConfig:
    """Times and sampling of answers to the held-out rows of `data.eval`."""

    interval: Annotated[int, Ge(0)] = 0
    """steps between evaluations; 0: only before and after training"""
    before_train: bool = True
    """evaluate before the first step too"""
    num_samples: Annotated[int, Ge(1)] = 1
    """answers per prompt; 1: one greedy answer; more: sampled ones, for avg@k and pass@k"""
    temperature: Annotated[float, Interval(gt=0, lt=math.inf)] = 1.0
    """sampling temperature if num_samples > 1"""
    pass_at: tuple[Annotated[int, Ge(1)], ...] = ()
    """values k of pass@k, at most num_samples; []: num_samples if it is more than 1"""
    max_rows: Annotated[int, Ge(1)] | None = None
    """number of first held-out rows to use; null: all"""

    def __post_init__(self) -> None:
        if self.pass_at and max(self.pass_at) > self.num_samples:
            most = max(self.pass_at)
            raise ValueError(
                f"eval.pass_at is {list(self.pass_at)}, but eval.num_samples is {self.num_samples}, and pass@{most} "
                f"needs at least {most} answers per prompt; raise eval.num_samples, or leave {most} out"
            )

    @property
    def passes(self) -> tuple[int, ...]:
        """The k of each pass@k that is estimated, in order."""
        of_all = (self.num_samples,) if self.num_samples > 1 else ()
        return tuple(sorted(set(self.pass_at))) or of_all


@dataclass(frozen=True)
class RunConfig:
    """Name and folder of the run."""

    name: str = "run"
    """name of the run's folder and report"""
    dir: str | None = None
    """the run's folder; null: runs/<name>"""

    def __post_init__(self) -> None:
        if not _is_folder_name(self.name):
            raise ValueError(
                f"run.name is {self.name!r}, but it names a folder in runs/: give it 1 to 200 bytes without slashes, "
                "controls or spaces at its ends; run.dir takes a path"
            )
        place = self.folder.absolute()
        if place == place.parent or place == Path(os.path.expanduser("~")) or (place / ".git").exists():
            raise ValueError(
                f"run.dir is {self.dir}, a file system's root, a home or a clone, but the run replaces and cleans up "
                f"its folder; set run.dir to one of its own, such as {place / 'runs' / self.name}"
            )

    @property
    def folder(self) -> Path:
        return Path(self.dir if self.dir is not None else f"runs/{self.name}")

    @property
    def folder_key(self) -> str:
        """Key that sets the folder."""
        return "run.name" if self.dir is None else "run.dir"


def _is_folder_name(name: str) -> bool:
    is_plain = name == name.strip() == safe_text(name) and not set(name) & set("/\\\n\t")
    return is_plain and name not in ("", ".", "..") and len(name.encode()) <= 200


@dataclass(frozen=True)
class DebugConfig:
    """Switches for debugging."""

    deterministic: bool = False
    """refuse nondeterministic kernels"""
    batch_invariant: bool = False
    """make each row's log-probs and values bit-identical in any batch, in generation and in training, on CPUs in
    float32 with one thread; a log-prob that differs ends the run, and the pass over old log-probs is saved"""
    rollouts_to: str | None = None
    """folder for recording every step's responses; null: none"""
    rollouts_from: str | None = None
    """folder of recorded responses that replace generation; null: none"""


# Built from the table, the only list of algorithms; type checkers see what all of them share.
if TYPE_CHECKING:
    _ChosenAlgoConfig = AlgoConfig
else:
    _ChosenAlgoConfig = Annotated[reduce(or_, ALGO_CONFIGS), ChosenBy("name")]


@dataclass(frozen=True)
class Config:
    """The whole run."""

    model: ModelConfig
    """the model to train"""
    data: DataConfig
    """prompts and answers"""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """generation of responses"""
    algo: _ChosenAlgoConfig = field(default_factory=GrpoConfig)
    """the learning algorithm"""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """the optimizer"""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    """devices and layouts"""
    reference: ReferenceConfig | None = None
    """frozen model that KL terms compare with, loaded if algo.kl_coef > 0; null: laid out like the policy"""
    critic: CriticConfig | None = None
    """a value model beside the policy; null: none"""
    teacher: TeacherConfig | None = None
    """frozen model from which the policy is distilled, by algorithms that read its columns; null: none"""
    lora: LoraConfig | None = None
    """low-rank adapters, trained in place of the policy's own weights; null: none"""
    train: TrainingConfig = field(default_factory=TrainingConfig)
    """steps and micro-batches"""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """reward functions"""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """environment that answers the model between its turns"""
    sft: SftConfig = field(default_factory=SftConfig)
    """supervised training"""
    preferences: PreferencesConfig = field(default_factory=PreferencesConfig)
    """learning from pairs"""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """training a reward model on pairs"""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """held-out evaluation"""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """states to resume from"""
    dock: DockConfig = field(default_factory=DockConfig)
    """the sample flow"""
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    """the switch between update and generation shards"""
    log: LogConfig = field(default_factory=LogConfig)
    """destinations of metrics"""
    run: RunConfig = field(default_factory=RunConfig)
    """the run's folder"""
    debug: DebugConfig = field(default_factory=DebugConfig)
    """switches for debugging"""
    seed: Annotated[int, Ge(0)] = 0
    """seed of everything random: data order, sampling, weights made by code"""
    resume: str = "auto"
    """checkpoint to resume from; auto: the newest one of the run's folder, if any; never: start anew; or a step number
    or a checkpoint folder"""

    @property
    def beside(self) -> dict[str, ReferenceConfig | JudgeConfig]:
        """Sections of models beside the policy, by the names of their roles."""
        of_reward = {"reward_model": self.reward.model, "judge": self.reward.judge}
        sections = {"reference": self.reference, "critic": self.critic, "teacher": self.teacher} | of_reward
        return {name: section for name, section in sections.items() if section is not None}

    @property
    def resume_step(self) -> int | None:
        """Step that `resume` names, or None."""
        return int(self.resume) if self.resume.isascii() and self.resume.isdigit() else None

    def __post_init__(self) -> None:
        if self.sft.turns == "all" and self.data.chat_template == "never":
            raise ValueError(
                "sft.turns is all, but data.chat_template is never, without which there are no turns; set it to auto, "
                "or sft.turns to last"
            )
        if self.resume_step is None and self.resume not in ("auto", "never") and not Path(self.resume).is_dir():
            raise ValueError(
                f"resume is {self.resume!r}, which is neither auto, never, a step's number, nor a folder; auto goes on "
                "from the newest checkpoint, never starts anew"
            )


def load_config(files: Sequence[Path], overrides: Sequence[str], verb: str | None = None) -> LoadedConfig[Config]:
    """Read and check a run's configuration, with a verb's keys alone if one is given.

    Raises ConfigError with all faults.
    """
    return read_config(Config, files, overrides, ALIASES, ADVICE, verb, _with_algorithm, NEEDLESS)


def _with_algorithm(tree: dict[str, Given]) -> type[Config]:
    """Return the config's type, with the settings of an algorithm outside the package if `algo.name` names one."""
    given = find(tree, ("algo", "name"))
    if given is None or not (":" in given.text or given.text.endswith(".py")):
        return Config
    try:
        own = outside_config(given.text)
    except ValueError as error:
        raise ConfigError(f"{given.origin}: {error}") from error
    kind: Any = Annotated[reduce(or_, (*ALGO_CONFIGS, own)), ChosenBy("name")]
    algo: tuple[str, Any, Any] = ("algo", kind, field(default_factory=GrpoConfig))
    return make_dataclass("Config", [algo], bases=(Config,), frozen=True)
