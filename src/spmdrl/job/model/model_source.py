"""Sources of a run's models: a Hugging Face folder, the hub, a run's checkpoint, or code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spmdrl.config.config import Config
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.adapter_files import ADAPTER_CONFIG, StoredAdapters, WithNewAdapters
from spmdrl.engines.models.hf.fingerprint import architecture, architecture_differences, fingerprint
from spmdrl.engines.models.hf.model_folder import (
    HUB_FILES,
    HUB_TEXT_FILES,
    parameter_shapes,
    read_config,
    resolve_model_folder,
)
from spmdrl.engines.models.hf.model_weights import WeightFiles, WeightSource, WithNewHead
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.engines.models.make_model import decoder_config, make_model_folder
from spmdrl.engines.training.checkpoints.manifest import damage, step_folder_name, steps_in
from spmdrl.job.run.run_folder import on_main
from spmdrl.nouns.roles import CRITIC, JUDGE, REWARD_MODEL, TEACHER, Role
from spmdrl.nouns.settings.data_config import data_sources
from spmdrl.nouns.settings.model_config import LoraConfig
from spmdrl.nouns.settings.role_configs import JudgeConfig
from spmdrl.observability.outage import warn
from spmdrl.resources.collectives import barrier
from spmdrl.resources.world import World

CHECKPOINTS = "checkpoints"
MODEL = "model"
INITIAL_MODEL = "initial_model"


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face folder and its config."""

    folder: Path
    decoder: DecoderConfig
    has_new_head: bool = False
    """true if this value model's head isn't in the folder, but starts at 0"""
    seed: int = 0
    """seed of new adapters, if the decoder has any: none is in the folder"""
    adapters: StoredAdapters | None = None
    """trained adapters to begin with in place of new ones"""

    @property
    def base_name(self) -> str:
        """Name for adapters of the model that they belong to: its name on the hub, or its folder."""
        parts = self.folder.resolve().parts
        # The hub's cache names its folders: models--OWNER--NAME/snapshots/REVISION.
        if len(parts) > 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
            return "/".join(parts[-3].split("--")[1:])
        return str(self.folder.resolve())

    def results_in(self, run: Path, verb: str, config: Config) -> Path:
        """Return the folder, below a run's, for results of a verb that doesn't train this model: one per data.eval."""
        whole_name = self.base_name if self.adapters is None else str(self.adapters.folder.resolve())
        path, data = Path(whole_name), config.data
        name = f"{path.parts[-4]}_{path.parts[-2]}" if path.parts[-3:-2] == (CHECKPOINTS,) else path.name
        first = [Path(source.path.partition("?")[0]).stem for source in data_sources(data.eval)][:1]
        digits = hashlib.sha256(repr((whole_name, data.eval, data.eval_split)).encode()).hexdigest()[:6]
        return run / verb / "_".join([name, *first, digits])

    @classmethod
    def of(cls, folder: Path, *, patterns: Sequence[str] = HUB_FILES, is_there: bool = True) -> ModelSource:
        """Read the config and check the weights against it, if the model `is_there`.

        A folder of adapters stands for its base with them, fetched by `patterns`. Raises ValueError before memory is
        allocated.
        """
        adapters = None
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
            adapters = StoredAdapters(folder)
            key = f"base_model_name_or_path in {folder / ADAPTER_CONFIG}"
            folder = resolve_model_folder(adapters.base, patterns, key=key)
            is_there = patterns is HUB_FILES or Path(adapters.base).expanduser().is_dir()
        source = cls(folder, read_config(folder), adapters=adapters)
        if is_there:
            source.weights()
        return source

    def weights(self) -> WeightFiles:
        """Return the folder's weights, which fit the decoder exactly, except adapters and a new head."""
        return open_weights(
            self.folder, read_config(self.folder) if self.has_new_head else replace(self.decoder, lora=None)
        )

    def initial_weights(self) -> WeightSource:
        """Return the weights to begin with, into which adapters are merged if the decoder has none."""
        if self.has_new_head:
            return WithNewHead(self.weights())
        if self.decoder.lora is not None:
            if self.adapters is not None:
                return self.adapters.beside(self.weights())
            return WithNewAdapters(self.weights(), parameter_shapes(self.decoder), self.seed)
        return self.weights() if self.adapters is None else self.adapters.merged_into(self.weights())

    def with_adapters(self, lora: LoraConfig | None, seed: int) -> ModelSource:
        """Return the same model with adapters: stored ones, or new ones, which don't change its outputs yet.

        Unchanged without `lora`. Raises ValueError if stored ones differ from `lora`.
        """
        if self.adapters is not None:
            decoder = replace(self.decoder, lora=lora)
            self.adapters.check_fits(lora, {} if lora is None else parameter_shapes(decoder))
        return self if lora is None else replace(self, decoder=replace(self.decoder, lora=lora), seed=seed)

    def with_value_head(self) -> ModelSource:
        """Return the same model with its value head, or with a new one."""
        if self.decoder.head == "value":
            return self
        return ModelSource(self.folder, self.decoder.with_value_head(), has_new_head=True)


def sources_of(
    roles: Iterable[Role], policy: ModelSource, config: Config, *, is_there: bool = True
) -> dict[Role, ModelSource]:
    """Find the sources of a run's models; without `is_there`, weights needn't be on this machine.

    Raises ValueError if a model doesn't exist, or can't read the policy's tokens.
    """
    sources = dict.fromkeys(roles, policy)
    if CRITIC in sources:
        assert config.critic is not None, "a run has a critic by its section"
        sources[CRITIC] = policy.with_value_head()
        if config.critic.path is not None:
            critic = _source_beside(config.critic.path, "critic.path", is_there=is_there).with_value_head()
            sources[CRITIC] = _rating(critic, policy.decoder, f"critic.path {config.critic.path}")
    if TEACHER in sources:
        assert config.teacher is not None and config.teacher.path is not None, "a run has a teacher by its section"
        teacher = _source_beside(config.teacher.path, "teacher.path", is_there=is_there)
        if teacher.decoder.head != "vocab":
            raise ValueError(
                f"teacher.path {config.teacher.path} has a {teacher.decoder.head} head, which gives no log-probs; give "
                "a language model"
            )
        sources[TEACHER] = _rating(teacher, policy.decoder, f"teacher.path {config.teacher.path}")
    if REWARD_MODEL in sources:
        assert config.reward.model is not None and config.reward.model.path is not None, "a run has it by its section"
        path = config.reward.model.path
        model = _source_beside(path, "reward.model.path", is_there=is_there)
        if model.decoder.head != "value":
            raise ValueError(
                f"reward.model.path {path} has a {model.decoder.head} head, which gives no score; give a model for "
                "sequence classification with one label, such as a run of the verb reward-model"
            )
        sources[REWARD_MODEL] = _rating(model, policy.decoder, f"reward.model.path {path}")
    if JUDGE in sources:
        assert config.reward.judge is not None, "a run has a judge by its section"
        sources[JUDGE] = _judge_source(config.reward.judge, is_there=is_there)
    return sources


def _judge_source(judge: JudgeConfig, *, is_there: bool) -> ModelSource:
    source = _source_beside(judge.path, "reward.judge.path", is_there=is_there)
    if source.decoder.head != "vocab":
        raise ValueError(
            f"reward.judge.path {judge.path} has a {source.decoder.head} head and writes nothing; give a language model"
        )
    if source.decoder.max_positions <= judge.max_tokens:
        raise ValueError(
            f"reward.judge.max_tokens is {judge.max_tokens}, but {judge.path} has {source.decoder.max_positions} "
            "positions, which leaves none for a question; lower reward.judge.max_tokens"
        )
    return source


def _source_beside(path: str, key: str, *, is_there: bool) -> ModelSource:
    """Return the model that a key names, which may be a run's newest checkpoint."""
    found = newest_sound_model(Path(path).expanduser())
    folder = Path(found) if found else resolve_model_folder(path, HUB_FILES if is_there else HUB_TEXT_FILES, key=key)
    source = ModelSource(folder, read_config(folder))
    if is_there or Path(path).expanduser().is_dir():
        source.weights()
    return source


def _rating(source: ModelSource, policy: DecoderConfig, name: str) -> ModelSource:
    """Return the model, if it can read every output of the policy."""
    decoder = source.decoder
    if decoder.vocab_size < policy.vocab_size or decoder.max_positions < policy.max_positions:
        raise ValueError(
            f"{name} has {decoder.vocab_size} tokens and {decoder.max_positions} positions, but the policy that it "
            f"rates has {policy.vocab_size} and {policy.max_positions}; give a model of the same tokenizer with no "
            "fewer of both"
        )
    return source


def prepare_model(config: Config, world: World) -> ModelSource:
    """Return the initial model: from a Hugging Face folder, a run's newest checkpoint, or code.

    Collective: the main rank makes the model if `model.make` is set, and all ranks must find the same. Raises
    ValueError if the run's folder holds one of other sizes.
    """
    if config.model.make is not None:
        folder = config.run.folder / INITIAL_MODEL
        if world.is_main and not folder.exists():
            make_model_folder(folder, config.model.make, config.seed)
        barrier()
        _check_made(folder, config)
    else:
        assert config.model.path is not None
        folder = newest_model(Path(config.model.path), world) or resolve_model_folder(config.model.path)
    source = ModelSource.of(folder)
    adapters = {} if source.adapters is None else {"the adapters at the start": source.adapters.digest}
    world.agree(lambda: model_facts(source.folder) | adapters)
    return source


def model_facts(folder: Path, name: str = "model") -> dict[str, str]:
    """Return a model folder's content, independent of its path, as text that ranks can compare."""
    found = fingerprint(folder)
    facts = {f"the {name}'s {key}": repr(value) for key, value in found.architecture.items()}
    return facts | {f"the {name}'s weights": found.weights[:16], f"the {name}'s tokenizer": found.tokenizer[:16]}


def _check_made(folder: Path, config: Config) -> None:
    assert config.model.make is not None
    made, wanted = architecture(read_config(folder)), architecture(decoder_config(config.model.make))
    if changed := architecture_differences(made, wanted):
        raise ValueError(
            f"{folder} holds the model that this run began with, but its {'; its '.join(changed)} as model.make asks; "
            f"set {config.run.folder_key} to a new one, or resume=never to start anew"
        )


def newest_model(folder: Path, world: World) -> Path | None:
    """Return the model of a run folder's newest sound checkpoint, or None without checkpoints. Collective.

    Raises ConfigError on every rank if all checkpoints are damaged.
    """
    found = on_main(world, lambda: newest_sound_model(folder))
    return None if found is None else Path(found)


def newest_sound_model(folder: Path) -> str | None:
    """Find `newest_model` on this rank alone. Raises ValueError if all checkpoints are damaged."""
    complaints = []
    for step in reversed(steps_in(folder / CHECKPOINTS)):
        checkpoint = folder / CHECKPOINTS / step_folder_name(step)
        problem = damage(checkpoint, [f"{MODEL}/config.json"], below=f"{MODEL}/")
        if problem is None:
            return str(checkpoint / MODEL)
        complaints.append(f"{checkpoint}: {problem}")
        warn(f"damaged checkpoint passed over: {complaints[-1]}")
    if complaints:
        raise ValueError(f"every checkpoint of {folder} is damaged: {'; '.join(complaints)}")
    return None
