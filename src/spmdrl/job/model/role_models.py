"""The models of a run on this rank: built by role, written into checkpoints and read back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spmdrl.config.config import Config
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import hf_config_dict
from spmdrl.engines.models.hf.model_weights import write_weights
from spmdrl.engines.models.tokenizer import TOKENIZER_FILES
from spmdrl.engines.training.checkpoints.trainer_state import (
    ShardFiles,
    load_trainer_state,
    trainer_state,
    write_shards,
)
from spmdrl.engines.training.routing.routers import RoutingConfig
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.engines.training.update.optimizer import OptimConfig
from spmdrl.job.model.model_source import MODEL, ModelSource, token_ids_of
from spmdrl.resources.mesh import UpdateMesh
from spmdrl.resources.world import World
from spmdrl.types.roles import CRITIC, POLICY, RankSet, Role

TRAINER = "trainer"


@dataclass(frozen=True)
class RoleModel:
    """One model on this rank; it starts in its update state."""

    role: Role
    trainer: TrainingEngine
    source: ModelSource
    world: World

    def write_to(self, folder: Path) -> list[Path]:
        """Write model and trainer state into a checkpoint; returns this rank's files. Collective."""
        shards = self._folder_in(folder) / TRAINER
        paths = self.write_model(folder)
        shards.mkdir(parents=True, exist_ok=True)
        return [*paths, write_shards(shards, self.world.rank, trainer_state(self.trainer))]

    def read_from(self, folder: Path) -> None:
        """Take weights and optimizer back from a checkpoint of any layout."""
        load_trainer_state(self.trainer, ShardFiles(self._folder_in(folder) / TRAINER))

    def write_model(self, checkpoint: Path) -> list[Path]:
        """Write the model into a checkpoint, as a Hugging Face folder; returns this rank's files. Collective."""
        folder = self._folder_in(checkpoint) / MODEL
        dtype = self.trainer.compute_dtype
        weights = self.trainer.whole_weights(dtype)
        try:
            if not self.world.is_main:
                return []
            folder.mkdir(parents=True, exist_ok=True)
            write_weights(folder, weights)
        finally:
            # The gathers are collective: ranks that keep nothing take part, and so does one whose disk is full.
            for _ in weights:
                pass
        config = hf_config_dict(self.source.decoder, dtype) | token_ids_of(self.source.folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in TOKENIZER_FILES:
            if (self.source.folder / name).is_file():
                shutil.copyfile(self.source.folder / name, folder / name)
        return sorted(path for path in folder.iterdir() if path.is_file())

    def _folder_in(self, checkpoint: Path) -> Path:
        assert self.role.checkpoint is not None, f"checkpoints hold nothing of the {self.role.name}"
        return checkpoint / self.role.checkpoint


RoleModels = Mapping[Role, RoleModel]


def saved_models(models: RoleModels) -> list[RoleModel]:
    """Those that checkpoints hold."""
    return [model for role, model in models.items() if role.checkpoint is not None]


class ModelsAlone:
    """What checkpoints hold with `checkpoint.model_only`."""

    def __init__(self, models: Iterable[RoleModel]):
        self._models = list(models)

    def write_to(self, folder: Path) -> list[Path]:
        """Write the models below `folder`; returns this rank's files. Collective."""
        return [path for model in self._models for path in model.write_model(folder)]

    def read_from(self, folder: Path) -> None:
        """Read the trainer states too: from a checkpoint that was written before `model_only` was set."""
        for model in self._models:
            model.read_from(folder)


def build_role_models(
    config: Config, sources: Mapping[Role, ModelSource], meshes: Mapping[RankSet, UpdateMesh], world: World
) -> RoleModels:
    """The models of a run that trains on rewards. Collective."""
    optim, num_steps = dict.fromkeys(sources, config.optim), dict.fromkeys(sources, config.train.max_steps)
    if config.critic is not None:
        optim[CRITIC] = config.critic.optim
        num_steps[POLICY] = max(1, config.train.max_steps - config.critic.warmup_steps)
    models = {}
    for role, source in sources.items():
        engine = build_trainer(
            config, source, meshes[role.ranks], world, role=role, optim=optim[role], num_steps=num_steps[role],
            temperature=config.rollout.temperature,
        )  # fmt: skip
        models[role] = RoleModel(role, engine, source, world)
    return models


def build_trainer(
    config: Config, source: ModelSource, mesh: UpdateMesh, world: World, *,
    role: Role, optim: OptimConfig, num_steps: int, temperature: float,
) -> TrainingEngine:  # fmt: skip
    """A training engine that holds the source's weights. Collective."""
    routing = config.train.routing if role is POLICY else _routing_beside(config.train.routing, source.decoder)
    engine = TrainingEngine(
        source.decoder,
        replace(config.train, max_steps=num_steps, routing=routing),
        optim,
        mesh,
        world.device,
        frozen=not role.is_trained,
        temperature=temperature,
        compute_dtype=config.model.compute_dtype(world.device.kind),
        rating=role.rating,
    )
    engine.load(source.initial_weights())
    return engine


def _routing_beside(routing: RoutingConfig, decoder: DecoderConfig) -> RoutingConfig:
    """What a model beside the policy can follow of its options: rows hold the choices of the policy's routers alone."""
    if decoder.moe is None:
        return RoutingConfig()
    rate = routing.bias_update_rate if decoder.moe.scoring == "sigmoid" else 0.0
    return replace(routing, replay="none", bias_update_rate=rate)
