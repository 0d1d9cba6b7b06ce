"""The models of a run on this rank: built by role, written into checkpoints and read back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.adapter_files import write_adapters
from spmdrl.engines.models.hf.model_folder import (
    buffer_dtypes,
    compute_dtype,
    hf_config_dict,
    parameter_shapes,
    stored_forms,
)
from spmdrl.engines.models.hf.model_weights import write_weights
from spmdrl.engines.models.lora import is_adapter
from spmdrl.engines.models.tokenizer import TOKENIZER_FILES, pad_apart
from spmdrl.engines.training.checkpoints.checkpoint import model_dtype
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, Weights
from spmdrl.engines.training.checkpoints.trainer_state import (
    ShardFiles,
    load_trainer_state,
    trainer_state,
    write_shards,
)
from spmdrl.engines.training.sharded_model import Shard
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.job.model.model_source import MODEL, ModelSource
from spmdrl.job.run.savable import Savable, SavedParts
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.roles import POLICY, Role
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig
from spmdrl.nouns.settings.training_config import RoutingConfig
from spmdrl.resources.mesh import UpdateMesh, join_update_mesh
from spmdrl.resources.world import World

TRAINER = "trainer"
ADAPTER = "adapter"


@dataclass(frozen=True)
class RoleModel:
    """One model on this rank; it starts in its update state."""

    role: Role
    trainer: TrainingEngine
    source: ModelSource
    world: World
    saved_dtype: torch.dtype
    """dtype of the weights in written Hugging Face folders"""
    chat_template: str | None = None
    """text that replaces the tokenizer's template there"""

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write model and trainer state into a checkpoint. Collective."""
        # With adapters, the shards lack the model's other weights.
        is_whole = self.source.decoder.lora is None
        if not (is_whole and writes.follow(partial(self._write_from_shards, folder))):
            self.write_model(folder, writes)
        shards = {
            key: Shard(writes.held(shard.tensor), shard.slice, shard.global_shape)
            for key, shard in trainer_state(self.trainer).items()
        }
        writes.add(partial(self._write_trainer, folder, shards))

    def read_from(self, folder: Path) -> None:
        """Restore weights and optimizer from a checkpoint of any layout."""
        load_trainer_state(self.trainer, ShardFiles(self._folder_in(folder) / TRAINER))

    def write_model(self, checkpoint: Path, writes: FileWrites) -> None:
        """Write the model into a checkpoint, as a Hugging Face folder, and adapters in PEFT's form beside it.

        Collective.
        """
        adapters = self._whole_adapters()
        weights = self.trainer.whole_weights(self.saved_dtype)
        try:
            if self.world.is_main:
                writes.add(partial(self._write_folder, checkpoint, writes.held_weights(weights), adapters))
        finally:
            # The gathers are collective: ranks that write nothing take part, and so does one whose disk is full.
            for _ in weights:
                pass

    def _write_trainer(self, checkpoint: Path, shards: Mapping[str, Shard]) -> list[Path]:
        folder = self._folder_in(checkpoint) / TRAINER
        folder.mkdir(parents=True, exist_ok=True)
        return [write_shards(folder, self.world.rank, shards)]

    def _write_from_shards(self, checkpoint: Path) -> list[Path]:
        """Write the model from the weights in the files of all ranks' shards."""
        files, decoder = ShardFiles(self._folder_in(checkpoint) / TRAINER), self.source.decoder
        kept = buffer_dtypes(decoder)
        weights = (
            (name, files.read("weight", whole_slice(name, shape)).to(kept.get(name, self.saved_dtype)))
            for name, shape in parameter_shapes(decoder).items()
        )
        return self._write_folder(checkpoint, weights, {})

    def _write_folder(self, checkpoint: Path, weights: Weights, adapters: Mapping[str, Tensor]) -> list[Path]:
        """Write whole weights with the rest of the model's folder; returns the paths."""
        folder = self._folder_in(checkpoint) / MODEL
        folder.mkdir(parents=True, exist_ok=True)
        forms = stored_forms(self.source.decoder)
        write_weights(folder, weights, forms=forms)
        config = hf_config_dict(self.source.decoder, self.saved_dtype)
        raw = json.loads((self.source.folder / "config.json").read_text())
        # The decoder's own config omits them.
        config |= {key: value for key, value in raw.items() if key.endswith("_token_id")}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in TOKENIZER_FILES:
            if (self.source.folder / name).is_file():
                shutil.copyfile(self.source.folder / name, folder / name)
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
        if self.trainer.rating == "row_values":
            config["pad_token_id"] = pad_apart(folder, self.source.decoder.vocab_size)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        if (lora := self.source.decoder.lora) is not None:
            paths += write_adapters(folder.with_name(ADAPTER), adapters, lora, self.source.base_name, forms)
        return paths

    def _whole_adapters(self) -> dict[str, Tensor]:
        """Return the adapters, on the main rank, before any write, which may fail there. Collective."""
        if self.source.decoder.lora is None:
            return {}
        self.trainer.check_weights_present("gather adapters")
        whole = self.trainer.model.gather_whole(self.trainer.named_shards(), torch.float32, wanted=is_adapter)
        return {name: one.to("cpu", copy=True) for name, one in whole if self.world.is_main}

    def _folder_in(self, checkpoint: Path) -> Path:
        assert self.role.checkpoint is not None, f"checkpoints hold nothing of the {self.role.name}"
        return checkpoint / self.role.checkpoint


RoleModels = Mapping[Role, RoleModel]


class ModelsAlone:
    """State of checkpoints with `checkpoint.model_only`."""

    def __init__(self, models: Iterable[RoleModel]):
        self._models = list(models)

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write the models below `folder`. Collective."""
        for model in self._models:
            model.write_model(folder, writes)

    def read_from(self, folder: Path) -> None:
        """Read the trainer states too, from a checkpoint that was written before `model_only` was set."""
        for model in self._models:
            model.read_from(folder)


def saved_state(
    config: CheckpointConfig, models: RoleModels, *others: Savable, where: Callable[[Savable], Savable] | None = None
) -> Savable:
    """Return the state of checkpoints: the saved models, and `others`.

    `where` restricts the models' part to the ranks that train, if others only generate.
    """
    saved = [model for role, model in models.items() if role.checkpoint is not None]
    part = ModelsAlone(saved) if config.model_only else SavedParts(*saved)
    of_models = part if where is None else where(part)
    return of_models if config.model_only else SavedParts(of_models, *others)


def build_role_models(checked: CheckedRun, sources: Mapping[Role, ModelSource], world: World) -> RoleModels:
    """Return the models of a run, each cut by its layout, with the weights of their sources. Collective.

    Ranks beyond the layout, which only generate, have none.
    """
    layouts = {role: checked.layout_of(role) for role in sources}
    # Roles with the same layout share its process groups.
    meshes = {layout: join_update_mesh(layout, world.device, world.rank) for layout in dict.fromkeys(layouts.values())}
    config = checked.config
    saved_dtype = model_dtype(config.checkpoint, compute_dtype(config.model, world.device.kind))
    chat_template = config.data.template.own_template()
    models = {}
    for role, source in sources.items():
        mesh = meshes[layouts[role]]
        if role.engine == "training" and mesh is not None:
            trainer = build_trainer(checked, role, source, mesh, world)
            trainer.load(source.initial_weights())
            models[role] = RoleModel(role, trainer, source, world, saved_dtype, chat_template)
    return models


def build_trainer(
    checked: CheckedRun, role: Role, source: ModelSource, mesh: UpdateMesh, world: World
) -> TrainingEngine:
    """Return a role's engine before its weights are loaded. Collective over the mesh."""
    config, critic = checked.config, checked.config.critic
    num_steps, temperature = checked.num_steps, config.rollout.temperature
    training = config.train
    if checked.offline is not None:
        temperature = 1.0
        # These are the samples' of a step of rollouts.
        training = replace(training, updates_per_step=1, epochs_per_step=1)
    elif critic is not None and role is POLICY:
        num_steps = max(1, num_steps - critic.warmup_steps)
    routing = config.train.routing if role is POLICY else _routing_beside(config.train.routing, source.decoder)
    return TrainingEngine(
        source.decoder,
        replace(training, max_steps=num_steps, routing=routing),
        checked.optim_of(role),
        mesh,
        world.device,
        frozen=not role.is_trained,
        temperature=temperature,
        compute_dtype=compute_dtype(config.model, world.device.kind),
        rating=checked.rating(role),
    )


def _routing_beside(routing: RoutingConfig, decoder: DecoderConfig) -> RoutingConfig:
    """Return the routing options that apply to a model beside the policy: rows have the policy's choices only."""
    if decoder.moe is None:
        return RoutingConfig()
    rate = routing.bias_update_rate if decoder.moe.scoring == "sigmoid" else 0.0
    return replace(routing, replay="none", bias_update_rate=rate)
