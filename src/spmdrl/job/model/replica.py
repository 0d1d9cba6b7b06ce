"""A replica: ranks that generate together, each with a generation engine that holds its slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from spmdrl.config.config import Config
from spmdrl.dataflow.resharding.planning.slice_layouts import fitted_stride, parameter_table
from spmdrl.engines.generation.frozen_generator import FrozenGenerator
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder
from spmdrl.engines.generation.protocol import GenerationEngine, IdleEngine
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import compute_dtype, parameter_shapes
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.model_checks import check_vllm, check_vllm_computes, check_vllm_on
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.resources.layout import GenerationLayout
from spmdrl.resources.memory import MemoryLedger, Owner
from spmdrl.resources.mesh import GenerationMesh, build_generation_mesh
from spmdrl.resources.rank_sets import RankSet, RankSets
from spmdrl.resources.world import World


@dataclass(frozen=True)
class Replica:
    """This rank's generation engine, and the ranks that it generates with."""

    engine: GenerationEngine
    mesh: GenerationMesh

    def share_of(self, num_prompts: int) -> range:
        """Return the numbers of the prompts for this replica, the same on all of its ranks.

        Strided, so that a file sorted by difficulty or length is spread evenly.
        """
        replica = self.mesh.replica
        return range(0) if replica is None else range(replica, num_prompts, len(self.mesh.replicas))


def groups_at_once(config: Config, num_groups: int, group_size: int) -> dict[str, int]:
    """Return the number and size of groups of rows of which an engine computes the first tokens once."""
    if config.rollout.partial_max_rounds > 1 or config.environment.key is not None:
        # Rows that continue have first tokens of their own.
        num_groups, group_size = num_groups * group_size, 1
    return {"num_groups": num_groups, "group_size": group_size}


def build_replica(
    config: Config, source: ModelSource, world: World, layout: GenerationLayout, members: RankSet | None = None
) -> Replica:
    """Build the mesh of a checked layout and this rank's engine, asleep. Collective over all ranks.

    Only `members` generate, by default all ranks; the others get an idle engine.
    """
    is_vllm = generation_engine_name(config.rollout, world.device.kind) == "vllm"
    ranks = range(world.size) if members is None else members.ranks
    if is_vllm:
        check_vllm_generates(config, source, ranks, world.size)
    mesh = build_generation_mesh(layout, world.device, len(ranks), world.rank, first=ranks[0])
    if world.rank not in ranks:
        return Replica(IdleEngine(parameter_shapes(engine_decoder(source))), mesh)
    build = _vllm_engine if is_vllm else _native_engine
    return Replica(build(config, source, world, mesh), mesh)


def check_vllm_generates(config: Config, source: ModelSource, ranks: Sequence[int], num_ranks: int) -> None:
    """Refuse options, rank sets and models that vLLM doesn't support. Raises ValueError."""
    check_vllm(config)
    check_vllm_on(config, ranks, num_ranks)
    check_vllm_computes(source.folder, source.decoder)


def build_policys_replica(
    checked: CheckedRun, source: ModelSource, world: World, sets: RankSets | None = None
) -> Replica:
    """Return the policy's replica, placed to minimise missing weights. Collective.

    With `sets`, only one of them generates.
    """
    config, layout = checked.config, checked.config.resources.generation
    if sets is not None and sets.are_apart:
        # No rank holds any of the weights that it wants, so no stride keeps more of them in place.
        layout = replace(layout, tensor_stride=layout.tensor_stride or 1)
        return build_replica(config, source, world, layout, sets.generation)
    # vLLM takes consecutive ranks.
    if generation_engine_name(config.rollout, world.device.kind) == "native":
        table = parameter_table(source.decoder)
        layout = fitted_stride(table, checked.layout, layout, world.launch.local_world_size)
    return build_replica(config, source, world, layout)


def load_replica(config: Config, source: ModelSource, world: World) -> Replica:
    """Build a replica that generates with the source's weights, without a trainer. Collective over all ranks."""
    replica = build_replica(config, source, world, config.resources.generation)
    engine, weights = replica.engine, source.initial_weights()
    if engine.wants_iterator:
        shapes = sorted(engine.weight_shapes().items())
        engine.wake_weights()
        engine.load_weights((name, weights.read(whole_slice(name, shape))) for name, shape in shapes)
    else:
        storage = engine.wake_weights()
        for name, wanted in engine.weight_slices().items():
            storage[name].copy_(weights.read(wanted))
    engine.wake_cache()
    return replica


def build_frozen_generator(
    config: Config, source: ModelSource, world: World, ledger: MemoryLedger, *,
    mesh: GenerationMesh, owner: Owner, kv_cache_gib: float,
) -> FrozenGenerator:  # fmt: skip
    """Return a native engine with this rank's weights from the source's files, asleep, with the given cache size."""
    device = world.device
    rollout = replace(
        config.rollout, stop=(), engine_kwargs={}, cuda_graphs=False,
        kv_cache_gib=None if device.is_cpu else kv_cache_gib,
    )  # fmt: skip
    engine = _native_engine(replace(config, rollout=rollout), source, world, mesh, records=False)
    files, asleep = source.weights(), engine.wake_weights(())
    weights = {
        name: files.read(wanted).to(asleep[name].dtype).contiguous() for name, wanted in engine.weight_slices().items()
    }
    return FrozenGenerator(engine, weights, device, ledger, owner)


def generation_engine_name(config: RolloutConfig, device_kind: str) -> str:
    """Resolve `rollout.engine: auto`: vLLM if it is installed and there is an accelerator."""
    if config.engine != "auto":
        return config.engine
    if device_kind == "cpu":
        return "native"
    return "vllm" if find_spec("vllm") is not None else "native"


def _vllm_engine(config: Config, source: ModelSource, world: World, mesh: GenerationMesh) -> GenerationEngine:
    # vLLM is an optional back end, and its import takes tens of seconds.
    from spmdrl.engines.generation.vllm_engine import VllmEngine

    dtype = compute_dtype(config.model, world.device.kind)
    device, text = world.device.torch_device, text_arguments(config.rollout, source)
    return VllmEngine(source.folder, config.rollout, device, dtype, tensor=mesh.tensor.size, **text)


def _native_engine(
    config: Config, source: ModelSource, world: World, mesh: GenerationMesh, *, records: bool = True
) -> GenerationEngine:
    # Imported here so that a run with vLLM doesn't need it.
    from spmdrl.engines.generation.native.native_engine import NativeEngine

    dtype = compute_dtype(config.model, world.device.kind)
    # A run that only generates may have a dense model with any training options.
    records = records and config.train.routing.replay == "rollout" and source.decoder.moe is not None
    recorder = ChoiceRecorder() if records else None
    device, text = world.device.torch_device, text_arguments(config.rollout, source)
    return NativeEngine(engine_decoder(source), config.rollout, device, dtype, mesh=mesh, recorder=recorder, **text)


def engine_decoder(source: ModelSource) -> DecoderConfig:
    """Return the model that a native engine holds: without adapters, where they are merged into its weights."""
    decoder = source.decoder
    return replace(decoder, lora=None) if decoder.lora is not None and decoder.lora.merge else decoder


def text_arguments(config: RolloutConfig, source: ModelSource) -> dict[str, Any]:
    """Return the engines' tokenizer arguments: decoding, if some text ends a response, and ids of no token."""
    tokenizer = ModelTokenizer(source.folder)
    without_token = tokenizer.ids_without_token(source.decoder.vocab_size)
    return {"decode": tokenizer.decode_all if config.stop else None, "ids_without_token": without_token}
