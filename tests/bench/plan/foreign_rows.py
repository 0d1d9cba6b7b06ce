"""Peaks that other trainers measured on GPUs, beside plans of our trainer with their facts as inputs.

Rows are public figures of prime-rl's trainer (FSDP2, compile, float32 weights, gradients and AdamW, layers computed in
bfloat16 and recomputed, two micro-batches of one packed row per GPU, peak of reserved memory) and of torchtitan's. Our
trainer has the same dtypes and recomputation, so the update of each is planned by its engines; what differs is a rule
of the trainer, the same for all of its rows:

- Adapters: the base's weights are float32 too, there are four slots of adapters, and experts have adapters.
- Offload: the inputs of layers, kept for recomputation, are on the host.
- Without a fused head PyTorch's cross-entropy has all logits: in the layers' dtype, in float32, as log-probabilities,
  and the gradients of the former two: 2 + 4 + 4 + 4 + 2 = 16 bytes each.
- Reserved memory is 6% above what is allocated (agilerl-arena's memory model has 5.4% to 7%).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.config.config import load_config
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.nouns.roles import POLICY, WorkerState
from spmdrl.plan.planned_kernels import take_kernels_of
from spmdrl.plan.rank_plan import trace_rank
from spmdrl.plan.run_plan import each_in_a_child
from spmdrl.runtime.launch import LaunchEnvironment
from spmdrl.verbs.planned_run import planned_run
from tests.bench.harness.bench_table import BenchTable

GOAL = 0.10
RESERVE = 1.06
_GIB = 1 << 30
_SLOTS_OF_ADAPTERS, _ADAPTER_RANK = 4, 16
_LOGIT_BYTES = 16
_STATE_BYTES = 16
"""of a trained parameter: weight, gradient and AdamW's two means, in float32"""
_QWEN3 = {
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "attention_bias": False, "vocab_size": 151936,
    "max_position_embeddings": 131072, "head_dim": 128, "num_key_value_heads": 8,
}  # fmt: skip
_EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False, "num_key_value_heads": 4,
}  # fmt: skip
_LLAMA = {
    "model_type": "qwen3", "vocab_size": 128256, "tie_word_embeddings": False, "rope_theta": 5e5,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, object]] = {
    "Qwen3-0.6B": _QWEN3 | {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "intermediate_size": 3072, "tie_word_embeddings": True,
    },
    "Qwen3-4B": _QWEN3 | {
        "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "intermediate_size": 9728, "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": _QWEN3 | _EXPERTS | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "Qwen3-235B-A22B": _QWEN3 | _EXPERTS | {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    # As a Qwen3 of Llama's sizes, which norms queries and keys besides.
    "Llama-3.1-8B": _QWEN3 | _LLAMA | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336,
    },
    "Llama-3.1-70B": _QWEN3 | _LLAMA | {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
    },
}  # fmt: skip


@dataclass(frozen=True)
class ForeignRow:
    """A measured peak, in GiB, of each length of a row's tokens on a GPU."""

    number: int
    model: str
    num_gpus: int
    measured: Mapping[int, float]
    adapters: bool = False
    offload: bool = False
    fused_head: bool = True
    tensor: int = 1

    @property
    def name(self) -> str:
        kind = ("LoRA" if self.adapters else "full") + (", offload" if self.offload else "")
        return f"{self.model} {kind}{'' if self.fused_head else ', all logits'}, {self.num_gpus} GPUs"


_K = 1024
ROWS = (
    ForeignRow(1, "Qwen3-0.6B", 1, {16 * _K: 12.5}),
    ForeignRow(2, "Qwen3-0.6B", 1, {64 * _K: 19.6}),
    ForeignRow(3, "Qwen3-0.6B", 1, {64 * _K: 16.1}, offload=True),
    ForeignRow(4, "Qwen3-0.6B", 1, {16 * _K: 5.1, 64 * _K: 11.5}, adapters=True),
    ForeignRow(5, "Qwen3-0.6B", 1, {8 * _K: 31.7, 16 * _K: 52.8}, fused_head=False),
    ForeignRow(6, "Qwen3-4B", 8, {16 * _K: 17.1, 64 * _K: 36.1}),
    ForeignRow(7, "Qwen3-4B", 1, {16 * _K: 23.3, 64 * _K: 42.0}, adapters=True),
    ForeignRow(7, "Qwen3-4B", 1, {64 * _K: 31.1}, adapters=True, offload=True),
    ForeignRow(8, "Qwen3-4B", 8, {16 * _K: 10.3, 64 * _K: 28.8}, adapters=True),
    ForeignRow(9, "Qwen3-4B", 8, {16 * _K: 54.6}, fused_head=False),
    ForeignRow(10, "Qwen3-30B-A3B", 8, {16 * _K: 74.6}),
    ForeignRow(11, "Qwen3-30B-A3B", 8, {64 * _K: 105.4}),
    ForeignRow(12, "Qwen3-30B-A3B", 8, {16 * _K: 31.6, 64 * _K: 63.7}, adapters=True),
    ForeignRow(14, "Qwen3-235B-A22B", 8, {16 * _K: 161.5}, adapters=True),
    ForeignRow(14, "Qwen3-235B-A22B", 8, {16 * _K: 150.3}, adapters=True, offload=True),
    ForeignRow(17, "Llama-3.1-8B", 8, {32 * _K: 83.9}, fused_head=False),
)
NOT_PLANNED = {
    13: "GLM-4.5-Air: its sizes weren't at hand",
    15: "recomputes some operators only, which ours can't",
    16: "recomputes some operators only, which ours can't",
    18: "float8, and products cut to overlap with messages",
    19: "the size of its micro-batches isn't told",
}
NUM_ROWS = len({row.number for row in ROWS} | NOT_PLANNED.keys())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="+", type=int, metavar="ROW", help="numbers of rows; all unless given")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Plan all rows. Takes minutes."""
    rows = []
    for row in ROWS:
        if not arguments.rows or row.number in arguments.rows:
            rows += [_figures(row, tokens, measured) for tokens, measured in row.measured.items()]
    missed = {row["row"] for row in rows if abs(float(str(row["error"]))) > GOAL}
    within = sorted({int(str(row["row"])) for row in rows if row["row"] not in missed})
    return BenchTable(
        title="bench foreign: peaks that other trainers measured, and plans with their facts as inputs",
        rows=rows,
        notes=(
            f"{len(within)} of {NUM_ROWS} rows are within {GOAL:.0%} with all of their lengths: {within}",
            *(f"row {number} isn't planned: {reason}" for number, reason in NOT_PLANNED.items()),
        ),
        details={"ratios": {"foreign_within_10": len(within)}},
    )


def _figures(row: ForeignRow, tokens: int, measured: float) -> dict[str, object]:
    owners = planned_owners(row, tokens)
    planned = RESERVE * owners.total() / _GIB
    shown = {name: size / _GIB for name, size in owners.items() if size > _GIB / 20}
    return {
        "row": row.number, "config": f"{row.name}, {tokens // _K}k", "measured_gib": measured, "planned_gib": planned,
        "error": planned / measured - 1, "owners_gib": shown,
    }  # fmt: skip


def planned_owners(row: ForeignRow, tokens: int) -> Counter[str]:
    """Return the bytes of a GPU by owner, at the peak of an update of two micro-batches of so many tokens."""
    decoder, owners = _traced(row, tokens)
    kept = 2 * tokens * decoder.hidden_size * decoder.num_layers
    if not row.fused_head:
        owners["activations"] = max(owners["activations"], kept + _LOGIT_BYTES * tokens * decoder.vocab_size)
    if row.offload:
        owners["activations"] -= kept
    if row.adapters:
        # Planned in bfloat16.
        owners["base_weights"] *= 2
        owners["adapters of experts"] = _STATE_BYTES * _expert_adapters(decoder) // row.num_gpus
    return owners


def _expert_adapters(decoder: DecoderConfig) -> int:
    """Return the elements of all experts' adapters, which our trainer doesn't have."""
    if decoder.moe is None:
        return 0
    of_expert = 3 * (decoder.hidden_size + decoder.moe.intermediate_size) * _SLOTS_OF_ADAPTERS * _ADAPTER_RANK
    return of_expert * decoder.moe.num_experts * (decoder.num_layers - len(decoder.moe.dense_layers))


def _traced(row: ForeignRow, tokens: int) -> tuple[DecoderConfig, Counter[str]]:
    """Return the model, and the bytes by owner of a GPU in the update of our trainer."""
    settings: Sequence[str] = [
        "model.path=another/trainer", "data.train=rows.jsonl", "reward.functions=[exact]", "model.dtype=bfloat16",
        "train.activation_checkpointing=full", f"train.max_tokens_per_microbatch={tokens}", "reshard.swap=always",
        f"data.max_prompt_length={tokens // 2}", f"rollout.max_completion_length={tokens // 2}",
        f"rollout.prompts_per_step={row.num_gpus}", "rollout.num_generations=2",
        *([f"lora.rank={_SLOTS_OF_ADAPTERS * _ADAPTER_RANK}"] if row.adapters else []),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[row.model]))
        launch = LaunchEnvironment(0, row.num_gpus, 0, row.num_gpus)
        loaded = load_config([], settings, "train")
        run = planned_run(loaded, launch, "h100", tokens // 2, tokens // 2, Path(folder))
        take_kernels_of(run.device.kernels)

        def trace(rank: int) -> Counter[str]:
            traced = trace_rank(run.checked, run.sources, run.of_rank(rank), run.lengths, more_passes=None)
            return Counter(traced.held) + traced.slots[WorkerState.UPDATE].span.owners

        return run.sources[POLICY].decoder, each_in_a_child(trace, [0])[0]
