"""vLLM as a generation engine, inside this process: the one file that imports vllm.

Every rank runs an engine of its own under the same launcher (`external_launcher`), beside the process group that is
already there. The group is vLLM's too once an engine was made, and goes with it: keep the engine to the end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from spmdrl.engines.generation.protocol import Finish, Request, Response, RolloutConfig, SamplingParams
from spmdrl.engines.models.hf import parameter_shapes, read_config
from spmdrl.engines.models.stacked import unstack

# vLLM accepts neither more log-prob modes nor a mode per request: the whole engine has one of these two.
_FILTERED, _UNSCALED = "processed_logprobs", "raw_logprobs"


@dataclass
class _Row:
    """A row that vLLM works on, with what it gave so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class VllmEngine:
    """One vLLM engine on this rank's device, whole weights; a `GenerationEngine`."""

    wants_iterator: ClassVar[bool] = True

    def __init__(self, model_folder: Path, rollout: RolloutConfig, device: torch.device, dtype: torch.dtype):
        """Load the model from `model_folder`, then sleep."""
        self.version = 0
        self._config = read_config(model_folder)
        self._dtype = dtype
        # On CPU vLLM's sleep does nothing: memory_bytes then tells what stays.
        self._can_sleep = device.type != "cpu"
        self._logprobs_mode = logprobs_mode(rollout)
        self._rows: dict[int, _Row] = {}
        self._weights_awake = self._cache_awake = False
        # The engine core stays in this process. It must be set before the import, which is here as vllm is an extra.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm.sampling_params

        self._vllm = vllm
        arguments: dict[str, Any] = {
            "model": str(model_folder),
            "dtype": str(dtype).removeprefix("torch."),
            "distributed_executor_backend": "external_launcher",
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "max_num_seqs": rollout.max_running_rows,
            "enable_sleep_mode": self._can_sleep,
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "logprobs_mode": self._logprobs_mode,
        }
        self._llm = vllm.LLM(**(arguments | rollout.engine_kwargs))
        self._discard()

    @property
    def num_unfinished(self) -> int:
        return len(self._rows)

    def submit(self, requests: Sequence[Request]) -> None:
        self._require_awake()
        for request in requests:
            for row, seed in zip(request.rows, request.seeds, strict=True):
                if row in self._rows:
                    raise ValueError(f"row {row} is submitted twice; wait for its response or abort it first")
                prompt = self._vllm.TokensPrompt(prompt_token_ids=list(request.prompt_ids))
                # One request a row, because each has its own seed; the prefix cache shares the prompt.
                self._llm.llm_engine.add_request(str(row), prompt, self._sampling(request.sampling, seed))
                self._rows[row] = _Row(request)

    def step(self) -> list[Response]:
        self._require_awake()
        if not self._rows:
            return []
        responses = []
        for output in self._llm.llm_engine.step():
            row, completion = int(output.request_id), output.outputs[0]
            self._note(self._rows[row], completion)
            if output.finished:
                responses.append(self._response(row, completion.finish_reason))
        return responses

    def abort(self) -> list[Response]:
        if self._rows:
            self._llm.llm_engine.abort_request([str(row) for row in self._rows])
        return [self._response(row, "aborted") for row in list(self._rows)]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(self._config)

    def wake_weights(self) -> dict[str, Tensor]:
        if self._can_sleep and not self._weights_awake:
            self._llm.wake_up(tags=["weights"])
        self._weights_awake = True
        return {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": unstack(weights)})
        # Cached prefixes were computed with the old weights.
        self._llm.reset_prefix_cache()

    def wake_cache(self) -> None:
        if not self._weights_awake:
            raise RuntimeError("the KV cache can't wake before the weights, which take their memory first")
        if self._can_sleep and not self._cache_awake:
            self._llm.wake_up(tags=["kv_cache"])
        self._cache_awake = True

    def sleep(self) -> None:
        if self._rows:
            raise RuntimeError(f"{len(self._rows)} rows are unfinished; step until they end, or abort them first")
        if self._weights_awake:
            self._discard()

    def memory_bytes(self) -> dict[str, int]:
        """What the weights and the KV cache take by their sizes: vLLM doesn't tell them apart."""
        num_weights = sum(math.prod(shape) for shape in self.weight_shapes().values())
        cache = self._llm.llm_engine.vllm_config.cache_config
        head_sizes = self._config.head_size + self._config.value_head_size
        position_size = self._config.num_layers * self._config.num_kv_heads * head_sizes
        cache_size = (cache.num_gpu_blocks or 0) * cache.block_size * position_size
        return {
            "generation_weights": num_weights * self._dtype.itemsize * (self._weights_awake or not self._can_sleep),
            "kv_cache": cache_size * self._dtype.itemsize * (self._cache_awake or not self._can_sleep),
        }

    def _discard(self) -> None:
        """Drop weights and cache: the next step's weights replace them, so nothing is kept on the host (level 2)."""
        if self._can_sleep:
            self._llm.sleep(level=2)
        self._weights_awake = self._cache_awake = False

    def _require_awake(self) -> None:
        if not self._cache_awake:
            raise RuntimeError("a sleeping engine can't generate; call wake_weights, load_weights, then wake_cache")

    def _sampling(self, sampling: SamplingParams, seed: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            seed=seed,
            logprobs=0,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.CUMULATIVE,
        )

    def _note(self, row: _Row, completion: Any) -> None:
        """Take over the tokens that are new in a cumulative output."""
        new = slice(len(row.token_ids), len(completion.token_ids))
        exact = gives_unfiltered(self._logprobs_mode, row.request.sampling)
        for token, candidates in zip(completion.token_ids[new], completion.logprobs[new], strict=True):
            row.token_ids.append(token)
            # Better no number than one of another distribution.
            row.logprobs.append(candidates[token].logprob if exact else math.nan)
            row.versions.append(self.version)

    def _response(self, row: int, finish: Finish) -> Response:
        done = self._rows.pop(row)
        return Response(row, tuple(done.token_ids), tuple(done.logprobs), finish, tuple(done.versions))


def logprobs_mode(rollout: RolloutConfig) -> str:
    """vLLM's mode in which training rollouts get log-probs scaled by the temperature but not filtered.

    Raises ValueError for filters at a temperature other than 1: vLLM's modes scale and filter, or do neither.
    """
    sampling = rollout.sampling(())
    for mode in (_FILTERED, _UNSCALED):
        if gives_unfiltered(mode, sampling):
            return mode
    raise ValueError(
        f"rollout.temperature is {rollout.temperature} with rollout.top_p {rollout.top_p}, top_k {rollout.top_k}, "
        f"min_p {rollout.min_p}: vLLM can't tell log-probs that are scaled but not filtered; set the temperature to 1, "
        "turn the filters off, or set rollout.engine to native"
    )


def gives_unfiltered(mode: str, sampling: SamplingParams) -> bool:
    """Whether vLLM's log-probs in this mode are those of the distribution scaled by the temperature, not filtered."""
    if mode == _UNSCALED:
        return sampling.temperature in (0, 1)
    return sampling.temperature == 0 or (sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0)
