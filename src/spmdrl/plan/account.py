"""Account of a planned device: bytes that live there by owner, work by operator, and messages by process group."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import stage as pipeline_stage
from torch.utils._pytree import tree_leaves

# CUDA's and NPU's allocators hand out multiples of this.
_BLOCK_BYTES = 512
ACTIVATIONS, GRADIENTS, GATHERED, RECEIVED, ROWS = "activations", "gradients", "gathered", "received", "rows"
TRANSIENT = frozenset({ACTIVATIONS, GRADIENTS, GATHERED, RECEIVED, ROWS})
"""Owners that hold bytes within a worker state only."""
# FSDP2's copies of whole weights before a layer runs, and of whole gradients after it.
_GATHERING = "fsdp::"
ATTENDED = "planned::paged_attention"
"""Operator that stands for attention to the KV cache; what it reads isn't in its shapes."""
WORKED = "planned::worked"
"""Operator that stands for others, whose work its arguments are."""


@dataclass
class Work:
    """Work of operators on the device."""

    flops: int = 0
    """multiplications and additions of matrix products and attention"""
    num_bytes: int = 0
    """bytes that operators read and write, each once"""
    launches: int = 0
    """operators that compute"""
    product_bytes: int = 0
    """bytes among `num_bytes` of operators with `flops`"""

    def __add__(self, other: Work) -> Work:
        return Work(*(one + another for one, another in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __sub__(self, other: Work) -> Work:
        return self + -1 * other

    def __rmul__(self, factor: float) -> Work:
        return Work(*(round(factor * one) for one in vars(self).values()))


@dataclass(frozen=True)
class Message:
    """A collective or transfer of this rank."""

    operation: str
    ranks: tuple[int, ...]
    """ranks of its process group"""
    num_bytes: int
    """bytes that this rank sends, by the usual ring algorithms"""


@dataclass
class Span:
    """Something that ran on the device."""

    owners: Counter[str] = field(default_factory=Counter)
    """bytes by owner at the moment when most were held"""
    work: Work = field(default_factory=Work)
    messages: Counter[Message] = field(default_factory=Counter)
    """number of times that each was sent"""


class Account:
    """Account of one rank's device."""

    def __init__(self) -> None:
        self.work = Work()
        self.messages: list[Message] = []
        self.positions = 1
        """cached positions of a row that decodes"""
        self._owner = ""
        self._events: list[tuple[int, int]] = []
        """(storage, change of its bytes), in order"""
        self._owner_of: dict[int, str] = {}
        self._numbers: dict[int, int] = {}
        """number of each living storage, by its address"""
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def held(self) -> Counter[str]:
        """Bytes that live now, by owner."""
        held: Counter[str] = Counter()
        for number, size in self._sizes.items():
            held[self._owner_of[number]] += size
        return +held

    @contextlib.contextmanager
    def own(self, owner: str) -> Iterator[None]:
        """Attribute allocations of the block to an owner."""
        before, self._owner = self._owner, owner
        try:
            yield
        finally:
            self._owner = before

    @contextlib.contextmanager
    def own_received(self) -> Iterator[None]:
        """Attribute the buffers that a pipeline makes, before its first micro-batch, for what it will receive."""
        make = pipeline_stage._make_tensor_from_meta

        def make_owned(*arguments: Any) -> Tensor:
            with self.own(RECEIVED):
                return make(*arguments)

        pipeline_stage._make_tensor_from_meta = make_owned  # type: ignore[assignment]
        try:
            yield
        finally:
            pipeline_stage._make_tensor_from_meta = make

    def attribute(self, tensors: Iterable[Tensor], owner: str, of: Container[str] | None = None) -> None:
        """Attribute living tensors, of these owners if given, from their allocation on."""
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None and (of is None or self._owner_of[number] in of):
                self._owner_of[number] = owner

    @contextlib.contextmanager
    def span(self, keep: Callable[[str], bool]) -> Iterator[Span]:
        """Yield what runs in the block, filled in at its end; the owners to `keep` aren't among its bytes."""
        span, first, before, sent = Span(), len(self._events), Work(**vars(self.work)), len(self.messages)
        held = dict(self._sizes)
        yield span
        span.work, span.messages = self.work - before, Counter(self.messages[sent:])
        sizes: Counter[str] = Counter()
        for number, size in held.items():
            sizes[self._owner_of[number]] += size
        total = largest = sum(size for owner, size in sizes.items() if not keep(owner))
        span.owners = sizes.copy()
        for number, change in self._events[first:]:
            owner = self._owner_of[number]
            sizes[owner] += change
            if not keep(owner):
                total += change
                if total > largest:
                    largest, span.owners = total, sizes.copy()
        span.owners = Counter({owner: size for owner, size in span.owners.items() if size and not keep(owner)})

    def ran(self, operator: Any, args: Any, inputs: Sequence[Tensor], result: Any) -> None:
        """Take note of an operator: its new storages, its work, and its message if it is a collective."""
        made = [result] if isinstance(result, FakeTensor) else tree_leaves(result)
        results = [one for one in made if isinstance(one, FakeTensor) and one.fake_device.type != "cpu"]
        name = operator._schema.name
        owner = ROWS if name == "aten::_to_copy" and not isinstance(args[0], FakeTensor) else ACTIVATIONS
        new = [self._see(one.untyped_storage(), owner) for one in results]
        if name.startswith(_GATHERING):
            self.attribute([*inputs, *results], GATHERED, of={ACTIVATIONS})
        if operator.namespace == "c10d":
            self._note_message(operator, args)
            return
        if name == WORKED:
            self.work += Work(*args[1:])
            return
        writes = operator._schema.is_mutable
        if operator.is_view or not (any(new) or writes or not results) or name.startswith(_WITHOUT_WORK):
            return
        self.work.launches += 1
        if name == ATTENDED:
            num_bytes, flops = _of_cached(args, self.positions)
            # What it reads grows with the rows, unlike weights.
            self.work += Work(flops, num_bytes)
            return
        # Without a result, an operator writes as much as it is given.
        num_bytes = _moved_bytes(name, inputs, results or inputs)
        self.work.num_bytes += num_bytes
        if (count := _FLOPS.get(name)) is not None:
            self.work.flops += round(count(args, results[0]))
            self.work.product_bytes += num_bytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        self._see(storage, GATHERED)

    def _see(self, storage: torch.UntypedStorage, owner: str) -> bool:
        """Enter a storage's size; returns True for a new one."""
        address, size = storage._cdata, -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        number = self._numbers.get(address)
        is_new = number is None
        if number is None:
            number = self._numbers[address] = len(self._owner_of)
            self._owner_of[number] = self._owner or owner
            self._sizes[number] = 0
            self._watched[number] = weakref.ref(storage, lambda _: self._freed(address, number))
        if size != self._sizes[number]:
            self._events.append((number, size - self._sizes[number]))
            self._sizes[number] = size
        return is_new

    def _freed(self, address: int, number: int) -> None:
        self._events.append((number, -self._sizes.pop(number)))
        del self._numbers[address], self._watched[number]

    def _note_message(self, operator: Any, args: Any) -> None:
        given = {one.name: value for one, value in zip(operator._schema.arguments, args, strict=False)}
        group = dist.ProcessGroup.unbox(given["process_group"])
        kind = operator._schema.name.partition("::")[2]
        if num_bytes := round(_SENT_BYTES[kind](given, group)):
            ranks = tuple(dist.get_process_group_ranks(group))
            self.messages.append(Message(kind, ranks, num_bytes))


def _of_product(args: Any, out: Tensor) -> float:
    """Return the flops of a matrix product, the last two tensors' among the arguments, with or without groups."""
    left, right = [one for one in args if isinstance(one, Tensor) and one.is_floating_point()][-2:]
    # Not by the output: groups share out what is summed over in the gradient of their weights.
    return 2.0 * left.numel() * right.shape[-1]


def _of_attention(query_THK: Tensor, longest_query: int, longest_key: int) -> float:
    """Return the flops of packed causal attention if all rows are as long as the longest."""
    return 4.0 * query_THK.numel() * (longest_key - longest_query / 2)


def _of_cached(args: Any, num_positions: int) -> tuple[int, int]:
    """Return the bytes and flops of attention from one query per row to so many cached positions."""
    query_BHK, keys, values, window = args
    num_seen = num_positions if window is None else min(num_positions, window)
    heads = keys.shape[1] * keys.element_size() * (keys.shape[-1] + values.shape[-1])
    per_position = 2 * query_BHK.shape[1] * (query_BHK.shape[-1] + values.shape[-1])
    return len(query_BHK) * num_seen * heads, len(query_BHK) * num_seen * per_position


_FLOPS: dict[str, Callable[[Any, Tensor], float]] = {
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::_grouped_mm"), _of_product),
    "aten::_flash_attention_forward": lambda args, out: _of_attention(args[0], *args[5:7]),
    # Gradients of three inputs and the scores again: five products instead of two.
    "aten::_flash_attention_backward": lambda args, out: 2.5 * _of_attention(args[1], *args[8:10]),
    "aten::linalg_solve_triangular": lambda args, out: out.numel() * args[0].shape[-1],
}
# Allocation without a kernel.
_WITHOUT_WORK = ("aten::empty", "aten::new_empty", "aten::detach", "aten::alias", "aten::set_")


# Operators that read some places of their first tensor, and those that write some.
_READ_PLACES = ("aten::embedding", "aten::index_select", "aten::index", "aten::gather")
_WRITE_PLACES = ("aten::index_copy_", "aten::index_put_", "aten::_index_put_impl_", "aten::scatter_")


def _moved_bytes(name: str, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Return the bytes that an operator reads and writes."""
    if name in _READ_PLACES:
        return sum(one.nbytes for one in inputs[1:]) + 2 * sum(one.nbytes for one in results)
    if name in _WRITE_PLACES:
        return 2 * sum(one.nbytes for one in inputs[1:])
    return sum(one.nbytes for one in (*inputs, *results))


def _size(value: Any) -> int:
    return sum(one.nbytes for one in tree_leaves(value) if isinstance(one, Tensor))


def _others(group: dist.ProcessGroup) -> float:
    """Return the share of a whole that isn't a rank's own."""
    return (group.size() - 1) / group.size()


_SENT_BYTES: dict[str, Callable[[dict[str, Any], dist.ProcessGroup], float]] = {
    "allreduce_": lambda given, group: 2 * _others(group) * _size(given["tensors"]),
    "allgather_": lambda given, group: (group.size() - 1) * _size(given["input_tensors"]),
    "_allgather_base_": lambda given, group: (group.size() - 1) * _size(given["input_tensor"]),
    "_reduce_scatter_base_": lambda given, group: _others(group) * _size(given["input_tensor"]),
    "alltoall_base_": lambda given, group: _others(group) * _size(given["input"]),
    "broadcast_": lambda given, group: _others(group) * _size(given["tensors"]),
    "send": lambda given, group: _size(given["tensors"]),
    "recv_": lambda given, group: 0,
}
