"""Whole jobs with ranks that only generate: the same bits whatever takes long where, and after any end."""

from __future__ import annotations

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.bench.rollout.ahead_delays import delay_at_random
from tests.job.test_stopping import STOPPED, ask_after_steps, die_after_steps
from tests.support.jobs import (
    finished,
    inline_config,
    metrics_of,
    run_job,
    untimed,
    weights_digest,
)

STEPS = 6
FEWER_STEPS = 4
APART = ["resources.ranks.generation=1", f"train.max_steps={STEPS}"]
# Bytes that ranks exchange depend on the number of ranks.
OF_RANKS = ("reshard/", "dock/", "perf/", "update/")


TURNS = """
from spmdrl.engines.environment.episode import End, Observation

class Turns:
    def open(self, row):
        return Row(row)

class Row:
    def __init__(self, row):
        self.row, self.num_turns = row, 0

    def step(self, turn):
        self.num_turns += 1
        return End() if self.num_turns == 3 else Observation(str((self.row.seed + len(turn.response)) % 10))

    def restore(self, turns):
        self.num_turns = len(turns)
"""


def run(folder: Path, *settings: str, ranks: int = 2, **more: Any) -> list[dict[str, float]]:
    config, turns = inline_config(folder.parent), folder.parent / "turns.py"
    turns.write_text(TURNS)
    settings = tuple(word.replace("TURNS", f"{turns}:Turns") for word in settings)
    job = finished(run_job("train", config, f"run.dir={folder}", *settings, ranks=ranks, **more))
    (folder.parent / "screen").write_text(job.stdout)
    return untimed(metrics_of(folder))


def without_bytes(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """Metrics without the places of rows: those of a checkpoint come from the rank that read them."""
    return [{name: value for name, value in step.items() if "bytes" not in name} for step in metrics]


def seconds_of(folder: Path) -> float:
    return sum(step["time/step"] for step in metrics_of(folder))


SPARSE = ["model.make.model_type=qwen3_moe", "model.make.num_experts=4", "model.make.num_experts_per_tok=2",
          "model.make.moe_intermediate_size=32"]  # fmt: skip
# Each is in the bits of a run, so that one run can have several.
OPTIONS = {
    "reference": ["algo.kl_coef=0.1"],
    "critic and evaluations": [
        "critic={}", "algo={name: ppo, kl_coef: 0.1}",
        "data.eval=synthetic://addition?low=0&high=9&count=10&split=test", "eval.interval=2",
    ],
    "adapters in an environment": [
        "lora={rank: 4}", "train.updates_per_step=2", "environment.function=calculator", "rollout.stop=['=']",
    ],
    "several steps": ["rollout.partial_max_rounds=3"],
    "merged adapters of replayed experts": [*SPARSE, "train.routing.replay=rollout", "lora={rank: 4, merge: true}"],
    "exact mode in sessions": [
        "debug.batch_invariant=true", "environment.function=TURNS", "rollout.stop=[=, +]",
        "model.make.max_position_embeddings=64", "rollout.max_completion_length=48",
    ],
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(more, id=name, marks=() if name == "reference" else pytest.mark.slow)
        for name, more in OPTIONS.items()
    ],
)
def test_two_sets_without_a_lag_have_the_bits_of_one_rank(tmp_path, settings):
    settings = [*settings, f"train.max_steps={FEWER_STEPS}"]
    one = run(tmp_path / "one", *settings, ranks=1)
    two = run(tmp_path / "two", APART[0], *settings)
    for alone, apart in zip(one, two, strict=True):
        same = {name for name in alone if not name.startswith(OF_RANKS)}
        assert {name: apart.get(name) for name in same} == {name: alone[name] for name in same}
    assert weights_digest(tmp_path / "two", FEWER_STEPS) == weights_digest(tmp_path / "one", FEWER_STEPS)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_step_ahead_every_option_trains_rows_of_the_schedules_age(tmp_path, settings):
    folder, lag = tmp_path / "run", ["rollout.lag=1", "checkpoint={interval: 2, keep_last: 9}"]
    is_of_several = settings == OPTIONS["several steps"]
    settings = [APART[0], f"train.max_steps={FEWER_STEPS}", *settings]
    whole, digest = run(folder, *settings, *lag), weights_digest(folder, FEWER_STEPS)
    num_updates = whole[1]["off_policy/max"]
    assert num_updates >= 1 and whole[0]["off_policy/max"] == 0
    # Rows of several steps have tokens of each.
    most = 2 * num_updates if is_of_several else num_updates
    for step in whole[2:]:
        assert num_updates <= step["off_policy/mean"] <= step["off_policy/max"] == most
    # As if it had been killed in step 3.
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    if is_of_several:
        less = run_job("train", folder.parent / "tiny.yaml", f"run.dir={folder}", *settings, ranks=2)
        assert "rollout.lag is 0, but an earlier part of the run has generated for 1 later steps" in less.stderr
    assert without_bytes(run(folder, *settings, *lag)) == without_bytes(whole)
    assert weights_digest(folder, FEWER_STEPS) == digest


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("lag", "ranks", "seeds"),
    [
        pytest.param(1, 2, range(1), id="1"),
        *(pytest.param(lag, ranks, range(1), id=f"{lag} {ranks}", marks=pytest.mark.slow)
          for lag, ranks in ((1, 3), (2, 2), (4, 4))),
    ],
)  # fmt: skip
def test_delays_at_every_kind_of_point_change_no_bit(tmp_path, lag, ranks, seeds):
    settings = [*APART, f"resources.ranks.generation={ranks // 2}", f"rollout.lag={lag}"]
    whole = run(tmp_path / "whole", *settings, ranks=ranks)
    for step, metrics in enumerate(whole, start=1):
        # The weights before step 1 are version 0, and each step makes the next.
        age = step - 1 - max(0, step - 1 - lag)
        assert (metrics["off_policy/mean"], metrics["off_policy/max"]) == (age, age)
        assert metrics["dock/trained"] + metrics["dock/dropped"] == 32
    assert "ranks that train waited" in (tmp_path / "screen").read_text()
    for seed in seeds:
        folder = tmp_path / f"delayed{seed}"
        assert run(folder, *settings, ranks=ranks, prepare=partial(delay_at_random, seed)) == whole
        assert seconds_of(folder) > seconds_of(tmp_path / "whole") + 1, "nothing was delayed"
        assert weights_digest(folder, STEPS) == weights_digest(tmp_path / "whole", STEPS)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "generating", "ranks_per_node"), [(3, 2, 1), pytest.param(4, 2, 2, marks=pytest.mark.slow)]
)
def test_sets_on_nodes_of_their_own_have_the_bits_of_one_node(tmp_path, ranks, generating, ranks_per_node):
    settings = [*APART, f"resources.ranks.generation={generating}", "rollout.lag=1", "checkpoint.interval=2"]
    here = run(tmp_path / "here", *settings, ranks=ranks)
    folder, apart = tmp_path / "nodes", {"ranks": ranks, "ranks_per_node": ranks_per_node}
    there = run(folder, *settings, **apart)
    assert without_bytes(there) == without_bytes(here)
    assert sum(step["dock/bytes_cross_node"] for step in there) > 0
    assert weights_digest(folder, STEPS) == weights_digest(tmp_path / "here", STEPS)
    # As if it had been killed in step 5.
    shutil.rmtree(folder / "checkpoints" / "step_000006")
    assert without_bytes(run(folder, *settings, **apart)) == without_bytes(here)
    assert weights_digest(folder, STEPS) == weights_digest(tmp_path / "here", STEPS)


@pytest.mark.ranks
@pytest.mark.parametrize("lag", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resumed_run_trains_the_rows_that_were_generated_ahead(tmp_path, lag):
    folder, settings = tmp_path / "run", [*APART, f"rollout.lag={lag}", "checkpoint={interval: 2, keep_last: 9}"]
    whole, digest = run(folder, *settings), weights_digest(tmp_path / "run", STEPS)
    ahead = folder / "checkpoints" / "step_000004" / "ahead"
    assert sorted(path.name for path in ahead.iterdir()) == [str(step) for step in range(5, min(5 + lag, STEPS + 1))]
    # As if it had been killed in step 5.
    shutil.rmtree(folder / "checkpoints" / "step_000006")
    assert without_bytes(run(folder, *settings)) == without_bytes(whole)
    assert weights_digest(folder, STEPS) == digest
    # With all ranks together the run goes on from the same step, with fresh responses.
    shutil.rmtree(folder / "checkpoints" / "step_000006")
    again = run(folder, f"train.max_steps={STEPS}")
    assert [step["off_policy/max"] for step in again[4:]] == [0, 0]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_killed_at_any_moment_goes_on_to_the_bit(tmp_path):
    settings = [*APART, "rollout.lag=1", "checkpoint.interval=1", "train.max_steps=12"]
    whole = run(tmp_path / "whole", *settings)
    config, folder = inline_config(tmp_path), tmp_path / "killed"
    for step in (1, 4):
        kill = partial(die_after_steps, folder / "metrics.jsonl", step)
        killed = run_job("train", config, f"run.dir={folder}", *settings, ranks=2, prepare=kill)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        # Lines, of which the last may be a part.
        assert step <= len((folder / "metrics.jsonl").read_text().splitlines()) < 12
    assert without_bytes(run(folder, *settings)) == without_bytes(whole)
    assert weights_digest(folder, 12) == weights_digest(tmp_path / "whole", 12)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_requested_stop_ends_the_run_at_a_meeting(tmp_path):
    settings = [*APART, "rollout.lag=1", "train.max_steps=16"]
    whole, folder = run(tmp_path / "whole", *settings), tmp_path / "stopped"
    ask, config = partial(ask_after_steps, folder / "metrics.jsonl", 3), inline_config(tmp_path)
    stopped = run_job("train", config, f"run.dir={folder}", *settings, ranks=2, prepare=ask)
    assert stopped.returncode == STOPPED, stopped.stderr
    num_done = len(metrics_of(folder))
    assert 3 <= num_done < 16
    assert (folder / "checkpoints" / f"step_{num_done:06d}" / "ahead" / f"{num_done + 1}").is_dir()
    assert without_bytes(run(folder, *settings)) == without_bytes(whole)
    assert weights_digest(folder, 16) == weights_digest(tmp_path / "whole", 16)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_is_replayed_in_one_process_unless_it_was_generated_ahead(tmp_path, lag):
    folder = tmp_path / "run"
    run(folder, *APART, "train.max_steps=3", f"rollout.lag={lag}", "checkpoint={interval: 1, keep_last: 9}")
    again = run_job("replay", folder, "--step=3", "--row=0", "--row=31")
    assert (again.returncode == 0) == (lag == 0), again.stdout + again.stderr
    assert ("rollout.lag is 1" in again.stderr) == (lag == 1)


@pytest.mark.parametrize(
    ("settings", "ranks", "reason"),
    [
        (["rollout.lag=1"], 1, "rollout.lag is 1, but every rank trains and generates in turn"),
        (["resources.ranks.generation=1"], 1, "resources.ranks.generation is 1, but the job has 1 rank, and one at"),
        (["resources.ranks.generation=1", "checkpoint.keep_rollouts=true"], 2, "but checkpoint.keep_rollouts is true"),
        (["resources.ranks.generation=1", "rollout.engine=vllm"], 2, "but rollout.engine vllm means vLLM here, which"),
        (["resources.ranks.generation=1", "rollout.swap_in_flight=2"], 2, "swap_in_flight is 2, but rollout.lag is 0"),
        (
            [
                "resources.ranks.generation=1",
                "rollout.lag=1",
                "rollout.swap_in_flight=2",
                "rollout.partial_max_rounds=2",
            ],
            2,
            "swap_in_flight is 2, but rollout.partial_max_rounds is 2",
        ),
        (["resources.ranks.generation=1", "--nodes=2"], 4, "but each of the job's 2 nodes has 2 ranks, which all"),
        (["resources.ranks.generation=2", "resources.generation.tensor=2"], 3, ""),
        (["resources.ranks.generation=1", "resources.generation.tensor=2"], 3, "tensor 2 does not divide"),
    ],
)
def test_what_sets_cannot_serve_is_refused_by_name(tmp_path, settings, ranks, reason):
    ended = run_job("check", inline_config(tmp_path), f"run.dir={tmp_path}/run", f"--ranks={ranks}", *settings)
    assert (ended.returncode == 0) == (not reason), ended.stderr
    assert reason in ended.stderr


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], "rollout_is: tis  # default with rollout.lag"),
        (["algo.rollout_is=none"], "rollout_is: none  # command line"),
        (["algo.name=dppo"], "rollout_is: none  # default"),
    ],
)
def test_a_lag_is_corrected_unless_the_loss_takes_none(tmp_path, settings, line):
    settings = [*settings, "resources.ranks.generation=1", "rollout.lag=1", "--ranks=2", "--all"]
    page = finished(run_job("check", inline_config(tmp_path), f"run.dir={tmp_path}/run", *settings)).stdout
    assert line in (row.strip() for row in page.splitlines())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, [], id="plain"),
        *(pytest.param(3, OPTIONS[name], id=name, marks=pytest.mark.slow)
          for name in ("adapters in an environment", "merged adapters of replayed experts")),
    ],
)  # fmt: skip
def test_weights_that_change_in_flight_give_each_row_two_versions(tmp_path, ranks, settings):
    folder, settings = tmp_path / "run", [
        *settings, *APART, f"resources.ranks.generation={ranks - 1}", "rollout.lag=1", "rollout.swap_in_flight=5",
        "checkpoint={interval: 3, keep_last: 9}",
    ]  # fmt: skip
    whole, digest = run(folder, *settings, ranks=ranks), weights_digest(tmp_path / "run", STEPS)
    num_updates = whole[1]["off_policy/max"]
    assert num_updates >= 1 and whole[0]["off_policy/max"] == 0
    for metrics in whole[1:]:
        ages = {name: count for name, count in metrics.items() if name.startswith("off_policy/lag_")}
        assert ages.keys() == {"off_policy/lag_0", f"off_policy/lag_{num_updates:.0f}"}
        assert min(ages.values()) > 0 and metrics["dock/trained"] + metrics["dock/dropped"] == 32
    # As if it had been killed in step 4, with a batch of which the first part is generated.
    shutil.rmtree(folder / "checkpoints" / "step_000006")
    seed = partial(delay_at_random, 7)
    assert without_bytes(run(folder, *settings, ranks=ranks, prepare=seed)) == without_bytes(whole)
    assert weights_digest(folder, STEPS) == digest


LOSES_LONG_ROWS = """
from spmdrl.algorithms.policy.grpo import Grpo


class LosesLongRows(Grpo):
    def select(self, inputs):
        return {**super().select(inputs), "long": inputs.lengths_B > 6}
"""


def trained_lengths(folder: Path) -> list[int]:
    """Tokens of the responses that were trained, ascending."""
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return sorted(len(record["tokens"]) for record in records if record["advantage"] is not None)


@pytest.mark.ranks
@pytest.mark.slow
def test_trained_rows_have_the_lengths_of_all_generated_ones(tmp_path):
    # With weights that stay as they are, every run generates the same rows, whichever step trains them.
    settings = ["optim.lr=0", f"train.max_steps={STEPS}", "log.samples_per_step=48", "algo.rollout_is=none"]
    run(tmp_path / "together", *settings, ranks=1)
    generated = trained_lengths(tmp_path / "together")
    assert len(generated) == 32 * STEPS and len(set(generated)) > 3
    ahead = [*settings, *APART, "rollout.lag=2"]
    for name, more in {
        "ahead": [], "in flight": ["rollout.swap_in_flight=4"], "several steps": ["rollout.partial_max_rounds=3"]
    }.items():  # fmt: skip
        run(tmp_path / name, *ahead, *more, ranks=2)
        assert trained_lengths(tmp_path / name) == generated, name
    # The comparison sees a loss of long rows.
    (tmp_path / "loses.py").write_text(LOSES_LONG_ROWS)
    run(tmp_path / "biased", *ahead, f"algo.name={tmp_path}/loses.py:LosesLongRows", ranks=2)
    assert max(trained_lengths(tmp_path / "biased")) <= 6 < max(generated)
