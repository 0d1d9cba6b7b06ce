"""The engine's weights: storages that are freed and reallocated, packed for decoding, or borrowed.

    plain (to be filled, borrowed) --pack--> packed (to be used) --wake, borrow, sleep--> plain

Linear layers are packed, in the layout that decoding steps read fastest. Layers with the same input become one product.
If no layout is faster than the plain one, nothing is packed, and such layers lie behind each other in one storage.

Shape letters: `B` rows, `D` inputs of a linear layer, `V` vocabulary or this rank's part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from spmdrl.engines.models.decoder import Decoder
from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.cpu import BlockedLinear
from spmdrl.engines.models.layers import Linear
from spmdrl.engines.models.lora import AdaptedLinear


class FreeableWeights:
    """All parameters and buffers of a module built on the meta device, in storages that they have while they are awake.

    Parameter objects survive sleeps. Running a module whose weights sleep is a segmentation fault, not an exception.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, together: Iterable[Sequence[str]] = ()
    ):
        """Hold parameters in `dtype`; buffers keep theirs, which was chosen on purpose.

        Those that are named `together` lie behind each other in one storage; they differ in their first dim alone.
        """
        self._module = module.requires_grad_(False)
        parameters = dict(module.named_parameters())
        weights = module.state_dict()
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        dtypes = {name: dtype if name in parameters else weight.dtype for name, weight in weights.items()}
        self._own: dict[str, Tensor] = {}
        self._neighbours: dict[str, Sequence[str]] = {name: (name,) for name in self.shapes}
        self._neighbours |= {name: names for names in together for name in names}
        for names in dict.fromkeys(map(tuple, self._neighbours.values())):
            dtype, offset = dtypes[names[0]], 0
            storage = torch.empty(0, dtype=dtype, device=device).untyped_storage()
            for name in names:
                # No views, in which autograd allows no writes.
                meta = torch.empty(self.shapes[name], dtype=dtype, device="meta")
                own = self._own[name] = torch.empty(0, dtype=dtype, device=device)
                own.set_(storage, offset, meta.shape, meta.stride())
                offset += own.numel()
            storage.resize_(0)
        self._borrowed: dict[str, Tensor] = {}
        self._kept: frozenset[str] = frozenset()
        self._asleep = set(self.shapes)
        # Detached: buffers become these very tensors, which borrowing points elsewhere.
        module.load_state_dict({name: weight.detach() for name, weight in self._own.items()}, assign=True)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device now, without borrowed storages."""
        return sum(
            self._own[name].untyped_storage().nbytes()
            for name, (first, *_) in self._neighbours.items()
            if name == first
        )

    @property
    def are_awake(self) -> bool:
        """True if every weight has its storage."""
        return not self._asleep

    def wake(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Allocate these weights, or all, uninitialised, unless allocated; returns all weights by name."""
        for name in self._asleep.intersection(self._own if names is None else names):
            self._allocate(name)
            self._asleep.remove(name)
        return self._own | self._borrowed

    def borrow(self, weights: Mapping[str, Tensor]) -> None:
        """Use these tensors instead of own storage until the next sleep; they are only read."""
        for name, weight in weights.items():
            own = self._own[name]
            assert (weight.shape, weight.dtype) == (own.shape, own.dtype), (name, weight.shape, weight.dtype)
            self._borrowed[name] = weight.detach()
            self._asleep.discard(name)
        self._free(weights)
        self._point(self._borrowed)

    def keep(self, names: Iterable[str]) -> None:
        """Leave these weights, which are filled and final, awake for good."""
        self._kept = frozenset(names)
        assert not self._kept & (self._asleep | self._borrowed.keys()), "asleep or borrowed weights can't be kept"

    def sleep(self) -> None:
        """Free the storages, even if still referenced, except kept ones; release borrowed tensors."""
        self._point({name: self._own[name] for name in self._borrowed})
        self._borrowed = {}
        self._asleep = set(self._own) - self._kept
        self._free(self._asleep)

    def _allocate(self, name: str) -> None:
        """Allocate the storage of a weight, unless it is allocated."""
        storage = self._own[name].untyped_storage()
        if not storage.nbytes():
            storage.resize_(sum(self._own[neighbour].nbytes for neighbour in self._neighbours[name]))

    def _free(self, names: Iterable[str]) -> None:
        """Free the storages of these weights in which no other weight is awake."""
        idle = self._borrowed.keys() | self._asleep
        for name in names:
            if idle.issuperset(self._neighbours[name]):
                self._own[name].untyped_storage().resize_(0)

    def _point(self, weights: Mapping[str, Tensor]) -> None:
        """Make the module's parameters and buffers read from these tensors."""
        held = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        for name, weight in weights.items():
            held[name].data = weight


class PackedWeights(FreeableWeights):
    """Freeable weights of a decoder on the meta device, whose linear layers run packed after `pack`.

    A packed weight has no other storage, unless it is borrowed or also used elsewhere, like a tied head.
    """

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype):
        # A CPU packs them, which frees each alone.
        super().__init__(decoder, device, dtype, () if device.type == "cpu" else _together(decoder))
        self._name_of = {id(weight): name for name, weight in decoder.named_parameters()}
        self._head = Product([decoder.model.embedding.weight if decoder.lm_head is None else decoder.lm_head.weight])
        self.products = [*_installed(decoder), self._head]
        self._used_elsewhere = {"model.embed_tokens.weight"}
        self._is_packed = False

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(product.num_bytes for product in self.products)

    @property
    def are_packed(self) -> bool:
        """True if all linear layers run packed."""
        return all(product.is_packed for product in self.products)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Apply the head, tied or not, to hidden states [B, D]; returns [B, V]."""
        (logits_BV,) = self._head(hidden_BD)
        return logits_BV

    def pack(self) -> None:
        """Pack unpacked layers; the weights must be awake and filled."""
        if self._is_packed:
            return
        for product in self.products:
            if product.is_packed:
                continue
            product.pack()
            if product.is_packed:
                for name in self._names(product) - self._used_elsewhere - self._borrowed.keys():
                    self._own[name].untyped_storage().resize_(0)
        self._is_packed = True

    def wake(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        self._unpack()
        return super().wake(names)

    def borrow(self, weights: Mapping[str, Tensor]) -> None:
        self._unpack()
        super().borrow(weights)

    def sleep(self) -> None:
        # A kept layer may share its product with one that isn't, such as a borrowed one.
        self._unpack(self._kept)
        super().sleep()

    def _names(self, product: Product) -> set[str]:
        return {self._name_of[id(weight)] for weight in product.weights}

    def _unpack(self, names: Set[str] | None = None) -> None:
        """Drop the products whose weights aren't all kept; these weights, or all, get plain storages with values."""
        wanted = (self._own.keys() if names is None else names) - self._borrowed.keys()
        for product in [one for one in self.products if not self._names(one) <= self._kept]:
            lacking = {name for name in self._names(product) & wanted if not self._own[name].untyped_storage().nbytes()}
            for weight, values in zip(product.weights, product.unpacked() if lacking else (), strict=False):
                name = self._name_of[id(weight)]
                if name in lacking:
                    self._allocate(name)
                    self._own[name].copy_(values)
            product.drop()
        self._is_packed = False


class Product:
    """Linear layers of the same input: one product if they are packed, else one each."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (None,),
        adapted: Sequence[AdaptedLinear | None] = (None,),
    ):
        """`adapted` are the layers that add an adapter to their output."""
        self.weights = list(weights)
        self._biases = list(biases)
        self._adapted = list(adapted)
        self._sizes = [len(weight) for weight in weights]
        self._packed: BlockedLinear | None = None
        self._whole: tuple[Tensor, Tensor | None] | None = None
        """Weight and bias of all layers, if they lie behind each other in memory."""

    @classmethod
    def of(cls, *layers: Linear) -> Product:
        adapted = [layer if isinstance(layer, AdaptedLinear) else None for layer in layers]
        return cls([layer.weight for layer in layers], [layer.bias for layer in layers], adapted)

    def __call__(self, rows_BD: Tensor) -> Sequence[Tensor]:
        outputs = zip(self._own_outputs(rows_BD), self._adapted, strict=True)
        return [out if layer is None else layer.with_adapter(out, rows_BD) for out, layer in outputs]

    def _own_outputs(self, rows_BD: Tensor) -> Sequence[Tensor]:
        if self.is_packed:
            outputs = self.packed(rows_BD)
            # Not split(), whose Python overhead equals a small product.
            return (outputs,) if len(self._sizes) == 1 else outputs.split_with_sizes(self._sizes, dim=-1)
        if self._whole is not None:
            return ops.linear(rows_BD, *self._whole).split_with_sizes(self._sizes, dim=-1)
        return [ops.linear(rows_BD, weight, bias) for weight, bias in zip(self.weights, self._biases, strict=True)]

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    @property
    def num_bytes(self) -> int:
        return 0 if self._packed is None else self._packed.num_bytes

    def packed(self, rows_BD: Tensor) -> Tensor:
        """Return the packed layers' outputs, concatenated."""
        assert self._packed is not None, "the product isn't packed"
        return self._packed(rows_BD)

    def pack(self) -> None:
        biases = [bias for bias in self._biases if bias is not None]
        if self.weights[0].device.type == "cpu":
            self._packed = ops.blocked_linear(_joined(self.weights), _joined(biases) if biases else None)
        elif len(self.weights) > 1 and len(biases) in (0, len(self.weights)):
            weight, bias = _as_one(self.weights), _as_one(biases) if biases else None
            self._whole = None if weight is None or (biases and bias is None) else (weight, bias)

    def unpacked(self) -> Sequence[Tensor]:
        """Return the weights' values when they were packed, or nothing if they aren't."""
        return () if self._packed is None else self._packed.weight().split(self._sizes)

    def drop(self) -> None:
        self._packed = self._whole = None


def _installed(decoder: Decoder) -> Iterator[Product]:
    """Install products in place of the linear layers below the head; yields them."""
    joined: set[nn.Module] = set()
    for module in decoder.modules():
        layers: list[Linear] = [getattr(module, name) for name in getattr(module, "joined", ())]
        if layers:
            joined.update(layers)
            vars(module)["project"] = product = Product.of(*layers)
            yield product
    for module in decoder.model.modules():
        is_whole = type(module) is Linear or (isinstance(module, AdaptedLinear) and module.num_bias_shares == 1)
        if isinstance(module, Linear) and is_whole and module not in joined:
            product = Product.of(module)
            vars(module)["forward"] = lambda rows_BD, product=product: product(rows_BD)[0]
            yield product


def _together(decoder: Decoder) -> list[list[str]]:
    """Return the names of weights, and of biases, of layers with the same input."""
    held = decoder.state_dict().keys()
    joined = {prefix: getattr(module, "joined", ()) for prefix, module in decoder.named_modules()}
    groups = [
        [f"{prefix}.{name}.{kind}" for name in names]
        for prefix, names in joined.items()
        for kind in ("weight", "bias")
        if names
    ]
    return [names for names in groups if held >= set(names)]


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the parts as one tensor, if they lie behind each other in one storage."""
    first = parts[0].detach()
    ends = itertools.accumulate((part.nbytes for part in parts), initial=first.data_ptr())
    owners = {part.untyped_storage().data_ptr() for part in parts}
    if len(owners) > 1 or any(part.data_ptr() != end for part, end in zip(parts, ends, strict=False)):
        return None
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
