"""Where the config leaves it open, decoding steps are compiled if the run is long enough for that to pay."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from tests.support.ranks import run_ranks
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from spmdrl.config.config import load_config
from spmdrl.engines.generation.native import forward
from spmdrl.engines.models.making.make_model import decoder_config
from spmdrl.job.model.compile_choice import LEAST_STEPS, decide_compile, expected_decoding_steps
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.model.replica import build_policys_replica
from spmdrl.job.start.start_checks import CheckedRun, check_run
from spmdrl.resources.device import find_device
from spmdrl.resources.startup.launch import LaunchEnvironment
from spmdrl.resources.world import World

pytestmark = pytest.mark.cpu_only("elsewhere nothing is compiled by itself")

# 1,000 steps in which 512 rows are decoded in two batches, of 100 tokens in the mean.
LONG = [
    "model.make={hidden_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, intermediate_size: 64}",
    "data.train=synthetic://addition?low=0&high=9&count=40", "reward.functions=[exact]", "train.max_steps=1000",
    "rollout={prompts_per_step: 64, num_generations: 8, max_completion_length: 200}",
]  # fmt: skip

FEW_ROWS = ["rollout.prompts_per_step=2", "train.max_steps=2000"]


def checked(*overrides: str, verb: str = "train") -> CheckedRun:
    return check_run(load_config([], [*LONG, *overrides]), verb, launch=LaunchEnvironment())


def lone_world() -> World:
    return World(LaunchEnvironment(), find_device("cpu", 0))


def decides(run: CheckedRun) -> bool:
    return decide_compile(run, decoder_config(run.config.model.make), lone_world())


def test_steps_are_those_of_a_rank_in_the_whole_run():
    config = checked().config
    assert expected_decoding_steps(config, 1) == 1000 * 2 * 100
    assert expected_decoding_steps(config, 2) == expected_decoding_steps(config, 4) == 1000 * 1 * 100


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["train.max_steps=499"], False),
        (["rollout.max_completion_length=99"], False),
        (["rollout.compile=false"], False),
        (["model.make.family=qwen3_moe"], False),
        (["model.make.hidden_size=128"], True),
        (["model.make.hidden_size=256"], False),
        (["model.make.hidden_size=256", *FEW_ROWS], True),
        (["model.make.hidden_size=512", *FEW_ROWS], False),
        (["model.make.family=qwen3_moe", "rollout.compile=true"], True),
        (["train.max_steps=1", "rollout.compile=true"], True),
        (["debug.batch_invariant=true"], False),
        (["data.eval=synthetic://addition?low=0&high=9&count=5&split=test"], True),
    ],
)
def test_runs_compile_that_are_long_enough_and_may_round(overrides, expected):
    assert LEAST_STEPS == 100_000
    assert decides(checked(*overrides)) is expected


def test_other_verbs_do_not_compile():
    assert not decides(checked("sft.max_steps=5", "data.eval=synthetic://addition?low=0&high=9&count=5", verb="sft"))


def test_a_machine_without_a_compiler_decides_against_it(monkeypatch):
    def fail() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fail)
    assert not decides(checked())


@pytest.mark.ranks
def test_the_policys_engine_is_built_as_decided(tmp_path):
    assert run_ranks(2, made_graphs, tmp_path) == [[0, 1]] * 2


def made_graphs(world: World, folder: Path) -> list[int]:
    """The number of compiled steps of the engine of a short run, and of a long one."""
    return [len(_compiled_steps(checked(f"train.max_steps={steps}"), world, folder)) for steps in (10, 1000)]


def _compiled_steps(run: CheckedRun, world: World, folder: Path) -> list[object]:
    console, source = mock.Mock(), ModelSource(folder, decoder_config(run.config.model.make))
    with mock.patch.object(forward, "CompiledStep") as made:
        build_policys_replica(run, source, world, console)
    assert console.note.called == made.called, "a run says that it compiles by itself"
    return made.call_args_list
