"""vLLM's CPU build as an engine of the rollout bench.

Needs nothing of this package but `rollout_work` and `replies`, so that it runs in an environment of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.rollout.rollout_work import BenchEngine, Lengths, RolloutWork, serve


class Vllm(BenchEngine):
    """vLLM with its engine in this process, without log-probs."""

    def __init__(self, folder: Path, work: RolloutWork):
        # Imported here because only this engine has it.
        import vllm

        self._vllm = vllm
        self._work = work
        self._llm = vllm.LLM(
            model=str(folder),
            dtype="float32",
            max_num_seqs=work.rows_at_once,
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
        )

    def prepare(self) -> None:
        self._llm.reset_prefix_cache()

    def generate(self, lengths: Lengths, rows: Sequence[int], seed: int) -> list[int]:
        prompts = [self._vllm.TokensPrompt(prompt_token_ids=list(self._work.prompt(row))) for row in rows]
        # Without seeds, because a row with its own is sampled by itself.
        sampling = [
            self._vllm.SamplingParams(
                max_tokens=lengths.limits[row],
                stop_token_ids=list(lengths.stop_ids),
                ignore_eos=True,
                detokenize=False,
            )
            for row in rows
        ]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(Vllm, Path(sys.argv[1]))
