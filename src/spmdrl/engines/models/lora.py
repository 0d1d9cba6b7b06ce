"""Low-rank adapters beside a decoder's projections: W x + alpha / rank B A x (LoRA, arXiv:2106.09685, eq. 3).

Their weights are named as in PEFT's files: PROJECTION.lora_A.weight [rank, inputs] and PROJECTION.lora_B.weight
[outputs, rank].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.layers import Linear
from spmdrl.nouns.settings.model_config import PROJECTIONS, LoraConfig

_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_ADAPTERS = (".lora_A.weight", ".lora_B.weight")


class AdaptedLinear(Linear):
    """A projection and its adapter, whose output is added unless `is_adapted` is false."""

    def __init__(self, linear: Linear, lora: LoraConfig):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.lora_A = Linear(linear.in_features, lora.rank, bias=False)
        self.lora_B = Linear(lora.rank, linear.out_features, bias=False)
        self.scale = lora.scale
        self.is_adapted = True
        self.num_bias_shares = 1
        """Number of ranks that sum their outputs, each with its share of the bias."""

    def forward(self, values: Tensor) -> Tensor:
        bias = self.bias if self.num_bias_shares == 1 else self.bias / self.num_bias_shares
        return self.with_adapter(ops.linear(values, self.weight, bias), values)

    def with_adapter(self, output: Tensor, values: Tensor) -> Tensor:
        """Add the adapter's output to the projection's own [T, outputs]."""
        return output + self.scale * self.lora_B(self.lora_A(values)) if self.is_adapted else output


def add_adapters(decoder: nn.Module, lora: LoraConfig) -> None:
    """Add adapters to the projections that `lora` targets.

    Raises ValueError if the decoder has no such projection, or has experts in its place.
    """
    there = {path: module for path, module in decoder.named_modules() if type(module) is Linear}
    names = {path.rpartition(".")[2] for path in there} & set(PROJECTIONS)
    if any(path.endswith("experts") for path, _ in decoder.named_modules()):
        names -= set(_FEED_FORWARD)
    if missing := [name for name in lora.targets if name not in names]:
        raise ValueError(
            f"lora.targets has {missing[0]}, but this model's projections that can have an adapter are "
            f"{', '.join(sorted(names))} (stacked experts, and feed-forward layers beside them, can't); choose among "
            "them, or leave lora.targets out for all"
        )
    for path, linear in there.items():
        parent, _, name = path.rpartition(".")
        if name in (lora.targets or names):
            setattr(decoder.get_submodule(parent), name, AdaptedLinear(linear, lora))


def is_adapter(weight: str) -> bool:
    """Return True if a weight of this name belongs to an adapter."""
    return weight.endswith(_ADAPTERS)


def adapted_linears(decoder: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield the projections that have adapters, by path."""
    for path, module in decoder.named_modules():
        if isinstance(module, AdaptedLinear):
            yield path, module


@contextmanager
def unadapted(decoders: Iterable[nn.Module]) -> Iterator[None]:
    """Disable the adapters inside this block."""
    linears = [linear for decoder in decoders for _, linear in adapted_linears(decoder)]
    for linear in linears:
        linear.is_adapted = False
    try:
        yield
    finally:
        for linear in linears:
            linear.is_adapted = True
