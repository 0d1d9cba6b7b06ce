"""A teacher's prompts stand before the responses in place of the policy's, each before those to its own prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.support.letters import LetterTokenizer

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.inference import TeachersPrompts
from spmdrl.engines.models.renderer import Renderer
from spmdrl.nouns.batch import Batch


@dataclass
class Step:
    prompts: list[Prompt]
    group_size: int = 2

    @property
    def rows(self):
        return self


def test_each_row_gets_the_prompt_of_its_group_and_keeps_its_response():
    prompts = [Prompt(str(at), [1], "", None, {"hint": hint}, "") for at, hint in enumerate(["ab", "c", "defg"])]
    batch = Batch.of_rows([5, 0, 2, 4])
    batch.put_lists("prompt_ids", [[1], [2, 2], [3], [4]], torch.int32)
    batch.put_lists("response_ids", [[7, 8], [9], [10, 11, 12], [13]], torch.int32)
    seen = TeachersPrompts("hint", Renderer(LetterTokenizer())).in_place(batch, Step(prompts))
    texts = ["".join(map(chr, map(int, ids))) for ids in seen.to_lists("prompt_ids")]
    assert texts == ["\1defg", "\1ab", "\1c", "\1defg"] and seen.values("prompt_ids").dtype == torch.int32
    assert seen.to_lists("response_ids") == batch.to_lists("response_ids")
    assert batch.to_lists("prompt_ids") == [[1], [2, 2], [3], [4]], "the step's rows stay as they are"
