"""From pairs of data rows to packed token rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from spmdrl.algorithms.terms.pairs import PAIR
from spmdrl.dataflow.data.prompts import Prompt, foreign_token
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.engines.training.batching.packed_rows import TokenRows
from spmdrl.types import offsets_of

SIGN = "sign"
"""1 at tokens of preferred responses, -1 at those of the others"""


def pair_rows(prompts: Sequence[Prompt], tokenizer: ModelTokenizer) -> TokenRows:
    """Each prompt with its preferred response, then with the other one; both end with the stop token."""
    responses = [tokenizer.encode_completion(text) for prompt in prompts for text in responses_of(prompt)]
    given = [prompt.prompt_ids for prompt in prompts for _ in range(PAIR)]
    runs = [[*prompt, *response] for prompt, response in zip(given, responses, strict=True)]
    signs_B = torch.tensor([1.0, -1.0] * len(prompts))
    return TokenRows(
        tokens_T=torch.tensor([token for run in runs for token in run], dtype=torch.int64),
        offsets=offsets_of([len(run) for run in runs]),
        prompt_lengths_B=torch.tensor([len(prompt) for prompt in given], dtype=torch.int64),
        response={SIGN: signs_B.repeat_interleave(torch.tensor([len(response) for response in responses]).long())},
        unit_size=PAIR,
    )


def responses_of(prompt: Prompt) -> tuple[str, str]:
    """The preferred response and the other one."""
    assert prompt.completion is not None and prompt.rejected is not None, f"row {prompt.id} was read as a pair"
    return prompt.completion, prompt.rejected


def check_pairs(prompts: Iterable[Prompt], tokenizer: ModelTokenizer, decoder: DecoderConfig) -> None:
    """Refuse responses that the model can't read. Raises ValueError that names the row."""
    may_be_foreign = max(tokenizer.raw.get_vocab().values()) >= decoder.vocab_size
    for prompt in prompts:
        for text in responses_of(prompt):
            # A token spells a byte at least, so few texts have to be encoded, which takes minutes for all of a large
            # file. Two more are for what begins and ends a text.
            if may_be_foreign or len(prompt.prompt_ids) + len(text.encode()) + 2 > decoder.max_positions:
                _check_response(prompt, tokenizer.encode_completion(text), tokenizer, decoder)


def _check_response(prompt: Prompt, response: Sequence[int], tokenizer: ModelTokenizer, decoder: DecoderConfig) -> None:
    length = len(prompt.prompt_ids) + len(response)
    if length > decoder.max_positions:
        raise ValueError(
            f"row {prompt.id} has {length} tokens with a response, but the model has {decoder.max_positions} "
            "positions; shorten the row, or leave it out"
        )
    if max(response) >= decoder.vocab_size:
        problem = foreign_token(max(response), tokenizer.raw, decoder.vocab_size)
        raise ValueError(f"a response of row {prompt.id} can't be learnt: {problem}")
