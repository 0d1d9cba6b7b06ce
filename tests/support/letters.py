"""A tokenizer of one token per letter, with a template that names the roles, in place of a model folder's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class LetterTokenizer:
    """Letters as tokens, token 1 before plain text, token 0 behind an answer."""

    folder = Path("letters")
    stop_token_ids = (0,)
    stop_tokens = ()

    def __init__(self, chat_template: str | None = "roles"):
        self.raw = self
        self.chat_template = chat_template
        self.highest_id = 1 << 20

    def get_chat_template(self, tools: Any = None) -> str:
        assert self.chat_template is not None
        return self.chat_template

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, **_: Any
    ) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>" * add_generation_prompt

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def begun(self, ids: list[int]) -> list[int]:
        return [1, *ids]

    def first_special(self, text: str) -> None:
        return None

    def unknown_token(self, token_id: int, vocab_size: int) -> str:
        return f"it has token {token_id} ({chr(token_id)!r}), but the model's vocabulary ends at {vocab_size - 1}"
