"""The config of a step's rollouts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from spmdrl.engines.generation.protocol import SamplingParams


@dataclass(frozen=True)
class RolloutConfig:
    """The rollouts of one step, and the engine that makes them."""

    prompts_per_step: Annotated[int, Ge(1)] = 32
    """Prompts of a step; times num_generations it is the samples of a step."""
    num_generations: Annotated[int, Ge(1)] = 8
    """Responses a prompt."""
    partial_max_rounds: Annotated[int, Ge(1)] = 1
    """Steps over which responses may be generated: those that a step doesn't wait for go on in the next ones, and are
    finished in this many; 1 finishes all in their own step."""
    partial_extra_prompts: int | None = None
    """Prompts that a step works on beyond prompts_per_step where responses may take several steps, so that it needn't
    wait for the longest ones; null is half of prompts_per_step."""
    max_completion_length: Annotated[int, Ge(1)] = 256
    """Most tokens of a response, those of an environment included."""
    temperature: Annotated[float, Interval(ge=0, lt=math.inf)] = 1.0
    """Divides the logits before sampling; 0 takes the likeliest token."""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Least probability mass that the likeliest tokens kept must hold; 1 keeps all."""
    top_k: Annotated[int, Ge(0)] = 0
    """Number of likeliest tokens kept; 0 keeps all."""
    min_p: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Tokens less likely than this times the likeliest one are dropped."""
    ignore_eos: bool = False
    """Whether responses go on after an end token, all to max_completion_length; for measuring fixed work."""
    stop: tuple[str, ...] = ()
    """Texts that end a response with the token that completes one; the response keeps it."""
    engine: Literal["auto", "native", "vllm"] = "auto"
    """Which engine generates; auto is vLLM where it is installed and there is an accelerator, else the native one."""
    gpu_memory_utilization: Annotated[float, Interval(gt=0, le=1)] = 0.6
    """Share of an accelerator's memory in use once the KV cache is there, by whomever; the rest is for activations.
    On a CPU, the share of the host's free memory that the KV caches of its ranks may take."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed through to vLLM's constructor."""
    max_running_rows: Annotated[int, Ge(1)] = 256
    """Rows decoded at once on a rank."""
    max_prefill_tokens: Annotated[int, Ge(1)] = 8192
    """Prompt tokens that the native engine runs in one step, beside decoding; longer prompts take several steps."""
    block_size: Annotated[int, Ge(1)] = 32
    """Tokens in one KV block of the native engine."""
    pack_weights: bool = True
    """Whether the native engine, on a CPU, copies the weights of linear layers into a layout that is faster to read;
    it matters for memory where one process trains and generates in the same dtype, which then needs no other copy."""
    compile: bool = False
    """Whether the native engine compiles its decoding step (torch.compile), once a run: dense models, whole weights on
    each rank, a C++ compiler on a CPU. It takes half a minute or more, and pays most where models or batches are small;
    what a row samples may then depend on what decodes beside it, by rounding."""
    kv_cache_gib: Annotated[float, Gt(0)] | None = None
    """The native engine's KV cache; null: as gpu_memory_utilization says, on a CPU no more than max_running_rows need.
    Where the rows need more, some wait, and running ones may have to be computed again."""

    def __post_init__(self) -> None:
        self._check_partial()
        if not all(self.stop):
            raise ValueError("rollout.stop has an empty text, which every response would end with; drop it")
        if self.stop and self.ignore_eos:
            raise ValueError(f"rollout.stop is {list(self.stop)}, but rollout.ignore_eos lets nothing end; drop one")

    @property
    def extra_prompts(self) -> int:
        """Prompts that a step works on beyond those that it trains."""
        if self.partial_max_rounds == 1:
            return 0
        half = max(1, self.prompts_per_step // 2)
        return half if self.partial_extra_prompts is None else self.partial_extra_prompts

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """The sampling of training rollouts, with the tokenizer's end tokens."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_completion_length,
            stop_token_ids=() if self.ignore_eos else stop_token_ids,
            stop_strings=self.stop,
        )

    def _check_partial(self) -> None:
        extra = self.partial_extra_prompts
        if extra is not None and self.partial_max_rounds == 1:
            raise ValueError(
                f"rollout.partial_extra_prompts is {extra}, but rollout.partial_max_rounds is 1, so that every "
                "response is finished in its own step; raise partial_max_rounds, or leave partial_extra_prompts null"
            )
        if extra is not None and not 1 <= extra <= self.prompts_per_step:
            raise ValueError(
                f"rollout.partial_extra_prompts is {extra}, but must be between 1 and rollout.prompts_per_step = "
                f"{self.prompts_per_step}: a step couldn't train more that are in their last round"
            )
