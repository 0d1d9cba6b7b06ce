"""The engines of the rollout bench that run in this environment: the native one, and transformers' `generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.engines.models.kernels import ops
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from tests.bench.rollout.rollout_work import BenchEngine, Lengths, RolloutWork, counted, serve

_CPU = torch.device("cpu")
_MATMUL_REPEATS = 5
_FEWEST_ROWS = 4


class Native(BenchEngine):
    """The native engine, and what its matrix products alone would take."""

    def __init__(self, folder: Path, work: RolloutWork):
        self._work = work
        config = read_config(folder)
        rollout = RolloutConfig(max_running_rows=work.rows_at_once)
        self._engine = NativeEngine(config, rollout, _CPU, torch.float32)
        files = open_weights(folder, config)
        self._engine.load_weights((name, files.read(whole_slice(name, files.shape(name)))) for name in files.names)
        self._engine.wake_cache()
        self._is_sparse = config.moe is not None
        self._num_steps = self._num_fed = 0

    def generate(self, lengths: Lengths, rows: Sequence[int], seed: int) -> list[int]:
        requests = []
        # Rows of one group that may be as long are one request.
        for (prompt, limit), members in groupby(rows, key=lambda row: (self._work.prompt(row), lengths.limits[row])):
            taken = tuple(members)
            sampling = SamplingParams(max_tokens=limit, stop_token_ids=lengths.stop_ids)
            requests.append(Request(taken, prompt, tuple(seed * len(rows) + row for row in taken), sampling))
        self._engine.submit(requests)
        self._num_steps, tokens_of = 0, {}
        while self._engine.num_unfinished:
            for response in self._engine.step():
                tokens_of[response.row] = response.token_ids
            self._num_steps += 1
        self._num_fed = sum(map(len, tokens_of.values())) + sum(len(request.prompt_ids) for request in requests)
        return [len(tokens_of[row]) for row in rows]

    def extra(self) -> dict[str, float]:
        """Steps and, of a dense model, `_product_seconds`: tokens choose the products of a sparse one."""
        found: dict[str, float] = {"steps": self._num_steps}
        if not self._is_sparse:
            found["matmul_seconds"] = self._product_seconds(self._num_fed)
        return found

    def _product_seconds(self, num_fed: int) -> float:
        """Seconds that products of the model's weights alone take, at as many rows as the steps had."""
        weights = [weight for weight in self._engine.wake_weights().values() if weight.ndim == 2]
        few, many = _FEWEST_ROWS, max(self._work.rows_at_once, 2 * _FEWEST_ROWS)
        few_seconds, many_seconds = _matmul_seconds(weights, few), _matmul_seconds(weights, many)
        # A product's time grows with its rows from a time that it takes anyway, so that their sum is enough.
        a_row = (many_seconds - few_seconds) / (many - few)
        a_step = max(0.0, few_seconds - few * a_row)
        return self._num_steps * a_step + num_fed * a_row


def _matmul_seconds(weights: Sequence[Tensor], num_rows: int) -> float:
    """CPU seconds of one product with each weight in turn, in the layout for it, the best of several."""
    inputs = {weight.shape[1]: torch.randn(num_rows, weight.shape[1]) for weight in weights}
    best = float("inf")
    with torch.inference_mode():
        products = [ops.blocked_linear(weight, None) or partial(F.linear, weight=weight) for weight in weights]
        for _ in range(_MATMUL_REPEATS):
            start = time.process_time()
            for weight, product in zip(weights, products, strict=True):
                product(inputs[weight.shape[1]])
            best = min(best, time.process_time() - start)
    return best


class Generate(BenchEngine):
    """transformers' `generate`, as many rows a call as the others have at once, padded on the left."""

    def __init__(self, folder: Path, work: RolloutWork):
        self._work = work
        self._model = _load(folder)

    def generate(self, lengths: Lengths, rows: Sequence[int], seed: int) -> list[int]:
        torch.manual_seed(seed)
        at_once = self._work.rows_at_once
        batches = [rows[start : start + at_once] for start in range(0, len(rows), at_once)]
        return [length for batch in batches for length in self._batch(lengths, batch)]

    def _batch(self, lengths: Lengths, rows: Sequence[int]) -> list[int]:
        prompts = [torch.tensor(self._work.prompt(row)) for row in rows]
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
        prompt_lengths = torch.tensor([[len(prompt)] for prompt in prompts])
        width = tokens.shape[1]
        limits_B = torch.tensor([lengths.limits[row] for row in rows])
        generated = self._model.generate(
            tokens,
            attention_mask=(torch.arange(width) >= width - prompt_lengths).long(),
            max_new_tokens=int(limits_B.max()),
            do_sample=True,
            top_k=0,
            eos_token_id=list(lengths.stop_ids) or None,
            pad_token_id=0,
            stopping_criteria=[lambda tokens, _: limits_B <= tokens.shape[1] - width],
        )
        stop_ids = frozenset(lengths.stop_ids)
        responses = generated[:, width:].tolist()
        return [counted(tokens, lengths.limits[row], stop_ids) for row, tokens in zip(rows, responses, strict=True)]


def _load(folder: Path) -> Any:
    # Imported here because it takes seconds.
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


ENGINES = {
    "native": Native,
    "generate": Generate,
}

if __name__ == "__main__":
    name, folder = sys.argv[1:]
    torch.set_num_threads(RolloutWork.load(Path(folder)).threads)
    serve(ENGINES[name], Path(folder))
