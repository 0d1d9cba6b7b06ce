"""Which of vLLM's log-probs are those of the distribution scaled by the temperature, not filtered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams

# vLLM accepts neither more log-prob modes nor a mode per request: the whole engine has one of these two.
_FILTERED, _UNSCALED = "processed_logprobs", "raw_logprobs"


def logprobs_mode(rollout: RolloutConfig, *, bars_ids: bool = False) -> str:
    """vLLM's mode in which training rollouts get log-probs scaled by the temperature but not filtered.

    Where ids are barred, it is the one that counts them in, if the temperature admits it: their share is tiny.
    Raises ValueError for filters at a temperature other than 1: vLLM's modes scale and filter, or do neither.
    """
    sampling = rollout.sampling(())
    for mode in (_UNSCALED, _FILTERED) if bars_ids else (_FILTERED, _UNSCALED):
        if gives_unfiltered(mode, sampling):
            return mode
    raise ValueError(
        f"rollout.temperature is {rollout.temperature} with rollout.top_p {rollout.top_p}, top_k {rollout.top_k}, "
        f"min_p {rollout.min_p}: vLLM has no log-probs that are scaled but not filtered; set the temperature to 1, "
        "turn the filters off, or set rollout.engine to native"
    )


def gives_unfiltered(mode: str, sampling: SamplingParams) -> bool:
    """Whether vLLM's log-probs in this mode are those of the distribution scaled by the temperature, not filtered."""
    if mode == _UNSCALED:
        return sampling.temperature in (0, 1)
    return sampling.temperature == 0 or (sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0)


def logprobs_of_prompt(token_ids: Sequence[int], candidates: Sequence[Mapping[int, Any] | None]) -> Tensor:
    """The log-probs of a prompt's tokens but the first, which vLLM returns beside other candidates', by position."""
    logprobs = [by_token[token].logprob for token, by_token in zip(token_ids, candidates, strict=True) if by_token]
    assert len(logprobs) == len(token_ids) - 1, f"vLLM rated {len(logprobs)} tokens of a prompt of {len(token_ids)}"
    return torch.tensor(logprobs, dtype=torch.float32)
