"""The actor: one policy, as update shards and as generation shards, and the switch between the two."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from spmdrl.config.config import Config
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.fingerprint import architecture, architecture_differences, fingerprint
from spmdrl.engines.models.hf.model_folder import hf_config_dict, read_config, resolve_model_folder
from spmdrl.engines.models.hf.model_weights import WeightFiles, write_weights
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.engines.models.making.make_model import decoder_config, make_model_folder
from spmdrl.engines.models.tokenizer import TOKENIZER_FILES
from spmdrl.engines.training.checkpoints.manifest import damage, step_folder_name, steps_in
from spmdrl.engines.training.checkpoints.trainer_state import (
    ShardFiles,
    load_trainer_state,
    trainer_state,
    write_shards,
)
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.engines.training.update.optimizer import OptimConfig
from spmdrl.job.run.run_folder import on_main
from spmdrl.observability.logs.outage import warn
from spmdrl.resources.collectives import barrier
from spmdrl.resources.mesh import UpdateMesh
from spmdrl.resources.world import World

CHECKPOINTS = "checkpoints"
MODEL = "model"
TRAINER = "trainer"


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face folder and what was read of it."""

    folder: Path
    decoder: DecoderConfig

    @classmethod
    def of(cls, folder: Path) -> ModelSource:
        """Read the config and check the weights against it; raises ValueError before memory is taken for them."""
        source = cls(folder, read_config(folder))
        source.weights()
        return source

    def weights(self) -> WeightFiles:
        """The folder's weights, which fit the decoder exactly."""
        return open_weights(self.folder, self.decoder)


class Actor:
    """The policy on this rank; it starts in its update state. Building it is collective over all ranks."""

    def __init__(self, trainer: TrainingEngine, source: ModelSource, world: World):
        self.trainer = trainer
        self.source = source
        self.world = world

    def write_to(self, folder: Path) -> list[Path]:
        """Write model and trainer state below `folder`; returns this rank's files. Collective."""
        return [*self.write_model(folder / MODEL), *self._write_trainer(folder / TRAINER)]

    def read_from(self, folder: Path) -> None:
        """Take weights and optimizer back from a checkpoint of any layout."""
        load_trainer_state(self.trainer, ShardFiles(folder / TRAINER))

    def write_model(self, folder: Path) -> list[Path]:
        """Write the model as a Hugging Face folder; returns this rank's files. Collective."""
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

    def _write_trainer(self, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        return [write_shards(folder, self.world.rank, trainer_state(self.trainer))]


class ModelAlone:
    """What checkpoints hold with `checkpoint.model_only`."""

    def __init__(self, actor: Actor):
        self._actor = actor

    def write_to(self, folder: Path) -> list[Path]:
        """Write the model below `folder`; returns this rank's files. Collective."""
        return self._actor.write_model(folder / MODEL)

    def read_from(self, folder: Path) -> None:
        """Read the whole actor: from a checkpoint that was written before `model_only` was set."""
        self._actor.read_from(folder)


def token_ids_of(folder: Path) -> dict[str, object]:
    """The token ids of a model's config.json, which our own config of the decoder leaves out."""
    raw = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in raw.items() if key.endswith("_token_id")}


def prepare_model(config: Config, world: World) -> Path:
    """The folder of the model to start from: a Hugging Face folder, a run's newest checkpoint, or one made by code.

    Collective: the main rank makes the model where `model.make` asks for one, and all ranks must find the same. Raises
    ValueError where the run's folder holds one of other sizes.
    """
    folder = _model_folder(config, world)
    world.agree(lambda: model_facts(folder))
    return folder


def _model_folder(config: Config, world: World) -> Path:
    if config.model.make is not None:
        folder = config.run.folder / "initial_model"
        if world.is_main and not folder.exists():
            make_model_folder(folder, config.model.make, config.seed)
        barrier()
        _check_made(folder, config)
        return folder
    assert config.model.path is not None
    return newest_model(Path(config.model.path), world) or resolve_model_folder(config.model)


def model_facts(folder: Path) -> dict[str, str]:
    """What a model's folder holds, whatever its path on this node, as text that ranks can compare."""
    found = fingerprint(folder)
    facts = {f"the model's {key}": repr(value) for key, value in found.architecture.items()}
    return facts | {"the model's weights": found.weights[:16], "the model's tokenizer": found.tokenizer[:16]}


def _check_made(folder: Path, config: Config) -> None:
    assert config.model.make is not None
    made, wanted = architecture(read_config(folder)), architecture(decoder_config(config.model.make))
    if changed := architecture_differences(made, wanted):
        raise ValueError(
            f"{folder} holds the model that this run began with, but its {'; its '.join(changed)} as model.make asks; "
            f"set {config.run.folder_key} to a new one, or resume=never to start anew"
        )


def newest_model(folder: Path, world: World) -> Path | None:
    """The model of a run folder's newest sound checkpoint, or None where there is no checkpoint. Collective.

    Raises ConfigError on every rank where there are checkpoints, all of them damaged.
    """
    found = on_main(world, lambda: newest_sound_model(folder))
    return None if found is None else Path(found)


def newest_sound_model(folder: Path) -> str | None:
    """As `newest_model`, found by this rank alone. Raises ValueError where all checkpoints are damaged."""
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


def build_trainer(
    config: Config, source: ModelSource, mesh: UpdateMesh, world: World, *,
    optim: OptimConfig, num_steps: int, temperature: float, frozen: bool = False,
) -> TrainingEngine:  # fmt: skip
    """A training engine that holds the source's weights. Collective."""
    engine = TrainingEngine(
        source.decoder,
        replace(config.train, max_steps=num_steps),
        optim,
        mesh,
        world.device,
        frozen=frozen,
        temperature=temperature,
        compute_dtype=config.model.compute_dtype(world.device.kind),
    )
    engine.load(source.weights())
    return engine
