"""A small trainer and generator, real but for what the resharding flow doesn't need, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from spmdrl.nouns.batch import WeightSlice
from tests.dataflow.resharding.tables import fsdp_slices, whole_slices
from tests.support.chosen_device import Uses, chosen_kind


def selected_device() -> torch.device:
    """The device of the tests; of several, the one that this process has selected."""
    Uses.count += 1
    return torch.device(chosen_kind())


@dataclass(frozen=True)
class HeldShard:
    tensor: Tensor
    slice: WeightSlice
    global_shape: tuple[int, ...]


class Block(nn.Module):
    """Odd sizes, so that shards are uneven and, for `scale`, empty on some ranks."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width + 3)
        self.outer = nn.Linear(width + 3, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.outer(torch.tanh(self.inner(x)))


def make_model(width: int = 5, num_blocks: int = 2, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Block(width) for _ in range(num_blocks)])


class SmallTrainer:
    """A model with AdamW, plain or sharded over the last axis of a mesh."""

    def __init__(self, model: nn.Sequential, mesh: DeviceMesh | None = None):
        self.model = model.to(selected_device())
        self.mesh = mesh
        self.weights_on_device = True
        self.update_count = 0
        if mesh is not None:
            for module in (*model, model):
                fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(self, x: Tensor) -> float:
        assert self.weights_on_device
        loss = self.model(x.to(selected_device())).square().mean()
        loss.backward()
        self.optimizer.step()
        self.update_count += 1
        return loss.item()

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def named_shards(self) -> dict[str, HeldShard]:
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        slices = whole_slices(shapes)
        if self.mesh is not None:
            slices = fsdp_slices(shapes, self.mesh.size(-1), self.mesh.get_local_rank(self.mesh.ndim - 1))
        parameters = self.model.parameters()
        return {box.name: HeldShard(local(p), box, tuple(p.shape)) for box, p in zip(slices, parameters, strict=True)}

    def updates(self, weight: str) -> bool:
        return True

    def shards_for(self, wanted: Iterable[str]) -> dict[str, HeldShard]:
        return self.named_shards()

    def optimizer_tensors(self) -> list[Tensor]:
        return [local(value) for state in self.optimizer.state.values() for value in state.values()]

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def state_bytes(self) -> list[Tensor]:
        """A copy of all weights and optimizer state, as bytes."""
        tensors = [*(shard.tensor for shard in self.named_shards().values()), *self.optimizer_tensors()]
        return [tensor.clone().reshape(-1).view(torch.uint8) for tensor in tensors]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


class SmallGenerator:
    """Holds whole weights in storage of its own."""

    wants_iterator = False

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype = torch.float32,
        dtypes: dict[str, torch.dtype] | None = None,
    ):
        """`dtypes` are those of weights that aren't kept in `dtype`."""
        self.shapes = shapes
        self.dtypes = dict.fromkeys(shapes, dtype) | (dtypes or {})
        self.version = -1
        self.weights: dict[str, Tensor] = {}
        self.borrowed: set[str] = set()
        self.cache: Tensor | None = None

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def weight_slices(self) -> dict[str, WeightSlice]:
        return {box.name: box for box in whole_slices(self.shapes)}

    def wake_weights(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """All at once, whichever are named."""
        if not self.weights:
            self.weights = {
                name: torch.full(shape, -7.0, dtype=self.dtypes[name], device=selected_device())
                for name, shape in self.shapes.items()
            }
        return self.weights

    def borrow_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.weights.update(weights)
        self.borrowed = set(weights)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        raise AssertionError("this generator shows its storage")

    def wake_cache(self) -> None:
        self.cache = torch.zeros(64, device=selected_device())

    def sleep(self) -> None:
        self.weights, self.borrowed, self.cache = {}, set(), None

    def memory_bytes(self) -> dict[str, int]:
        return {
            "generation_weights": sum(t.nbytes for name, t in self.weights.items() if name not in self.borrowed),
            "kv_cache": 0 if self.cache is None else self.cache.nbytes,
        }


class StreamedGenerator(SmallGenerator):
    """Takes whole weights one by one."""

    wants_iterator = True

    def wake_weights(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        return {}

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.weights = {name: tensor.to(self.dtypes[name], copy=True) for name, tensor in weights}
