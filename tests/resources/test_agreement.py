"""Ranks that run different jobs are refused before any collective, with the first difference named on each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from spmdrl.resources.startup.rank_agreement import Alike, agree, difference, meet
from spmdrl.runtime.launch import LaunchEnvironment, StartRefused
from spmdrl.runtime.supervision.stop_request import Stopped


def test_ranks_with_equal_facts_have_no_difference():
    assert difference([Alike([0, 1], {"seed": "0"})]) is None


def test_the_first_differing_fact_is_named_with_its_values_and_ranks():
    groups = [
        Alike([0, 1, 2, 5], {"seed": "0", "optim.lr": "1e-06", "run.name": "a"}),
        Alike([3], {"seed": "0", "optim.lr": "0.1", "run.name": "b"}),
        Alike([4], {"seed": "0", "optim.lr": "0.1"}),
    ]
    assert difference(groups) == (
        "ranks disagree about optim.lr: 1e-06 on ranks 0-2, 5, 0.1 on ranks 3-4 (1 more differ: run.name); "
        "start all ranks with the same command, files and installation"
    )


def launches(size: int) -> list[LaunchEnvironment]:
    one = LaunchEnvironment(world_size=size, local_world_size=size)
    return [replace(one, rank=rank, local_rank=rank) for rank in range(size)]


def outcomes(work, size: int = 3) -> list[object]:
    """What `work(launch)` returns on each of some threads that stand for ranks, or the text of its refusal."""

    def one(launch: LaunchEnvironment) -> object:
        try:
            return work(launch)
        except StartRefused as refusal:
            return str(refusal)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, launches(size)))


def test_every_rank_is_refused_with_the_difference():
    store = dist.HashStore()
    told = outcomes(lambda launch: meet(store, launch, {"seed": str(launch.rank // 2)}, timeout_seconds=20))
    assert len(set(told)) == 1 and "seed: 0 on ranks 0-1, 1 on rank 2;" in told[0]


def test_rank_0_shows_why_ranks_are_refused_before_another_one_can_end(capsys):
    store, shown = dist.HashStore(), []

    def work(launch: LaunchEnvironment) -> None:
        try:
            return meet(store, launch, {"seed": str(launch.rank)}, timeout_seconds=20)
        finally:
            if launch.rank == 1:
                shown.append(capsys.readouterr().err)

    told = outcomes(work, size=2)
    assert shown == [f"spmdrl: {told[0]}\n"] and told[0] == told[1]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("rank", "source", "is_shown"), [(1, "torchrun", True), (2, "torchrun", False),
                                                          (3, "torchrun", True), (2, "srun", True)])  # fmt: skip
def test_a_refusal_is_on_each_nodes_screen_once(rank, source, is_shown):
    store = dist.HashStore()
    nodes = LaunchEnvironment(world_size=4, local_world_size=2, source=source)

    def work(launch: LaunchEnvironment) -> bool:
        one = replace(nodes, rank=launch.rank, local_rank=launch.rank % 2)
        with pytest.raises(StartRefused) as refused:
            meet(store, one, {"seed": str(launch.rank)}, timeout_seconds=20)
        return refused.value.is_shown

    assert outcomes(work, size=4)[rank] == is_shown


def test_a_rank_that_cannot_start_ends_the_others_with_its_cause():
    store = dist.HashStore()

    def work(launch: LaunchEnvironment) -> None:
        refusal = "rows.jsonl isn't there" if launch.rank == 2 else None
        return meet(store, launch, {}, timeout_seconds=20, refusal=refusal)

    assert set(outcomes(work)) == {"rank 2 can't start: rows.jsonl isn't there"}


class AskedToStop(Mapping[str, str]):
    """Facts during whose publication this rank is asked to stop."""

    def __getitem__(self, name: str) -> str:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        raise Stopped("SIGTERM", "", is_agreed=False)

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("asked", [0, 2])
def test_a_rank_that_is_asked_to_stop_while_ranks_meet_stops_all_of_them(asked):
    store = dist.HashStore()

    def work(launch: LaunchEnvironment) -> object:
        try:
            return meet(store, launch, AskedToStop() if launch.rank == asked else {}, timeout_seconds=20)
        except Stopped as stopped:
            return f"stopped by {stopped.reason}"

    assert outcomes(work) == ["stopped by SIGTERM"] * 3


@pytest.mark.parametrize("absent", [0, 2])
def test_missing_ranks_are_named_after_the_time_to_start(absent):
    store = dist.HashStore()

    def work(launch: LaunchEnvironment) -> None:
        return None if launch.rank == absent else meet(store, launch, {}, timeout_seconds=0.5)

    told = outcomes(work)
    told.pop(absent)
    assert len(set(told)) == 1 and told[0].startswith(f"rank {absent} has not started after ")


def test_facts_that_are_known_later_are_compared_too():
    store = dist.HashStore()
    same = lambda launch: agree(store, launch, "model", {"model": "ab"}, timeout_seconds=20)  # noqa: E731
    assert outcomes(same) == [None] * 3
    other = lambda launch: agree(store, launch, "rows", {"rows": str(launch.rank)}, timeout_seconds=20)  # noqa: E731
    assert {told.partition(";")[0] for told in outcomes(other)} == {
        "ranks disagree about rows: 0 on rank 0, 1 on rank 1, 2 on rank 2"
    }
