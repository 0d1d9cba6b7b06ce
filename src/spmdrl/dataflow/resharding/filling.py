"""Filling of a generation engine from update shards, bucket by bucket, and its checksums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spmdrl.dataflow.resharding.gather import BucketGatherer, Received
from spmdrl.dataflow.resharding.planning.buckets import Piece
from spmdrl.dataflow.resharding.planning.cells import SlicedWeights, cut
from spmdrl.dataflow.resharding.planning.plan import Shapes, lendable
from spmdrl.dataflow.resharding.planning.slice_agreement import agree_on_plan, agree_on_shapes, refuse_together
from spmdrl.engines.generation.protocol import GenerationEngine
from spmdrl.engines.training.sharded_model import Shard
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.resources.collectives import Group, sum_over
from spmdrl.resources.world import World

_NUM_SPOTS = 16
# Sums of integers need temporary memory, which must stay small beside a bucket.
_MAX_ELEMENTS_AT_ONCE = 1 << 18
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def all_elements(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one sum per 2**18 elements."""
    whole = whole_slice("", values.shape)
    parts = cut(whole, -(-values.numel() // _MAX_ELEMENTS_AT_ONCE))
    patterns = (_patterns(values[part.index_within(whole)], dtype) for part in parts)
    return torch.stack([_weighted(one, torch.arange(len(one), device=one.device)).sum() for one in patterns])


@functools.lru_cache(maxsize=1024)
def spots(shape: tuple[int, ...], version: int) -> tuple[slice, ...]:
    """Return indexes of at most 16 elements, on a grid whose position in this shape depends on the version."""
    per_dim = max(2, int(_NUM_SPOTS ** (1 / max(1, len(shape)))))
    # Multiples of the golden ratio spread evenly, so that every element is summed at some version.
    place = version * 0x9E3779B97F4A7C15 % (1 << 64)
    index = []
    for size in shape:
        stride = -(-size // per_dim)
        place, start = divmod(place, stride)
        index.append(slice(start, None, stride))
    return tuple(index)


class SwitchRecord:
    """Checksums of one switch: each generator holds exactly what the trainers sent, at the same version.

    A piece's bit patterns, cast to the generator's dtype, are summed by its contributor before the source may leave,
    and by every rank that received it. Sums are of wrapping integers weighted by position, so that skipped, moved,
    swapped, stale and flipped values show. A few spots of every piece are always summed, different ones at each
    version; all elements with `reshard.verify`.
    """

    def __init__(self, pieces: Sequence[Piece], dtypes: Mapping[str, torch.dtype], *, rank: int, verify: bool):
        """`pieces` are the whole block's, in order; `dtypes` are the generator's; `verify` sums all elements."""
        self.version: int | None = None
        """version of the last switch"""
        self._pieces = pieces
        self._dtypes = dtypes
        self._rank = rank
        self._verify = verify
        self._sent: dict[int, Tensor] = {}
        self._received: dict[int, Tensor] = {}

    def begin(self, version: int) -> None:
        """Start on another switch."""
        self.version = version
        self._sent, self._received = {}, {}

    def add_sent(self, pieces: Iterable[Piece], held: SlicedWeights) -> None:
        """Sum the pieces that this rank answers for."""
        self._sent |= self._digests([piece for piece in pieces if piece.contributor == self._rank], held)

    def add_received(self, pieces: Iterable[Piece], wanted: SlicedWeights) -> None:
        """Sum the pieces that this rank wanted."""
        self._received |= self._digests([piece for piece in pieces if self._rank in piece.wanters], wanted)

    def differences(self, group: Group) -> list[str]:
        """Describe pieces that differ from what was sent. Collective over the block, whose group is given."""
        sent = sum_over(self._sums(self._sent), group).tolist()
        received = self._sums(self._received).tolist()
        found = []
        for piece, (times_sent, sum_sent), (times_received, sum_received) in zip(
            self._pieces, sent, received, strict=True
        ):
            if self._rank not in piece.wanters:
                continue
            if (times_sent, times_received) != (1, 1):
                found.append(f"{piece.box}: sent {times_sent} times, received {times_received} times")
            elif sum_sent != sum_received:
                found.append(f"{piece.box}: checksum {sum_received:#x}, sent {sum_sent:#x}")
        return found

    def _digests(self, pieces: Sequence[Piece], weights: SlicedWeights) -> dict[int, Tensor]:
        """Return digests by the piece's number: int64 [any], on the weights' device, of values cast to the dtype."""
        if self._verify:
            return {one.number: all_elements(weights.view(one.box), self._dtypes[one.box.name]) for one in pieces}
        return self._spots_of(pieces, weights)

    def _spots_of(self, pieces: Sequence[Piece], weights: SlicedWeights) -> dict[int, Tensor]:
        """Return the bit patterns of all pieces' spots at once, which is cheaper than an operation per piece."""
        assert self.version is not None, "begin comes first"
        alike: dict[tuple[torch.dtype, torch.dtype], dict[int, Tensor]] = {}
        for piece in pieces:
            values, dtype = weights.view(piece.box), self._dtypes[piece.box.name]
            chosen = values[spots(values.shape, self.version)].reshape(-1)
            alike.setdefault((values.dtype, dtype), {})[piece.number] = chosen
        found: dict[int, Tensor] = {}
        for (_, dtype), chosen_of in alike.items():
            patterns = _patterns(torch.cat(list(chosen_of.values())), dtype)
            found |= zip(chosen_of, patterns.split([len(chosen) for chosen in chosen_of.values()]), strict=True)
        return found

    def _sums(self, digests: Mapping[int, Tensor]) -> Tensor:
        """Return int64 [pieces, 2] on the host: 1 if a piece has a digest, and the digest's sum."""
        sums = torch.zeros(len(self._pieces), 2, dtype=torch.int64)
        if digests:
            numbers, lengths = torch.tensor([(number, len(digest)) for number, digest in digests.items()]).unbind(1)
            sums[numbers, 0] = 1
            # The only wait for the device.
            together = torch.cat(list(digests.values())).cpu()
            place = torch.arange(len(together)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
            of_piece = numbers.repeat_interleave(lengths)
            sums[:, 1].index_add_(0, of_piece, _weighted(together, place))
        return sums


def _patterns(values: Tensor, dtype: torch.dtype) -> Tensor:
    elements = values.to(dtype).reshape(-1)
    return elements.view(_BITS[elements.element_size()]).to(torch.int64)


def _weighted(numbers: Tensor, place: Tensor) -> Tensor:
    """Return the numbers times an odd factor per place, which loses no bit on wrapping."""
    return numbers * (2 * place + 1)


Names = Callable[[Iterable[str]], None]


@dataclass(frozen=True)
class Watcher:
    """Callbacks with names of weights while a generator is filled."""

    woken: Names
    """weights whose memory in the generator is now allocated"""
    sent: Names
    """weights whose shards were sent for the last time"""


class GeneratorFilling:
    """Plan and executor between a trainer and a generator. Construction is collective over the world."""

    def __init__(
        self,
        world: World,
        shards: Mapping[str, Shard],
        generator: GenerationEngine,
        storage: Mapping[str, Tensor],
        config: ReshardConfig,
        *,
        kept: Container[str] = (),
    ):
        """`storage` is what the generator's `wake_weights` returns, empty if it wants an iterator.

        Weights that it has `kept` already are left out.
        """
        self._world = world
        # A pipeline rank holds only some of the layers.
        shapes = agree_on_shapes({name: tuple(shard.global_shape) for name, shard in shards.items()})
        # Ranks that only generate hold none, and their engines show storage.
        trained = next((shard.tensor.dtype for shard in shards.values()), torch.float32)
        _check_shapes(generator.weight_shapes(), shapes)
        # In the trainer's order, so that shards can leave while later weights still move.
        slices = {name: box for name, box in generator.weight_slices().items() if name not in kept}
        self._targets = {name: slices[name] for name in shapes if name in slices}
        self._kept = kept
        self._lendable = lendable([shard.slice for shard in shards.values()], list(self._targets.values()))
        self._generator = generator
        self._agreed = agree_on_plan(
            [shard.slice for shard in shards.values()],
            # A generator that takes whole weights casts them itself.
            {box: storage[name].dtype if name in storage else trained for name, box in self._targets.items()},
            shapes,
            config.bucket_bytes,
            ranks_per_node=world.launch.local_world_size,
            executor=config.executor,
        )
        self._gatherer = BucketGatherer(
            self._agreed.plan,
            world.rank,
            executor=config.executor,
            dtypes=self._agreed.dtypes,
            device=world.device.torch_device,
        )
        self._buckets = self._gatherer.block.buckets
        self._pieces = [piece for bucket in self._buckets for piece in bucket.pieces]
        self._shown = {name: (box.shape, self._agreed.dtypes[name]) for name, box in self._targets.items()}
        """Expected shapes and dtypes of the generator's storage."""
        self._record = SwitchRecord(self._pieces, self._agreed.dtypes, rank=world.rank, verify=config.verify)
        self._wanted: SlicedWeights | None = None

    @property
    def buffer_bytes(self) -> int:
        return self._gatherer.buffer_bytes

    @property
    def targets(self) -> Mapping[str, WeightSlice]:
        """Slices to fill the generator with."""
        return self._targets

    @cached_property
    def planned_bytes(self) -> int:
        """Bytes that a switch moves between all ranks of the job."""
        plan = self._agreed.plan
        buckets = (bucket for block in plan.blocks for bucket in block.buckets)
        return sum(plan.num_bytes(transfer.box) for bucket in buckets for transfer in plan.transfers(bucket))

    def lent(self, shards: Mapping[str, Shard], storage: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return shards that equal the generator's slices, in its dtype: it may read them in place.

        They stay unchanged: the trainer refuses to compute until the generator sleeps.
        """
        return {
            name: shards[name].tensor
            for name in self._lendable
            if name in storage and shards[name].tensor.dtype == storage[name].dtype and _is_alone(shards[name].tensor)
        }

    def run(
        self, shards: Mapping[str, Shard], storage: Mapping[str, Tensor], *, version: int, watcher: Watcher
    ) -> Received:
        """Fill the generator with weights of this version. Collective over the world.

        Releases the buffer. Raises RuntimeError on every rank if a generator doesn't take all its weights; `check`
        compares what arrived.
        """
        refuse_together("a generator shows other storage than it wants filled", self._storage_faults(storage))
        held = SlicedWeights({shard.slice: shard.tensor for shard in shards.values()})
        self._record.begin(version)
        try:
            if self._generator.wants_iterator:
                return self._stream(held, watcher)
            return self._fill_in_place(held, storage, watcher)
        finally:
            self._gatherer.release()

    def check(self, version: int) -> None:
        """Raise RuntimeError on every rank unless all generators hold what was sent, at this version.

        Collective over the world.
        """
        if self._wanted is not None:
            self._record.add_received(self._pieces, self._wanted)
        versions = {"the last switch was": self._record.version, "the generator is": self._generator.version}
        stale = [f"{what} at version {has}, the trainer {version}" for what, has in versions.items() if has != version]
        differences = self._record.differences(self._gatherer.group)
        refuse_together("generation weights differ from the trainer's", [*stale, *differences])

    def forget_storage(self) -> None:
        """Drop the references to the generator's storage, which it is about to free."""
        self._wanted = None

    def _fill_in_place(self, held: SlicedWeights, storage: Mapping[str, Tensor], watcher: Watcher) -> Received:
        self._wanted = SlicedWeights({box: storage[name] for name, box in self._targets.items()})
        received = Received()
        for index, bucket in enumerate(self._buckets):
            names = {piece.box.name for piece in bucket.pieces if self._world.rank in piece.wanters}
            self._generator.wake_weights(names)
            watcher.woken(names)
            received += self._gather(index, held, self._wanted, watcher)
        # Slices without elements are in no bucket.
        self._generator.wake_weights()
        return received

    def _stream(self, held: SlicedWeights, watcher: Watcher) -> Received:
        received: list[Received] = []
        weights = self._whole_weights(held, watcher, received)
        self._generator.load_weights(weights)
        # Other ranks wait for buckets that an engine didn't take.
        left = [name for name, _ in weights]
        faults = [f"{name} wasn't taken; load_weights must use up its iterator" for name in left]
        refuse_together("a generation engine stopped before it had all weights", faults)
        return sum(received, Received())

    def _whole_weights(
        self, held: SlicedWeights, watcher: Watcher, received: list[Received]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights as their last bucket arrives; each is dropped once the engine takes the next."""
        arriving: dict[str, Tensor] = {}
        for index, bucket in enumerate(self._buckets):
            for name in {piece.box.name: None for piece in bucket.pieces}:
                if name not in arriving:
                    shape, dtype = self._targets[name].shape, self._agreed.dtypes[name]
                    arriving[name] = torch.empty(shape, dtype=dtype, device=self._world.device.torch_device)
            wanted = SlicedWeights({self._targets[name]: tensor for name, tensor in arriving.items()})
            received.append(self._gather(index, held, wanted, watcher))
            self._record.add_received(bucket.pieces, wanted)
            for name in bucket.finished:
                yield name, arriving.pop(name)

    def _gather(self, index: int, held: SlicedWeights, wanted: SlicedWeights, watcher: Watcher) -> Received:
        received = self._gatherer.gather_bucket(index, held, wanted)
        self._record.add_sent(self._buckets[index].pieces, held)
        watcher.sent(self._buckets[index].finished)
        return received

    def _storage_faults(self, storage: Mapping[str, Tensor]) -> list[str]:
        """Describe weights whose storage differs from the plan, or would never be filled."""
        if self._generator.wants_iterator:
            return []
        changing = {name: tensor for name, tensor in storage.items() if name not in self._kept}
        shown = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in changing.items()}
        if shown == self._shown:
            return []
        wanted = self._shown
        differing = [name for name in {**wanted, **shown} if shown.get(name) != wanted.get(name)]
        return [f"{name}: shown {shown.get(name)}, wanted {wanted.get(name)}" for name in differing]


def _check_shapes(wanted: Shapes, held: Shapes) -> None:
    """Raise ValueError unless the trainer holds every weight that the generator wants, in the same shape."""
    differing = [
        f"{name}: wanted {tuple(shape)}, held {held.get(name)}"
        for name, shape in wanted.items()
        if held.get(name) != tuple(shape)
    ]
    if differing:
        raise ValueError(
            f"the generation engine wants {len(differing)} weights that the training engine doesn't hold so: "
            f"{'; '.join(differing[:3])}; both engines must be built from one model.path"
        )


def _is_alone(tensor: Tensor) -> bool:
    """Return True if a tensor is all of its storage, in order."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
