"""Low-rank adapters beside a decoder's projections: W x + alpha / rank B A x (LoRA, arXiv:2106.09685, eq. 3).

Their weights are named as in PEFT's files: PROJECTION.lora_A.weight [rank, inputs] and PROJECTION.lora_B.weight
[outputs, rank].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Interval
from torch import Tensor, nn

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.layers import Linear

PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
)  # fmt: skip
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_ADAPTERS = (".lora_A.weight", ".lora_B.weight")

AdaptedTokens = Literal["all", "first half", "none"]
"""The packed tokens that adapters are added to."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of the policy (arXiv:2106.09685): they alone are trained, the model's own weights stay."""

    rank: Annotated[int, Ge(1)] = 32
    """rank of each adapter: rows of its A and columns of its B"""
    alpha: Annotated[float, Interval(gt=0, lt=math.inf)] = 32.0
    """what an adapter's output is multiplied by, times its rank: alpha / rank"""
    targets: tuple[str, ...] = ()
    """projections that have an adapter in every layer, as in [q_proj, v_proj]; []: all that the model has, but for
    those of experts"""

    merge: bool = False
    """whether generation works with merged weights, which all move at each switch, rather than with the adapters, which
    then alone move; vLLM does in any case"""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.targets if name not in PROJECTIONS]:
            raise ValueError(
                f"lora.targets has {unknown[0]}, which is no projection; choose among {', '.join(PROJECTIONS)}, or "
                "leave it out for all that the model has"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class AdaptedLinear(Linear):
    """A projection and its adapter, whose output is added to that of the tokens that `adapted` names."""

    def __init__(self, linear: Linear, lora: LoraConfig):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.lora_A = Linear(linear.in_features, lora.rank, bias=False)
        self.lora_B = Linear(lora.rank, linear.out_features, bias=False)
        self.scale = lora.scale
        self.adapted: AdaptedTokens = "all"
        self.num_bias_shares = 1
        """Ranks that add up their outputs, each with its share of the bias."""

    def forward(self, values: Tensor) -> Tensor:
        bias = self.bias if self.num_bias_shares == 1 else self.bias / self.num_bias_shares
        return self.with_adapter(ops.linear(values, self.weight, bias), values)

    def with_adapter(self, output: Tensor, values: Tensor) -> Tensor:
        """The projection's own output [T, outputs] with the adapter's; where half gets it, added in place."""
        if self.adapted == "none":
            return output
        if self.adapted == "all":
            return output + self.scale * self.lora_B(self.lora_A(values))
        half = len(values) // 2
        output[:half] += self.scale * self.lora_B(self.lora_A(values[:half]))
        return output


def add_adapters(decoder: nn.Module, lora: LoraConfig) -> None:
    """Give the projections that `lora` targets their adapters.

    Raises ValueError where the decoder has no such projection, or has experts in its place.
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
    """Whether a weight of this name belongs to an adapter."""
    return weight.endswith(_ADAPTERS)


def adapted_linears(decoder: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """The projections that have adapters, by path."""
    for path, module in decoder.named_modules():
        if isinstance(module, AdaptedLinear):
            yield path, module


@contextmanager
def adapting(decoders: Iterable[nn.Module], tokens: AdaptedTokens) -> Iterator[None]:
    """Inside this block adapters are added to these tokens alone, of half of them without a gradient only."""
    linears = [linear for decoder in decoders for _, linear in adapted_linears(decoder)]
    for linear in linears:
        linear.adapted = tokens
    try:
        yield
    finally:
        for linear in linears:
            linear.adapted = "all"
