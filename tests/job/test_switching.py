"""The switch with real engines: what is on the device, and what this process really holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tests.dataflow.resharding.engines import SmallGenerator, SmallTrainer, make_model
from tests.support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from spmdrl.dataflow.resharding.flow import ReshardingFlow
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.packed_rows import LossTerms, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.job.model.switching import Switching
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.roles import POLICY, REFERENCE
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.observability.timeline import Timeline, TimelineRecords, read_timeline
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.memory import MemoryLedger, release_to_system, resident_bytes
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World

MIB = 2**20
AWAY = ("update_weights", "gradients", "optimizer")

FIFTY_MILLION = DecoderConfig(
    model_type="qwen3", vocab_size=1024, hidden_size=768, intermediate_size=2304, num_layers=8, num_heads=12,
    num_kv_heads=4, head_size=64, rms_eps=1e-6, rope_theta=10000.0, qk_norm=True, attention_bias=False,
    tied_head=True, max_positions=128,
)  # fmt: skip


def rows() -> TokenRows:
    tokens = torch.arange(48) % 100
    return TokenRows(tokens, offsets_of([16, 16, 16]), torch.tensor([4, 4, 4]))


def likelihood(scores, micro):
    return LossTerms(-scores.logprobs_R.mean(), {})


def switch_and_measure(world: World, directory: str) -> dict[str, object]:
    mesh = build_update_mesh(UpdateLayout(1, world.size), world.device, world.rank)
    trainer = TrainingEngine(FIFTY_MILLION, TrainingConfig(), OptimConfig(lr=1e-3), mesh, world.device)
    trainer.load(RandomWeights(FIFTY_MILLION, 0))
    generator = NativeEngine(FIFTY_MILLION, RolloutConfig(), torch.device("cpu"), torch.float32)
    ledger = MemoryLedger()
    flow = ReshardingFlow(world, {POLICY: trainer}, generator, ReshardConfig(verify=True), ledger, Path(directory))
    trainer.update(rows(), likelihood)
    flow.account()
    before = {name: shard.tensor.clone() for name, shard in trainer.named_shards().items()}
    means = [tensor.clone() for tensor in trainer.optimizer_tensors()]
    held_for_comparison = sum(t.nbytes for t in before.values()) + sum(t.nbytes for t in means)
    release_to_system()
    in_update, resident_in_update = ledger.snapshot("update").device, resident_bytes()
    flow.to_generation()
    in_generation, resident_in_generation = ledger.snapshot("generation").device, resident_bytes()
    flow.start_return()
    flow.to_update()
    after = trainer.named_shards()
    same = all(torch.equal(before[name], after[name].tensor) for name in before)
    same = same and all(torch.equal(a, b) for a, b in zip(means, trainer.optimizer_tensors(), strict=True))
    result = trainer.update(rows(), likelihood)
    back = ledger.snapshot("update").device
    flow.close()
    return {
        "update": dict(in_update), "generation": dict(in_generation), "back": dict(back), "same": same,
        "freed": resident_in_update - resident_in_generation, "goes_on": not result.skipped,
        "state": held_for_comparison,
    }  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.cpu_only(reason="device memory isn't resident memory of the process")
def test_update_state_is_off_the_device_and_out_of_resident_memory_during_generation(tmp_path, num_ranks):
    for seen in run_ranks(num_ranks, switch_and_measure, str(tmp_path), timeout=120):
        assert seen["update"]["update_weights"] + seen["update"]["optimizer"] == pytest.approx(seen["state"], rel=0.01)
        assert seen["state"] > 550 * MIB / num_ranks
        # One rank's weights are those that generation wants, and lent.
        lent = seen["update"]["update_weights"] if num_ranks == 1 else 0
        assert [seen["generation"][owner] for owner in AWAY] == [lent, 0, 0]
        generation = seen["generation"]["generation_weights"] + seen["generation"]["kv_cache"]
        assert generation + lent > 190 * MIB
        # What left, less what generation took in its place.
        assert seen["freed"] == pytest.approx(seen["state"] - lent - generation, abs=0.05 * seen["state"])
        assert seen["same"], "weights and optimizer come back bit for bit"
        assert seen["goes_on"] and seen["back"] == seen["update"]


@dataclass(frozen=True)
class SmallLogs:
    """What switching needs of a run's logs."""

    timeline: Timeline
    recorder: Recorder = field(default_factory=Recorder)


def switch_with_a_reference(world: World, directory: str) -> bytes:
    """One step of switches; the metrics' payload."""
    mesh = init_device_mesh(world.device.kind, (world.size,))
    trainer, reference = SmallTrainer(make_model(), mesh), SmallTrainer(make_model(seed=1), mesh)
    trainer.train(torch.ones(2, 5))
    generator = SmallGenerator({name: shard.global_shape for name, shard in trainer.named_shards().items()})
    logs = SmallLogs(Timeline(Path(directory) / f"{world.rank}.jsonl", world.rank))
    ledger = MemoryLedger()
    host = Path(directory) / "host" / str(world.rank)
    flow = ReshardingFlow(world, {POLICY: trainer, REFERENCE: reference}, generator, ReshardConfig(), ledger, host)
    switching = Switching(flow, ledger, logs, world.device)
    switching.to_generation(1)
    switching.start_return(1)
    with logs.timeline.stage("reference", 1), switching.present(REFERENCE):
        pass
    switching.note_memory(1, "reference")
    switching.to_update(1)
    flow.close()
    logs.timeline.close()
    return encode(logs.recorder.drain())


@pytest.fixture(scope="module")
def switched(tmp_path_factory) -> tuple[dict[str, float], TimelineRecords]:
    """Metrics and timeline of 4 ranks on 2 nodes."""
    folder = tmp_path_factory.mktemp("switched")
    metrics = merge(run_ranks(4, switch_with_a_reference, str(folder), ranks_per_node=2))
    return metrics, read_timeline(folder)


@pytest.mark.ranks
def test_a_switch_tells_the_bytes_of_each_link(switched):
    metrics, records = switched
    # Every rank lacks three quarters of the 4-byte weights, two of which live on the other node.
    whole = 4 * sum(p.numel() for p in make_model().parameters())
    moved: dict[str, int] = {}
    for span in records.spans:
        for one in span.moved:
            assert one.seconds > 0 and one.gb_per_second > 0
            moved[f"{span.stage} {one.link}"] = moved.get(f"{span.stage} {one.link}", 0) + one.num_bytes
    assert moved["resharding node"] + moved["resharding cross_node"] == 3 * whole == metrics["reshard/bytes"]
    assert moved["resharding cross_node"] == metrics["reshard/cross_node_bytes"]
    assert moved["resharding cross_node"] == pytest.approx(2 * whole, rel=0.1)
    # Padding and the step counts of AdamW come on top of weights and two means of them.
    assert moved["resharding to_host"] == moved["return from_host"] >= 3 * whole
    assert moved["reference from_host"] >= whole
    swapped = ("resharding to_host", "return from_host", "reference from_host")
    assert metrics["reshard/swapped_bytes"] == sum(moved[name] for name in swapped)
    assert len(moved) == 5


@pytest.mark.ranks
def test_the_rates_of_a_switch_are_bytes_in_the_seconds_of_their_ranks(switched):
    metrics, records = switched
    names = {"to_host": "to_host_gb_per_second", "from_host": "from_host_gb_per_second"}
    for link, name in names.items():
        moved = [one for span in records.spans for one in span.moved if one.link == link]
        rate = sum(one.num_bytes for one in moved) / sum(one.seconds for one in moved) / 1e9
        assert metrics[f"reshard/{name}"] == pytest.approx(rate)
    received = [[one for one in span.moved if one.link in ("node", "cross_node")] for span in records.spans]
    seconds = [moved[0].seconds for moved in received if moved]
    assert len(seconds) == 4 and metrics["reshard/seconds"] == max(seconds)
    assert metrics["reshard/gb_per_second"] == pytest.approx(metrics["reshard/bytes"] / sum(seconds) / 1e9)


@pytest.mark.ranks
def test_each_boundary_tells_the_most_that_was_held_since_the_one_before(switched):
    _, records = switched
    # This rank has no weight alone, so it lends none to its generator.
    mine = {snapshot.held.stage: snapshot.held for snapshot in records.snapshots if snapshot.rank == 1}
    assert list(mine) == ["to_generation", "start_return", "reference", "to_update"]
    switch, returning, reference, update = mine.values()
    assert switch.device["update_weights"] == switch.device["bucket"] == switch.device["optimizer"] == 0
    assert switch.peaks["update_weights"] == update.device["update_weights"] > 0
    assert switch.peaks["bucket"] > 0 and switch.peaks["optimizer"] == update.device["optimizer"] > 0
    assert max(switch.peaks.values()) <= switch.peak <= sum(switch.peaks.values())
    assert returning.peaks["generation_weights"] == switch.device["generation_weights"] > 0
    assert returning.peaks["bucket"] == returning.device["generation_weights"] == 0
    assert reference.device["reference_weights"] == 0 < reference.peaks["reference_weights"]
    assert reference.peaks["generation_weights"] == update.peaks["reference_weights"] == 0
