"""Fills a generation engine from update shards, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from spmdrl.dataflow.resharding.agreement import agree_on_plan, agree_on_shapes
from spmdrl.dataflow.resharding.checksum import ChecksumRecord
from spmdrl.dataflow.resharding.gather import BucketGatherer, ReshardConfig
from spmdrl.dataflow.resharding.plan import Shapes, whole_slices
from spmdrl.dataflow.resharding.protocols import Generator, Shard
from spmdrl.dataflow.resharding.slices import SlicedWeights
from spmdrl.resources.world import World

Sent = Callable[[Iterable[str]], None]
"""told the weights whose shards were sent for the last time"""


class GeneratorFilling:
    """The plan and its executor between one trainer and one generator. Making it is collective over the world."""

    def __init__(
        self,
        world: World,
        shards: Mapping[str, Shard],
        generator: Generator,
        storage: Mapping[str, Tensor],
        config: ReshardConfig,
    ):
        """`storage` is what the generator's `wake_weights` returned, empty if it wants an iterator."""
        self._world = world
        # A pipeline rank holds some of the layers only.
        shapes = agree_on_shapes({name: tuple(shard.global_shape) for name, shard in shards.items()})
        trained = next(iter(shards.values())).tensor
        _check_shapes(generator.weight_shapes(), shapes)
        # In the trainer's order, so that shards can leave while later weights still move.
        wanted_names = [name for name in shapes if name in generator.weight_shapes()]
        self._targets = {box.name: box for box in whole_slices({name: shapes[name] for name in wanted_names})}
        self._generator = generator
        self._agreed = agree_on_plan(
            [shard.slice for shard in shards.values()],
            # A generator that takes whole weights casts them itself.
            {box: storage.get(name, trained).dtype for name, box in self._targets.items()},
            shapes,
            config.bucket_bytes,
            ranks_per_node=world.launch.local_world_size,
        )
        self._gatherer = BucketGatherer(
            self._agreed.plan,
            world.rank,
            executor=config.executor,
            dtype=self._agreed.wire_dtype,
            device=world.device.torch_device,
        )
        self._buckets = self._gatherer.block.buckets
        self._pieces = [piece for bucket in self._buckets for piece in bucket.pieces]
        self._verify = config.verify
        self._record: ChecksumRecord | None = None
        self._wanted: SlicedWeights | None = None

    @property
    def buffer_bytes(self) -> int:
        return self._gatherer.buffer_bytes

    def run(self, shards: Mapping[str, Shard], storage: Mapping[str, Tensor], *, sent: Sent) -> int:
        """Fills the generator and returns the bytes received; the buffer is released. Collective over the world."""
        held = SlicedWeights({shard.slice: shard.tensor for shard in shards.values()})
        if self._verify:
            self._record = ChecksumRecord(self._pieces, self._agreed.shapes, self._agreed.dtypes)
        try:
            if self._generator.wants_iterator:
                received = self._stream(held, sent)
            else:
                received = self._fill_in_place(held, storage, sent)
        finally:
            self._gatherer.release()
        if self._verify:
            self.compare()
        return received

    def compare(self) -> None:
        """Raises RuntimeError unless the generator's weights still are what was sent. Collective over the world."""
        if self._record is None:
            raise RuntimeError("no checksums were kept; set reshard.verify to true")
        if self._wanted is not None:
            self._record.add_received(self._pieces, self._wanted, self._world.rank)
        self._record.compare(self._gatherer.group)

    def forget_storage(self) -> None:
        """Drops the references to the generator's storage, which it is about to free."""
        self._wanted = None

    def _fill_in_place(self, held: SlicedWeights, storage: Mapping[str, Tensor], sent: Sent) -> int:
        self._wanted = SlicedWeights({box: storage[name] for name, box in self._targets.items()})
        return sum(self._gather(index, held, self._wanted, sent) for index in range(len(self._buckets)))

    def _stream(self, held: SlicedWeights, sent: Sent) -> int:
        received: list[int] = []
        self._generator.load_weights(self._whole_weights(held, sent, received))
        if len(received) < len(self._buckets):
            raise RuntimeError(
                f"the generation engine stopped after {len(received)} of {len(self._buckets)} buckets of weights; "
                "load_weights must use up its iterator"
            )
        return sum(received)

    def _whole_weights(self, held: SlicedWeights, sent: Sent, received: list[int]) -> Iterator[tuple[str, Tensor]]:
        """Whole weights as their last bucket arrives; a weight is dropped here once the engine asks for the next."""
        arriving: dict[str, Tensor] = {}
        for index, bucket in enumerate(self._buckets):
            for name in {piece.box.name: None for piece in bucket.pieces}:
                if name not in arriving:
                    arriving[name] = self._new_whole(name)
            wanted = SlicedWeights({self._targets[name]: tensor for name, tensor in arriving.items()})
            received.append(self._gather(index, held, wanted, sent))
            if self._record is not None:
                self._record.add_received(bucket.pieces, wanted, self._world.rank)
            for name in bucket.finished:
                yield name, arriving.pop(name)

    def _gather(self, index: int, held: SlicedWeights, wanted: SlicedWeights, sent: Sent) -> int:
        num_bytes = self._gatherer.gather_bucket(index, held, wanted)
        if self._record is not None:
            self._record.add_sent(self._buckets[index].pieces, held, self._world.rank)
        sent(self._buckets[index].finished)
        return num_bytes

    def _new_whole(self, name: str) -> Tensor:
        device = self._world.device.torch_device
        return torch.empty(self._targets[name].shape, dtype=self._agreed.dtypes[name], device=device)


def _check_shapes(wanted: Shapes, held: Shapes) -> None:
    """Raises ValueError unless the trainer holds every weight that the generator wants, in the same shape."""
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
