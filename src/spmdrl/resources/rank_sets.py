"""Sets of ranks that hold a part of the worker states each: those that train, and those that generate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from spmdrl.resources.collectives import Group, among, new_group
from spmdrl.resources.layout import RankSetsConfig
from spmdrl.resources.world import World
from spmdrl.runtime.supervision.stop_request import putting_off_stops


@dataclass(frozen=True)
class RankSet:
    """Ranks with the same worker states, as this rank sees them."""

    ranks: range
    rank: int
    """this rank, a member or not"""
    group: Group = None
    """their process group, on the members; None: all ranks of the job"""

    @property
    def is_member(self) -> bool:
        return self.rank in self.ranks

    @property
    def is_first(self) -> bool:
        """True on the member that acts for all."""
        return self.rank == self.ranks[0]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the members' collectives be their own inside the block; other ranks don't enter it.

        A request to stop waits for its end.
        """
        assert self.is_member, f"rank {self.rank} isn't among {self.ranks}"
        with among(self.group), nullcontext() if self.group is None else putting_off_stops():
            yield


@dataclass(frozen=True)
class RankSets:
    """The two sets of a job: the same one, of all ranks, or two that share none."""

    update: RankSet
    generation: RankSet

    @property
    def are_apart(self) -> bool:
        return self.update.ranks != self.generation.ranks


def all_ranks(world: World) -> RankSets:
    """Return the sets of a job whose ranks all train and generate."""
    everyone = RankSet(range(world.size), world.rank)
    return RankSets(everyone, everyone)


def form_sets(config: RankSetsConfig, world: World) -> RankSets:
    """Return the job's sets, which must have been checked. Collective over all ranks."""
    if config.generation == 0:
        return all_ranks(world)
    update, generation = (RankSet(ranks, world.rank, new_group(ranks)) for ranks in config.split(world.size))
    return RankSets(update, generation)
