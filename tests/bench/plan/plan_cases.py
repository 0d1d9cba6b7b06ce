"""Configs whose plans are compared with runs: models, layouts, algorithms, and what stays on the device."""

from __future__ import annotations

from dataclasses import dataclass

from spmdrl.plan.planned_rows import RowLengths
from tests.support.jobs import ROOT

LENGTHS = RowLengths(prompt=6, response=26)
# Rows of one length: sums of two numbers with two digits, and responses that end at the limit.
_BASE = (
    str(ROOT / "configs/debug/quickstart.yaml"), "data.train=synthetic://addition?low=10&high=49&count=400",
    "data.eval=null", "sft.max_steps=0", "rollout.ignore_eos=true", f"rollout.max_completion_length={LENGTHS.response}",
    "rollout.prompts_per_step=16", "rollout.num_generations=8", "rollout.kv_cache_gib=0.03", "train.max_steps=2",
    "train.max_tokens_per_microbatch=1024", "train.skip_zero_advantage=false", "optim.warmup_steps=0",
    "checkpoint.interval=0", "log.backends=[jsonl]", "model.dtype=float32", "model.make.hidden_size=256",
    "model.make.num_hidden_layers=4",
)  # fmt: skip
_MODELS = {
    "dense": ("model.make.intermediate_size=1024",),
    "moe": (
        "model.make.model_type=qwen3_moe", "model.make.num_experts=8", "model.make.num_experts_per_tok=2",
        "model.make.moe_intermediate_size=512", "model.make.tie_word_embeddings=false", "model.dtype=bfloat16",
    ),
    "latent": (
        "model.make.model_type=deepseek_v3", "model.make.num_experts=8", "model.make.moe_intermediate_size=512",
        "model.make.intermediate_size=1024", "model.make.tie_word_embeddings=false", "model.dtype=bfloat16",
    ),
    "hybrid": ("model.make.model_type=qwen3_5_text", "model.make.intermediate_size=1024"),
    "windows": (
        "model.make.model_type=gemma3_text", "model.make.intermediate_size=1024", "rollout.kv_cache_gib=0.06",
    ),
}  # fmt: skip
_LORA = ("lora.rank=16",)
_CRITIC = ("algo.name=ppo", "critic={}")
_REFERENCE = ("algo.kl_coef=0.01",)
_NEVER, _ALWAYS = ("reshard.swap=never",), ("reshard.swap=always",)
_RECOMPUTE = ("train.activation_checkpointing=full",)


@dataclass(frozen=True)
class PlanCase:
    """A config and a number of ranks."""

    name: str
    num_ranks: int
    more: tuple[str, ...]

    @property
    def settings(self) -> tuple[str, ...]:
        return (*_BASE, *self.more)

    @property
    def states(self) -> tuple[str, ...]:
        """Worker states whose memory is compared."""
        return ("generation", "reference", "old_logprobs", "values", "critic_update", "update")


def _update(**degrees: int | str) -> tuple[str, ...]:
    return tuple(f"resources.update.{name}={degree}" for name, degree in degrees.items())


def _generation(**degrees: int) -> tuple[str, ...]:
    return tuple(f"resources.generation.{name}={degree}" for name, degree in degrees.items())


def _cases() -> list[PlanCase]:
    dense, moe, latent, hybrid, windows = _MODELS.values()
    listed: list[tuple[str, int, tuple[str, ...]]] = []
    for name, sizes in _MODELS.items():
        listed.append((f"{name}, swap", 1, sizes + _ALWAYS))
        listed.append((f"{name}, no swap", 1, sizes + _NEVER))
        listed.append((f"{name}, shard", 2, sizes + _NEVER + _update(data=1, shard=2)))
        listed.append((f"{name}, recomputed", 1, sizes + _NEVER + _RECOMPUTE))
    listed += [
        ("dense, reference", 1, dense + _NEVER + _REFERENCE),
        ("dense, reference, swap", 2, dense + _ALWAYS + _REFERENCE),
        ("dense, critic", 1, dense + _NEVER + _CRITIC),
        ("dense, critic, swap", 2, dense + _ALWAYS + _CRITIC),
        ("dense, critic, reference", 2, dense + _NEVER + _CRITIC + _REFERENCE),
        ("dense, adapters", 1, dense + _NEVER + _LORA),
        ("dense, adapters, swap", 2, dense + _ALWAYS + _LORA),
        ("dense, merged adapters", 1, dense + _NEVER + _LORA + ("lora.merge=true",)),
        ("moe, adapters", 1, moe + _NEVER + _LORA),
        ("dense, bfloat16", 1, dense + _NEVER + ("model.dtype=bfloat16",)),
        ("dense, bfloat16, shard", 2, dense + _NEVER + ("model.dtype=bfloat16",) + _update(data=1, shard=2)),
        ("dense, replicas", 2, dense + _NEVER + _update(data=2, shard=1)),
        ("dense, tensor", 2, dense + _NEVER + _update(tensor=2) + _generation(tensor=2)),
        ("dense, context", 2, dense + _NEVER + _update(context=2)),
        ("dense, pipeline", 2, dense + _NEVER + _update(pipeline=2)),
        ("dense, pipeline, gpipe", 2, dense + _NEVER + _update(pipeline=2, pipeline_schedule="gpipe")),
        ("moe, expert", 2, moe + _NEVER + _update(data=1, shard=2, expert=2) + _generation(expert=2)),
        ("latent, tensor", 2, latent + _NEVER + _update(tensor=2)),
        ("dense, rank sets", 2, dense + ("resources.ranks.generation=1",)),
        ("dense, shard 4", 4, dense + _ALWAYS + _update(data=1, shard=4)),
        ("dense, data 2 x tensor 2", 4, dense + _NEVER + _update(data=2, tensor=2)),
        ("dense, pipeline 2 x tensor 2", 4, dense + _NEVER + _update(pipeline=2, tensor=2)),
        ("moe, shard 2 x expert 4", 4, moe + _NEVER + _update(data=1, shard=4, expert=4)),
        ("dense, shard 8", 8, dense + _ALWAYS + _update(data=1, shard=8)),
    ]
    return [PlanCase(*one) for one in listed]


CASES = _cases()
