"""Answers to learn from a row: one answer, every answer of a conversation, or a pair of responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spmdrl.dataflow.data.formats import Flaw
from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.engines.models.renderer import Answer, MarkedTokens, Renderer
from spmdrl.nouns.settings.data_config import RowNotRendered

# Tokens that a template may add around an answer.
_MOST_AROUND = 256


@dataclass(frozen=True)
class LearntRows:
    """Rows as a model learns them."""

    renderer: Renderer
    turns: Literal["last", "all"] = "last"

    def of(self, prompt: Prompt) -> list[MarkedTokens]:
        """Return the row's tokens with its answer, or with either one of a pair. Raises ValueError, naming the row."""
        try:
            return self._of(prompt)
        except RowNotRendered as problem:
            raise RowNotRendered(f"row {prompt.id} can't be learnt: {problem}") from None

    def _of(self, prompt: Prompt) -> list[MarkedTokens]:
        answers, messages = answers_of(prompt), prompt.original
        if self.turns == "last" or isinstance(messages, str) or not self.renderer.uses_template(messages):
            return [self.renderer.answer(messages, answer, prompt.columns) for answer in answers]
        (answer,), before = answers, list(messages)
        if isinstance(answer, str):
            # A text continues the assistant's message that ends the prompt.
            begun = before.pop().get("content") or "" if before[-1]["role"] == "assistant" else ""
            answer = {"role": "assistant", "content": begun + answer}
        return [self.renderer.conversation([*before, answer], prompt.columns)]

    def check(self, vocab_size: int, max_positions: int, rule: str = "") -> Callable[[Prompt], None]:
        """Return a function that raises Flaw for a row that such a model can't learn; `rule` sets the positions."""
        # Other tokenizers have no such token, and tokenizing all answers of a large file takes minutes.
        may_be_foreign = self.renderer.tokenizer.highest_id >= vocab_size
        is_first = True

        def check_row(prompt: Prompt) -> None:
            nonlocal is_first
            # A token has at least one byte, so few answers must be rendered.
            sizes = [len(str(answer).encode()) for answer in answers_of(prompt)]
            is_short = len(prompt.prompt_ids) + 2 * max(sizes) + _MOST_AROUND <= max_positions
            if is_short and not (is_first or may_be_foreign or self.turns == "all"):
                return
            is_first = False
            try:
                rows = self._of(prompt)
            except RowNotRendered as problem:
                raise Flaw("not_rendered", f"it can't be learnt: {problem}") from None
            if (length := max(len(row.ids) for row in rows)) > max_positions:
                limit = f"{max_positions} positions{rule}"
                raise Flaw("row_too_long", f"it has {length} tokens, but the model has {limit}")
            if (highest := max(max(row.ids) for row in rows)) >= vocab_size:
                problem_of_token = self.renderer.tokenizer.unknown_token(highest, vocab_size)
                raise Flaw("unknown_token", f"its answer can't be learnt: {problem_of_token}")

        return check_row


def answers_of(prompt: Prompt) -> tuple[Answer, ...]:
    """Answer to learn of a row: its completion or answer; of a pair, the preferred response and the other one."""
    answer = prompt.answer if prompt.completion is None else prompt.completion
    assert answer is not None, f"row {prompt.id} has no answer, which reading it should have refused"
    return (answer,) if prompt.rejected is None else (answer, prompt.rejected)
