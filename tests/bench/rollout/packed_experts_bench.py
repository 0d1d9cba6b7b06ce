"""Decoding steps of sparse models whose experts are packed, beside the same with grouped products, in turn.

Linear layers are packed in both, and attention, which is the same, is left out. Seconds are those of the process's CPU,
which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.generation.native.engine_weights import PackedWeights
from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.making.make_model import RandomWeights
from spmdrl.engines.models.moe import MoeConfig
from tests.bench.harness.bench_models import qwen3
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn

_DTYPES = (torch.float32, torch.bfloat16)
_STEPS = 3


@dataclass(frozen=True)
class _Size:
    width: int
    expert_width: int
    num_experts: int
    experts_per_token: int
    num_layers: int

    def config(self) -> DecoderConfig:
        moe = MoeConfig(self.num_experts, self.experts_per_token, self.expert_width, normalize=True)
        return qwen3(
            model_type="qwen3_moe", vocab_size=512, hidden_size=self.width, intermediate_size=3 * self.width,
            num_layers=self.num_layers, num_heads=8, num_kv_heads=4, head_size=self.width // 8, moe=moe,
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"D={self.width} I={self.expert_width} E={self.num_experts} C={self.experts_per_token} x {self.num_layers}"
        )


SIZES = (
    _Size(256, 128, 32, 4, 4),
    _Size(256, 256, 16, 2, 6),
    _Size(512, 256, 64, 8, 2),
    _Size(512, 512, 16, 2, 4),
    _Size(2048, 768, 16, 4, 1),
)
"""Those whose experts are too small to be packed have the same products in both."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, default=len(SIZES), help=f"measure the first so many of {len(SIZES)}")
    parser.add_argument("--rows", type=_numbers, default=(8, 64), help="rows of a step, as in 8,64 (the default)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, of which the median counts (9)")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def run(arguments: argparse.Namespace) -> BenchTable:
    """Measure all sizes, on one thread."""
    torch.set_num_threads(1)
    rows = []
    for size in SIZES[: arguments.sizes]:
        for dtype in _DTYPES:
            steps = {packs: _step(size.config(), dtype, packs=packs) for packs in (False, True)}
            for num_rows in arguments.rows:
                contenders = {packs: functools.partial(_seconds, step, num_rows) for packs, step in steps.items()}
                turns = in_turn(contenders, arguments.rounds)
                grouped, packed = (statistics.median(turns[packs].results) for packs in (False, True))
                rows.append({
                    "experts": str(size), "dtype": str(dtype).removeprefix("torch."), "rows": num_rows,
                    "grouped ms": 1000 * grouped, "packed ms": 1000 * packed, "grouped / packed": grouped / packed,
                })  # fmt: skip
    return BenchTable(f"bench experts: decoding steps, medians of {arguments.rounds} rounds", rows)


def _step(config: DecoderConfig, dtype: torch.dtype, *, packs: bool) -> Callable[[Tensor], Tensor]:
    """A forward of tokens [B] that returns logits [B, V]."""
    with torch.device("meta"):
        decoder = Decoder(config)
    weights = PackedWeights(decoder, torch.device("cpu"), dtype)
    values = RandomWeights(config, seed=0)
    for name, weight in weights.wake().items():
        weight.copy_(values(name))
    if packs:
        weights.pack()
    else:
        for product in weights.linears:
            product.pack()
    share = config.num_heads // config.num_kv_heads

    def attend(layer: int, q_BHK: Tensor, k_BJK: Tensor, v_BJK: Tensor) -> Tensor:
        return v_BJK.repeat_interleave(share, dim=1)

    return lambda tokens_B: decoder(tokens_B, tokens_B, attend, lambda hidden_BD, _: weights.logits(hidden_BD))


@torch.inference_mode()
def _seconds(step: Callable[[Tensor], Tensor], num_rows: int) -> float:
    """CPU seconds of one step, the mean of a few of other tokens each."""
    tokens = [torch.arange(num_rows) + num_rows * number for number in range(_STEPS)]
    start = time.process_time()
    for tokens_B in tokens:
        step(tokens_B)
    return (time.process_time() - start) / _STEPS
