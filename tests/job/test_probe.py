"""The probe between real engines: every layout agrees, and weights in wrong places are found before they generate."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from tests.engines.training.tiny import CONFIG, LATENT, OPTIM, SPARSE
from tests.support.jobs import finished, inline_config, metrics_of, run_job
from tests.support.ranks import run_ranks

from spmdrl.dataflow.resharding.flow import ReshardingFlow
from spmdrl.dataflow.resharding.probe import Probe
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.packed_rows import LossTerms, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.job.model.switching import Switching
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.roles import POLICY
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.observability.timeline import Timeline
from spmdrl.resources.layout import GenerationLayout, UpdateLayout, fit_update_layout
from spmdrl.resources.memory import MemoryLedger
from spmdrl.resources.mesh import build_generation_mesh, build_update_mesh
from spmdrl.resources.world import World

DENSE = replace(CONFIG, intermediate_size=12)
ROWS = [[1, 2, 3, 4, 5, 6, 7], [8, 3], [9, 10, 1, 4]]


@dataclass(frozen=True)
class SmallLogs:
    """What switching needs of a run's logs."""

    timeline: Timeline
    recorder: Recorder = field(default_factory=Recorder)


class LateFlow(ReshardingFlow):
    """Two halves of a weight change places once the checksums have agreed."""

    def check_generation_weights(self) -> None:
        super().check_generation_weights()
        if self._world.rank == 1:
            weight = self._generator.wake_weights()["model.layers.0.self_attn.v_proj.weight"]
            weight.copy_(weight.roll(len(weight) // 2, 0))


@dataclass(frozen=True)
class Case:
    model: DecoderConfig
    update: UpdateLayout = UpdateLayout()
    generation: GenerationLayout = GenerationLayout()
    flow: type[ReshardingFlow] = ReshardingFlow


def likelihood(scores, micro):
    return LossTerms(-scores.logprobs_R.sum() / 10, {})


def build(world: World, case: Case, directory: str) -> tuple[TrainingEngine, NativeEngine, ReshardingFlow]:
    mesh = build_update_mesh(fit_update_layout(case.update, world.size), world.device, world.rank)
    trainer = TrainingEngine(
        case.model, TrainingConfig(), OPTIM, mesh, world.device, temperature=0.7, compute_dtype=torch.float32
    )
    trainer.load(RandomWeights(case.model, 0))
    generation = build_generation_mesh(case.generation, world.device, world.size, world.rank)
    generator = NativeEngine(case.model, RolloutConfig(), world.device.torch_device, torch.float32, mesh=generation)
    flow = case.flow(world, {POLICY: trainer}, generator, ReshardConfig(verify=True), MemoryLedger(), Path(directory))
    return trainer, generator, flow


def largest_difference(world: World, directory: str, case: Case) -> bytes | str:
    """The metrics of two switches with an update between them, or what refused one of them."""
    trainer, generator, flow = build(world, case, directory)
    logs = SmallLogs(Timeline(Path(directory) / f"{world.rank}.jsonl", world.rank))
    probe = Probe(trainer, generator, lambda step: ROWS[: step + 1], tolerance=0.01)
    switching = Switching(flow, MemoryLedger(), logs, world.device, probe)
    tokens = torch.arange(24) % 11
    try:
        for step in (1, 2):
            switching.to_generation(step)
            switching.start_return(step)
            switching.to_update(step)
            trainer.update(TokenRows(tokens, offsets_of([12, 12]), torch.tensor([3, 3])), likelihood)
    except RuntimeError as refusal:
        return str(refusal)
    finally:
        flow.close()
    seconds = logs.timeline.stage_seconds(2)
    assert seconds["probe"] > 0
    return encode(logs.recorder.drain())


CASES = {
    "one rank": (1, Case(DENSE)),
    "pipeline to data": (2, Case(DENSE, UpdateLayout(pipeline=2))),
    "tensor to tensor": (2, Case(LATENT, UpdateLayout(tensor=2), GenerationLayout(tensor=2))),
    "expert to expert": (2, Case(SPARSE, UpdateLayout(expert=2), GenerationLayout(expert=2))),
    "context to tensor": (2, Case(DENSE, UpdateLayout(context=2), GenerationLayout(tensor=2))),
    "pipeline and tensor to tensor": (4, Case(DENSE, UpdateLayout(pipeline=2, tensor=2), GenerationLayout(tensor=2))),
    "expert and replicas": (4, Case(SPARSE, UpdateLayout(data=2, shard=2, expert=2), GenerationLayout(expert=2))),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow if case[0] > 2 else ()) for name, case in CASES.items()]
)
def test_trainer_and_generator_agree_to_rounding_whatever_the_layouts(tmp_path, case):
    ranks, engines = CASES[case]
    metrics = merge(run_ranks(ranks, largest_difference, str(tmp_path), engines))
    assert 0 <= metrics["mismatch/probe_abs_max"] < 1e-5


@pytest.mark.ranks
def test_weights_in_wrong_places_are_refused_on_every_rank_before_anything_is_generated(tmp_path):
    case = Case(DENSE, UpdateLayout(shard=2), flow=LateFlow)
    first, second = run_ranks(2, largest_difference, str(tmp_path), case)
    assert isinstance(first, str) and first == second
    assert "policy version 0" in first and "reshard.probe_tolerance is 0.01" in first


@pytest.mark.ranks
@pytest.mark.slow
def test_a_job_probes_each_switch_of_a_resumed_run_and_its_evaluations(tmp_path):
    folder, config = tmp_path / "run", inline_config(tmp_path)
    settings = [
        f"run.dir={folder}", "resources.update.pipeline=2", "resources.generation.tensor=1", "eval.before_train=true",
        "data.eval=synthetic://addition?low=0&high=9&count=5&split=test", "rollout.temperature=0.7",
    ]  # fmt: skip
    finished(run_job("train", config, *settings, "train.max_steps=1", ranks=2))
    finished(run_job("train", config, *settings, "train.max_steps=2", ranks=2))
    steps = metrics_of(folder)
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert 0 <= step["mismatch/probe_abs_max"] < 1e-5 and step["time/probe"] > 0
    finished(run_job("train", config, *settings, "train.max_steps=3", "reshard.probe_tokens=0", ranks=2))
    assert "mismatch/probe_abs_max" not in metrics_of(folder)[-1]


def test_evaluations_of_supervised_training_are_probed(tmp_path):
    folder = tmp_path / "run"
    settings = ["data.eval=synthetic://addition?low=0&high=9&count=5&split=test", "sft.max_steps=2"]
    finished(run_job("sft", inline_config(tmp_path), f"run.dir={folder}", *settings))
    assert 0 <= metrics_of(folder)[-1]["mismatch/probe_abs_max"] < 1e-5
