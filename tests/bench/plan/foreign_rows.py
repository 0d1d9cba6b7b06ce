"""Peaks and times that other trainers measured on GPUs, beside plans of our trainer with their facts as inputs.

Rows are public figures of prime-rl's trainer (FSDP2, compile, float32 weights, gradients and AdamW, layers computed in
bfloat16 and recomputed, two micro-batches of one packed row per GPU, peak of reserved memory) and of torchtitan's (one
micro-batch). Our trainer has the same dtypes and recomputation, so the update of each is planned by its engines, with
prime-rl's operators in the places that `foreign_trainers` names. Rules of the trainers, the same for all of their rows:

- Adapters (trainer/{model,lora,runs,optim}.py of prime-rl): the base's weights are float32 too, and there are four
  slots of adapters, also of experts, of which a micro-batch uses one. The benchmark's made-up rows (rl/data.py) belong
  to no run, and only runs have an optimizer, so no AdamW means exist.
- Offload (utils/act_offloading.py): the inputs of layers, kept for recomputation, are on the host.
- All logits (trainer/sft/train.py): PyTorch's cross-entropy has log-probabilities and the gradients of these and of the
  logits, in float32: 3 * 4 bytes each. prime-rl's loop holds the float32 logits meanwhile: 4 more. torchtitan's
  (train.py) deletes them.
- Selective recomputation (torchtitan/parallelisms/parallelize_llama.py): outputs of attention and of every second
  product are kept, beside the inputs of layers. Compiled layers drop the last product, as no gradient needs it.
- torchtitan's root (same file) keeps embedding, head and last layer gathered.
- Reserved memory is 6% above what is allocated (agilerl-arena's memory model has 5.4% to 7%), and counts gradients
  between updates: an allocator keeps their blocks, which are too small for activations.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl.config.config import load_config
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.nouns.roles import POLICY, WorkerState
from spmdrl.plan.account import GATHERED, Span
from spmdrl.plan.planned_device import alone_in, planned_device
from spmdrl.plan.planned_kernels import take_kernels_of
from spmdrl.plan.run_plan import each_in_a_child
from spmdrl.plan.traced_rank import TracedRank
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.verbs.planned_run import planned_run
from tests.bench.harness.bench_table import BenchTable
from tests.bench.plan.foreign_models import MODELS
from tests.bench.plan.foreign_times import Kernels, TimedAccount, seconds_of
from tests.bench.plan.foreign_trainers import ADAPTER_RANK, take_operators

GOAL, GOAL_OF_TIMES = 0.10, 0.30
RESERVE = 1.06
_GIB = 1 << 30
_SLOTS_OF_ADAPTERS = 4
_LOGIT_BYTES = {"prime": 16, "titan": 12}
_K = 1024
_PROMPT = 128


@dataclass(frozen=True)
class ForeignUpdate:
    """Facts of an update that its trace depends on."""

    model: str
    num_gpus: int
    adapters: bool = False
    fused_head: bool = True
    trainer: str = "prime"
    rows_together: int = 1
    """rows of a micro-batch"""


@dataclass(frozen=True)
class ForeignTrace:
    """Trace of an update on one GPU."""

    decoder: DecoderConfig
    owners: Counter[str]
    span: Span
    attention: Counter[str]
    """flops by operator"""
    num_passes: int


@dataclass(frozen=True)
class ForeignRow:
    """A measured peak, in GiB, of each length of a row's tokens on a GPU."""

    number: int
    update: ForeignUpdate
    measured: Mapping[int, float]
    seconds: Mapping[int, float] = field(default_factory=dict)
    """of one micro-batch"""
    offload: bool = False
    device: str = "h100"
    selective: bool = False
    compiled: bool = True
    float8: bool = False
    context: int = 1
    """GPUs that share a row, each with an equal part of its tokens"""

    @property
    def name(self) -> str:
        update = self.update
        kinds = [f"{update.model} {'LoRA' if update.adapters else 'full'}"]
        kinds += [] if update.fused_head else ["all logits"]
        kinds += [kind for kind in ("offload", "selective") if getattr(self, kind)]
        kinds += [] if self.compiled else ["eager"]
        kinds += [f"context {self.context}"] if self.context > 1 else []
        return ", ".join([*kinds, f"{update.num_gpus} GPU{'s' if update.num_gpus > 1 else ''}"])


_SMALL, _SMALL_LORA = ForeignUpdate("Qwen3-0.6B", 1), ForeignUpdate("Qwen3-0.6B", 1, adapters=True)
_DENSE_LORA, _MOE = ForeignUpdate("Qwen3-4B", 1, adapters=True), ForeignUpdate("Qwen3-30B-A3B", 8)
_GLM, _LARGE = (ForeignUpdate(model, 8, adapters=True) for model in ("GLM-4.5-Air", "Qwen3-235B-A22B"))
_TITAN = ForeignUpdate("Llama-3.1-8B", 8, fused_head=False, trainer="titan")
_TITAN_PAIR = replace(_TITAN, rows_together=2)
_TITAN_MANY = replace(_TITAN_PAIR, num_gpus=128)
_OF_TITAN: Mapping[str, Any] = {"device": "h100_96gb"}
ROWS = (
    ForeignRow(1, _SMALL, {16 * _K: 12.5}, {16 * _K: 1.00}),
    ForeignRow(2, _SMALL, {64 * _K: 19.6}, {64 * _K: 6.09}),
    ForeignRow(3, _SMALL, {64 * _K: 16.1}, {64 * _K: 6.23}, offload=True),
    ForeignRow(4, _SMALL_LORA, {16 * _K: 5.1, 64 * _K: 11.5}, {16 * _K: 1.23, 64 * _K: 6.58}),
    ForeignRow(5, replace(_SMALL, fused_head=False), {8 * _K: 31.7, 16 * _K: 52.8}, {8 * _K: 0.32, 16 * _K: 0.64}),
    ForeignRow(6, ForeignUpdate("Qwen3-4B", 8), {16 * _K: 17.1, 64 * _K: 36.1}, {16 * _K: 2.34, 64 * _K: 15.14}),
    ForeignRow(7, _DENSE_LORA, {16 * _K: 23.3, 64 * _K: 42.0}, {16 * _K: 2.63, 64 * _K: 15.74}),
    ForeignRow(7, _DENSE_LORA, {64 * _K: 31.1}, {64 * _K: 16.21}, offload=True),
    ForeignRow(8, replace(_DENSE_LORA, num_gpus=8), {16 * _K: 10.3, 64 * _K: 28.8}, {16 * _K: 2.69, 64 * _K: 15.98}),
    ForeignRow(9, ForeignUpdate("Qwen3-4B", 8, fused_head=False), {16 * _K: 54.6}, {16 * _K: 2.64}),
    ForeignRow(10, _MOE, {16 * _K: 74.6}, {16 * _K: 4.09}),
    ForeignRow(11, _MOE, {64 * _K: 105.4}, {64 * _K: 21.45}, device="h200"),
    ForeignRow(12, replace(_MOE, adapters=True), {16 * _K: 31.6, 64 * _K: 63.7}, {16 * _K: 3.96, 64 * _K: 22.42}),
    ForeignRow(13, _GLM, {16 * _K: 89.7}, {16 * _K: 7.85}, device="h200"),
    ForeignRow(13, _GLM, {16 * _K: 84.2}, {16 * _K: 8.11}, offload=True, device="h200"),
    ForeignRow(14, _LARGE, {16 * _K: 161.5}, {16 * _K: 31.69}, device="b200"),
    ForeignRow(14, _LARGE, {16 * _K: 150.3}, offload=True, device="b200"),
    ForeignRow(15, _TITAN_PAIR, {16 * _K: 82.4}, {16 * _K: 2.84}, selective=True, compiled=False, **_OF_TITAN),
    ForeignRow(15, _TITAN_PAIR, {16 * _K: 77.0}, {16 * _K: 2.46}, selective=True, **_OF_TITAN),
    ForeignRow(16, _TITAN_MANY, {16 * _K: 67.0}, {16 * _K: 2.92}, selective=True, compiled=False, **_OF_TITAN),
    ForeignRow(16, _TITAN_MANY, {16 * _K: 62.0}, {16 * _K: 2.52}, selective=True, **_OF_TITAN),
    ForeignRow(17, _TITAN, {32 * _K: 83.9}, {32 * _K: 8.42}, float8=True, **_OF_TITAN),
    ForeignRow(17, _TITAN, {32 * _K: 84.2}, {32 * _K: 12.90}, float8=True, context=2, **_OF_TITAN),
    ForeignRow(17, _TITAN, {32 * _K: 84.0}, {32 * _K: 30.60}, float8=True, context=4, **_OF_TITAN),
    ForeignRow(17, _TITAN, {32 * _K: 84.5}, {32 * _K: 59.80}, float8=True, context=8, **_OF_TITAN),
)
NOT_PLANNED = {
    18: "float8, and products cut to overlap with messages",
    19: "the size of its micro-batches isn't told",
}
NUM_ROWS = len({row.number for row in ROWS} | NOT_PLANNED.keys())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="+", type=int, metavar="ROW", help="numbers of rows; all unless given")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Plan all rows. Takes minutes."""
    chosen = [row for row in ROWS if not arguments.rows or row.number in arguments.rows]
    tasks = [(row, tokens) for row in chosen for tokens in row.measured]
    distinct = list(dict.fromkeys((row.update, tokens) for row, tokens in tasks))
    traces = dict(zip(distinct, each_in_a_child(*(partial(trace, *task) for task in distinct)), strict=True))
    rows = [_figures(row, tokens, traces[row.update, tokens]) for row, tokens in tasks]
    within, timed = _within(rows, "error", GOAL), _within(rows, "time_error", GOAL_OF_TIMES)
    return BenchTable(
        title="bench foreign: peaks that other trainers measured, and plans with their facts as inputs",
        rows=rows,
        notes=(
            f"{len(within)} of {NUM_ROWS} rows are within {GOAL:.0%} with all of their lengths: {within}",
            f"times of {len(timed)} of {NUM_ROWS} rows are within {GOAL_OF_TIMES:.0%}: {timed}",
            *(f"row {number} isn't planned: {reason}" for number, reason in NOT_PLANNED.items()),
        ),
        details={"ratios": {"foreign_within_10": len(within), "foreign_times_within_30": len(timed)}},
    )


def _within(rows: Sequence[Mapping[str, object]], error: str, goal: float) -> list[int]:
    """Return the rows whose error is within the goal at all of their lengths."""
    known = [row for row in rows if row[error] is not None]
    missed = {row["row"] for row in known if abs(float(str(row[error]))) > goal}
    return sorted({int(str(row["row"])) for row in known if row["row"] not in missed})


def _figures(row: ForeignRow, tokens: int, traced: ForeignTrace) -> dict[str, object]:
    owners, seconds = planned_owners(row, tokens, traced), planned_seconds(row, tokens, traced)
    gib, measured, took = RESERVE * owners.total() / _GIB, row.measured[tokens], row.seconds.get(tokens)
    return {
        "row": row.number, "config": f"{row.name}, {tokens // _K}k", "measured_gib": measured, "planned_gib": gib,
        "error": gib / measured - 1, "measured_s": took, "planned_s": seconds,
        "time_error": None if took is None else seconds / took - 1,
        "owners_gib": {name: size / _GIB for name, size in owners.items() if size > _GIB / 20},
    }  # fmt: skip


def planned_owners(row: ForeignRow, tokens: int, traced: ForeignTrace) -> Counter[str]:
    """Return the bytes of a GPU by owner, at the peak of an update with so many tokens in each micro-batch."""
    decoder, owners = traced.decoder, Counter(traced.owners)
    inputs = kept = _input_bytes(decoder, tokens)
    if row.selective:
        kept += tokens * decoder.num_layers * _selected_bytes(decoder, compiled=row.compiled)
    if not row.update.fused_head:
        logits = _LOGIT_BYTES[row.update.trainer] * tokens * decoder.vocab_size
        owners["activations"] = max(owners["activations"], kept + logits)
    if row.update.trainer == "titan":
        parameters = owners["update_weights"] * row.update.num_gpus // 4
        outside = 2 * decoder.vocab_size * decoder.hidden_size
        owners[GATHERED] = 2 * (outside + (parameters - outside) // decoder.num_layers)
        owners["gradients"] = owners["update_weights"]
    if row.offload:
        owners["activations"] -= inputs
    if row.update.adapters:
        of_slot, parameters = _expert_adapters(decoder), owners["base_weights"] // 2 * row.update.num_gpus
        # Planned in bfloat16.
        owners["base_weights"] *= 2
        del owners["optimizer"]
        owners["adapters of experts"] = 4 * (_SLOTS_OF_ADAPTERS + 1) * of_slot // row.update.num_gpus
        owners[GATHERED] += round(owners[GATHERED] * _SLOTS_OF_ADAPTERS * of_slot / parameters)
    return owners


def planned_seconds(row: ForeignRow, tokens: int, traced: ForeignTrace) -> float:
    """Return the seconds of one micro-batch, with its share of the optimizer's step."""
    kernels = Kernels(row.device, row.update.trainer, float8=row.float8, context=row.context)
    if row.selective:
        kernels = replace(kernels, kept_flops=2 * tokens * _kept_weights(traced.decoder))
    seconds = seconds_of(traced.span, traced.attention, kernels, ranks_per_node=min(row.update.num_gpus, 8))
    # Copies to the host and back go on no stream of their own, so that layers wait for them.
    copied = 2 * _input_bytes(traced.decoder, tokens) if row.offload else 0
    return seconds / traced.num_passes + copied / kernels.host_bytes_per_second


def _selected_bytes(decoder: DecoderConfig, *, compiled: bool) -> int:
    """Return the bytes per token of a layer's kept results.

    These are attention's output and sums, and of the products, in the order of the layer, queries, values, the first
    of the feed-forward layer and its last.
    """
    queries, values = (heads * decoder.head_size for heads in (decoder.num_heads, decoder.num_kv_heads))
    last = 0 if compiled else decoder.hidden_size
    return 2 * (queries + queries + values + decoder.intermediate_size + last) + 4 * decoder.num_heads


def _expert_adapters(decoder: DecoderConfig) -> int:
    """Return the elements of one slot of all experts' adapters, which our trainer doesn't have."""
    if decoder.moe is None:
        return 0
    of_expert = 3 * (decoder.hidden_size + decoder.moe.intermediate_size) * ADAPTER_RANK
    return of_expert * decoder.moe.num_experts * (decoder.num_layers - len(decoder.moe.dense_layers))


def _input_bytes(decoder: DecoderConfig, tokens: int) -> int:
    return 2 * tokens * decoder.hidden_size * decoder.num_layers


def _kept_weights(decoder: DecoderConfig) -> int:
    """Return the elements of the weights whose products selective recomputation keeps."""
    width = (decoder.num_heads + decoder.num_kv_heads) * decoder.head_size + 2 * decoder.intermediate_size
    return width * decoder.hidden_size * decoder.num_layers


def trace(update: ForeignUpdate, tokens: int) -> ForeignTrace:
    """Trace the update of our trainer with the other's operators, which it takes for the life of this process."""
    length, num_micros = tokens // update.rows_together, 1 if update.trainer == "titan" else 2
    settings: Sequence[str] = [
        "model.path=another/trainer", "data.train=rows.jsonl", "reward.functions=[exact]", "model.dtype=bfloat16",
        "train.activation_checkpointing=full", f"train.max_tokens_per_microbatch={tokens}", "reshard.swap=always",
        f"data.max_prompt_length={_PROMPT}", f"rollout.max_completion_length={length - _PROMPT}",
        f"rollout.prompts_per_step={update.num_gpus * update.rows_together * num_micros // 2}",
        "rollout.num_generations=2",
        *([f"lora.rank={_SLOTS_OF_ADAPTERS * ADAPTER_RANK}"] if update.adapters else []),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[update.model]))
        launch = LaunchEnvironment(0, update.num_gpus, 0, min(update.num_gpus, 8))
        run = planned_run(
            load_config([], settings, "train"), launch, "h100", _PROMPT, length - _PROMPT, Path(folder)
        )  # fmt: skip
        take_kernels_of(run.device.kernels)
        take_operators(fused_head=update.fused_head, adapters=update.adapters)
        account = TimedAccount()
        with alone_in(run.of_rank(0)) as world, planned_device(account):
            traced = TracedRank(run.checked, run.sources, world, account, more_passes=None).trace(run.lengths)
        slot = traced.slots[WorkerState.UPDATE]
        owners = Counter(traced.held) + slot.span.owners
        return ForeignTrace(run.sources[POLICY].decoder, owners, slot.span, account.attention, slot.num_passes)
