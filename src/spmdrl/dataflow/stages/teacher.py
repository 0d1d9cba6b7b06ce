"""A teacher: which model it is, and the prompts that it sees in place of the policy's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.engines.models.renderer import Renderer, TokenizedPrompts
from spmdrl.nouns.batch import Batch, gather_ragged_rows


@dataclass(frozen=True)
class TeachersPrompts:
    """Renders a column of the data as prompts are, by `data.chat_template`."""

    column: str
    renderer: Renderer

    def check(self, prompts: Sequence[Prompt], *, most_tokens: int, vocab_size: int) -> None:
        """Raise ValueError unless each row has a prompt in the column, of at most so many tokens of the vocabulary."""
        for prompt in prompts:
            found = prompt.columns.get(self.column)
            if not isinstance(found, (str, list)) or not found:
                raise ValueError(
                    f"teacher.prompt_column is {self.column}, but row {prompt.id} of data.train has {found!r} there, "
                    f"which is no prompt; its columns are {', '.join(sorted(prompt.columns)) or 'none'}"
                )
        tokenized = self._tokenized(prompts)
        for place, problem in tokenized.problems.items():
            raise ValueError(f"teacher.prompt_column is {self.column}, but of row {prompts[place].id}: {problem}")
        highest = int(tokenized.ids.max(initial=0))
        if highest >= vocab_size:
            problem = self.renderer.tokenizer.unknown_token(highest, vocab_size)
            raise ValueError(f"teacher.prompt_column is {self.column}, but of a row of it: {problem}")
        for place, prompt in enumerate(prompts):
            if not 1 <= (length := tokenized.length(place)) <= most_tokens:
                raise ValueError(
                    f"teacher.prompt_column is {self.column}, whose prompt of row {prompt.id} has {length} tokens, but "
                    f"beside rollout.max_completion_length the teacher has positions for 1 to {most_tokens}; shorten "
                    "the prompt, or lower rollout.max_completion_length"
                )

    def in_place(self, batch: Batch, samples: Samples) -> Batch:
        """The rows with the teacher's prompts in place of the policy's."""
        groups, place_B = (batch.rows // samples.group_size).unique(return_inverse=True)
        tokenized = self._tokenized([samples.rows.prompts[group] for group in groups.tolist()])
        ids, offsets = torch.from_numpy(tokenized.ids), torch.from_numpy(tokenized.offsets)
        seen = batch.select(range(len(batch)))
        seen.put_ragged("prompt_ids", *gather_ragged_rows(ids, offsets, place_B))
        return seen

    def _tokenized(self, prompts: Sequence[Prompt]) -> TokenizedPrompts:
        columns = [prompt.columns for prompt in prompts]
        return self.renderer.prompts([of_row[self.column] for of_row in columns], columns)
