"""A model folder's tokenizer: text to token ids and back, and the tokens that end a response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What makes a model folder usable beside its weights; copied as it is.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


class ModelTokenizer:
    """Wraps the Hugging Face tokenizer of a model folder; `raw` is the tokenizer itself."""

    def __init__(self, folder: Path):
        # Imported here because it takes seconds, and only verbs that read text need it.
        from transformers import AutoTokenizer

        self.raw: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        self.stop_token_ids = stop_token_ids(folder, self.raw.eos_token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return self.raw.decode(list(token_ids), skip_special_tokens=True)

    def encode_completion(self, text: str) -> list[int]:
        """The tokens of a whole response, ended by the first stop token."""
        return [*self.raw(text, add_special_tokens=False)["input_ids"], *self.stop_token_ids[:1]]


def stop_token_ids(folder: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """The tokenizer's end token, then those that generation_config.json adds; chat models have several.

    Raises ValueError where there is none, since no response could end.
    """
    found = [] if eos_token_id is None else [eos_token_id]
    path = folder / "generation_config.json"
    if path.is_file():
        given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found += given if isinstance(given, list) else [] if given is None else [given]
    if not found:
        raise ValueError(
            f"{folder} names no end token, in neither tokenizer_config.json nor generation_config.json; "
            "add eos_token_id to generation_config.json"
        )
    return tuple(dict.fromkeys(found))
