"""Settings of generation: a step's prompts, sampling, and the engine's resources."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Interval


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request's tokens: temperature first, then min-p, top-k and top-p."""

    temperature: float = 1.0
    """Divisor of the logits; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Probability mass of the likeliest tokens to keep; 1 keeps all."""
    top_k: int = 0
    """Number of likeliest tokens to keep; 0 keeps all."""
    min_p: float = 0.0
    """Threshold, relative to the likeliest token's probability, below which tokens are dropped."""
    max_tokens: int = 256
    """Largest number of tokens in a response, the stop token included."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response; they are part of it."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response with the token that completes one; it is part of it, with all of its text."""


@dataclass(frozen=True)
class RolloutConfig:
    """Rollouts of one step, and the engine that generates them."""

    # Constants of the native engine: prompt tokens per step beside decoding (longer prompts take several steps), tokens
    # per KV block, and, on CPUs, a copy of linear layers in a layout that is faster to read.
    max_prefill_tokens: ClassVar[int] = 8192
    block_size: ClassVar[int] = 32
    pack_weights: ClassVar[bool] = True

    prompts_per_step: Annotated[int, Ge(1)] = 32
    """prompts per step; a step's samples are this times num_generations"""
    num_generations: Annotated[int, Ge(1)] = 8
    """responses per prompt"""
    partial_max_rounds: Annotated[int, Ge(1)] = 1
    """largest number of steps that a response may take: a step ends without its longest responses, and later steps
    continue them; 1: every response ends in its own step"""
    partial_extra_prompts: int | None = None
    """prompts in progress beyond prompts_per_step if responses may take several steps, so that a step needn't wait for
    the longest; null: half of prompts_per_step"""
    lag: Annotated[int, Ge(0)] = 0
    """number of steps between the weights that generate a step's responses and those that it trains: while ranks train
    one step, those of resources.ranks.generation generate a later one; 0: a step's own weights generate"""
    swap_in_flight: Annotated[int, Ge(0)] = 0
    """number of engine steps of a batch after which its unfinished responses go on with weights that are a training
    step newer; training runs beside those steps, and with a lag of 1 waits for the rest; 0: weights don't change"""
    max_completion_length: Annotated[int, Ge(1)] = 256
    """largest number of tokens in a response, an environment's included"""
    temperature: Annotated[float, Interval(ge=0, lt=math.inf)] = 1.0
    """divisor of the logits before sampling; 0: the likeliest token"""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """probability mass of the likeliest tokens to keep; 1: keep all. Training uses log-probs of the distribution before
    top_p, top_k and min_p"""
    top_k: Annotated[int, Ge(0)] = 0
    """number of likeliest tokens to keep; 0: keep all"""
    min_p: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """threshold, relative to the likeliest token's probability, below which tokens are dropped; 0: drop none"""
    ignore_eos: bool = False
    """continue responses after an end token, up to max_completion_length; for benchmarks with a fixed amount of work"""
    stop: tuple[str, ...] = ()
    """texts that end a response; the response keeps the token that completes one"""
    engine: Literal["auto", "native", "vllm"] = "auto"
    """engine that generates; auto: vllm if it is installed and there is an accelerator, else native"""
    gpu_memory_utilization: Annotated[float, Interval(gt=0, le=1)] = 0.6
    """share of an accelerator's memory that may be in use, by all processes, once the KV cache is allocated; the rest
    is for activations. On a CPU, the share of the host's free memory that the KV caches of its ranks may take"""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """extra arguments of vLLM's constructor"""
    max_running_rows: Annotated[int, Ge(1)] = 256
    """number of rows decoded at once on a rank"""
    cuda_graphs: bool | None = None
    """capture decoding steps as CUDA graphs, and start each before the host has read the previous one's tokens; null:
    if possible. true is refused otherwise: the native engine needs CUDA, a dense model and whole weights on each rank.
    With vLLM, false means enforce_eager"""
    kv_cache_gib: Annotated[float, Gt(0)] | None = None
    """size of the engine's KV cache in GiB; null: by gpu_memory_utilization, on a CPU at most what
    max_running_rows need. Rows beyond it wait, and running ones may be recomputed"""

    def __post_init__(self) -> None:
        self._check_partial()
        if not all(self.stop):
            raise ValueError("rollout.stop has an empty text, which would end every response; remove it")
        if self.stop and self.ignore_eos:
            raise ValueError(f"rollout.stop is {list(self.stop)}, but rollout.ignore_eos is true; remove one of them")

    @property
    def extra_prompts(self) -> int:
        """Prompts in progress beyond those that a step trains."""
        if self.partial_max_rounds == 1:
            return 0
        half = max(1, self.prompts_per_step // 2)
        return half if self.partial_extra_prompts is None else self.partial_extra_prompts

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Return the sampling parameters of training rollouts, with the tokenizer's end tokens."""
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
                f"{self.prompts_per_step}: a step couldn't train more prompts in their last round"
            )
