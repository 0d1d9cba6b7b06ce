"""Seconds of other trainers' updates, by our planner's rates and by published rates of their attention.

Products go by the planner's profiles, with 60% of the vendors' figures: 590 TFLOPS of an H100, where large bfloat16
products reach 600 to 700. Attention goes by the figures of FlashAttention-3's paper (arXiv:2407.08608, figures 5 and
6), head size 128 at 16K tokens on an H100: prime-rl runs version 3, on a B200 version 2 as torchtitan's PyTorch does.
float8 doubles the products' rate, as in the data sheet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from spmdrl.plan.account import Account, Span, Work
from spmdrl.plan.device_profile import HOST, TRAINING, DeviceProfile, Rates, read_profile
from spmdrl.plan.slot_times import GIB, seconds_of_messages, seconds_of_work

FORWARD, BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"
_VERSION_2, _VERSION_3 = {FORWARD: 370, BACKWARD: 322}, {FORWARD: 648, BACKWARD: 561}
_SHARE_OF_PRODUCTS, _SHARE_OF_MEMORY = 0.6, 0.8


class TimedAccount(Account):
    """Account that counts attention by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: Counter[str] = Counter()
        """flops by operator"""

    def ran(self, operator: Any, args: Any, inputs: Sequence[Tensor], result: Any) -> None:
        before = self.work.flops
        super().ran(operator, args, inputs, result)
        if (name := operator._schema.name) in (FORWARD, BACKWARD):
            self.attention[name] += self.work.flops - before


@dataclass(frozen=True)
class Kernels:
    """Kernels of a trainer on a device."""

    device: str
    trainer: str
    float8: bool = False
    context: int = 1
    """GPUs that share a row: each attends from its tokens to all of them"""
    kept_flops: int = 0
    """flops of an update's products that aren't done again for backward, as attention then isn't"""

    @property
    def attention(self) -> Mapping[str, int]:
        """TFLOPS by operator."""
        return _VERSION_3 if self.trainer == "prime" and self.device != "b200" else _VERSION_2

    @property
    def host_bytes_per_second(self) -> float:
        profile = _profile(self.device)
        assert profile.links is not None
        return profile.links[HOST].gib_per_second * GIB


def seconds_of(span: Span, attention: Mapping[str, int], kernels: Kernels, *, ranks_per_node: int) -> float:
    """Return the seconds of an update, whose layers all ran again for backward."""
    profile = _profile(kernels.device)
    assert profile.rates is not None and profile.links is not None
    rates = profile.rates[TRAINING]
    if kernels.float8:
        rates = replace(rates, tflops=2 * rates.tflops)
    products = replace(span.work - Work(flops=sum(attention.values()) + kernels.kept_flops), launches=0)
    computed = seconds_of_work(products, rates, overlaps=True)
    for name, flops in attention.items():
        share = 0.5 if kernels.kept_flops and name == FORWARD else 1.0
        computed += share * kernels.context * flops / 1e12 / kernels.attention[name]
    sent = seconds_of_messages(span.messages, profile.links, ranks_per_node)
    return max(computed, span.work.launches * rates.launch_us / 1e6, sent)


def _profile(device: str) -> DeviceProfile:
    """Return a profile; of others than the planner's by their data sheets, with the shares of its own."""
    tflops, bytes_per_second = {"b200": (2250, 8.0e12), "h100_96gb": (989, 2.4e12)}.get(device, (0, 0.0))
    if not tflops:
        return read_profile(device)
    hopper = read_profile("h100")
    assert hopper.rates is not None
    rates = Rates(_SHARE_OF_PRODUCTS * tflops, _SHARE_OF_MEMORY * bytes_per_second / GIB, launch_us=6)
    return replace(hopper, rates=dict.fromkeys(hopper.rates, rates))
