"""A model folder's tokenizer: text to token ids and back, and the tokens that end a response."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

# Files that make a folder usable beside its weights; copied unchanged.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


# Texts that a tokenizer reads as separate tokens in front of most others.
_ANCHORS = ("=", "\n")


@dataclass(frozen=True)
class StopToken:
    """A token that ends a response, or could."""

    token_id: int
    text: str

    def __str__(self) -> str:
        return f"{self.text!r} ({self.token_id})"


class ModelTokenizer:
    """Hugging Face tokenizer of a model folder, wrapped; `raw` is the tokenizer itself."""

    def __init__(self, folder: Path, *, skips_special: bool = False):
        """With `skips_special`, texts of responses have no special tokens."""
        # Imported here because it takes seconds, and only verbs that read text need it.
        from transformers import AutoTokenizer

        self.folder = folder
        try:
            self.raw: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:
            # Libraries omit the file's name, and often the folder.
            reason = f"{type(error).__name__}: {error!s:.300}"
            raise ValueError(f"the tokenizer of {folder} can't be loaded ({reason}); get its files again") from error
        self.stop_token_ids = stop_token_ids(folder, self.raw.eos_token_id)
        self._skips = skips_special
        self._anchor: list[int] = []
        self._adds_space = False
        # Some tokenizers raise for a letter that they lack.
        with suppress(Exception):
            self._anchor = self.encode(_ANCHORS[0])
            self._adds_space = self._text([*self._anchor, *self.encode("a")]) != f"{_ANCHORS[0]}a"

    def with_template(self, template: str) -> ModelTokenizer:
        """Return the same tokenizer with another chat template."""
        twin = copy(self)
        twin.raw = copy(self.raw)
        twin.raw.chat_template = template
        twin.__dict__.pop("_marks", None)
        return twin

    @property
    def stop_tokens(self) -> tuple[StopToken, ...]:
        """Tokens that end a response, with their texts."""
        return tuple(self._stop_token(token_id) for token_id in self.stop_token_ids)

    @cached_property
    def tokens_before_text(self) -> list[int]:
        """Tokens that the tokenizer puts before plain text, such as its begin token."""
        for probe in ("a", "1", "?", "="):
            bare, whole = self.encode(probe), self.raw(probe)["input_ids"]
            places = [place for place in range(len(whole)) if bare and whole[place : place + len(bare)] == bare]
            if places:
                return whole[: places[0]]
        return []

    @property
    def highest_id(self) -> int:
        """Highest token id that a text may have."""
        return max(self.raw.get_vocab().values())

    def begun(self, ids: list[int]) -> list[int]:
        """Return a plain text's tokens after the beginning ones, added if missing; without those that end a text."""
        before = self.tokens_before_text
        return ids if ids[: len(before)] == before else [*before, *ids]

    def first_special(self, text: str) -> StopToken | None:
        """Return the first added token in a text; None without one."""
        return next((self._stop_token(one) for one in self.encode(text) if one in self.raw.added_tokens_decoder), None)

    def unknown_token(self, token_id: int, vocab_size: int) -> str:
        """Describe the problem of a row that has a token without an embedding."""
        return (
            f"it has token {token_id} ({self.raw.decode([token_id])!r}), but the model's vocabulary ends at "
            f"{vocab_size - 1}; use the tokenizer that the model was trained with"
        )

    def check_same_tokens(self, other: ModelTokenizer) -> None:
        """Raise ValueError unless every token id has the same text, or special token, in the other tokenizer."""
        padding = {self.raw.pad_token_id, other.raw.pad_token_id}
        own, others = self._tokens(padding), other._tokens(padding)
        differing = sorted(key for key in own.keys() | others.keys() if own.get(key) != others.get(key))
        if differing:
            examples = "; ".join(
                f"{key} is {own.get(key, 'missing')} here and {others.get(key, 'missing')} there"
                for key in differing[:3]
            )
            raise ValueError(
                f"{other.folder} has another tokenizer than {self.folder}: they differ in {len(differing)} token ids "
                f"({examples}); the same ids would be other texts: give a model with the same tokens"
            )

    def _tokens(self, padding: set[int | None]) -> dict[int, str]:
        """Return the text of each token id, special ones marked except padding, which each tokenizer may choose."""
        tokens = {token_id: repr(text) for text, token_id in self.raw.get_vocab().items()}
        special = {key: f"special {token.content!r}" for key, token in self.raw.added_tokens_decoder.items()
                   if token.special and key not in padding}  # fmt: skip
        return tokens | special

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a response as it follows its prompt.

        Omits padding, special stop tokens and, if skipped, all special ones.
        """
        ids = [token_id for token_id in token_ids if token_id not in self._silent]
        return self.decode_all(ids, skips=self._skips)

    def decode_all(self, token_ids: Sequence[int], *, skips: bool = False) -> str:
        """Return the text of tokens in mid-text, special ones included unless `skips`; nothing is cleaned up."""
        # Decoders like SentencePiece's drop a space at the beginning.
        head, text = (self._text([*self._anchor, *ids], skips=skips) for ids in ((), token_ids))
        return text[len(head) :] if text.startswith(head) else self._text(list(token_ids), skips=skips)

    def _text(self, token_ids: list[int], *, skips: bool = False) -> str:
        return self.raw.decode(token_ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that begin or end one; special tokens are recognised."""
        return self.raw(text, add_special_tokens=False)["input_ids"]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Encode many texts at once."""
        return self.raw(texts, add_special_tokens=False)["input_ids"]

    @cached_property
    def _silent(self) -> set[int | None]:
        """Tokens omitted from the texts of responses."""
        return {self.raw.pad_token_id, *(self.raw.added_tokens_decoder.keys() & {*self.stop_token_ids})}

    def encode_foreign(self, text: str, before: str = "", after: str = "") -> list[int]:
        """Return tokens of a text in mid-text; special tokens and others of the chat template aren't recognised.

        In the texts `before` and `after` it, they are recognised.
        """
        parts = (before, *self.without_marks(text), after)
        return [token_id for part in parts if part for token_id in self.encode_behind(part)]

    def without_marks(self, text: str) -> list[str]:
        """Return a text in parts, none of which has a special token or another one of the chat template."""
        # Cut after its first letter, a mark is no token.
        cuts = [found.start() + 1 for found in self._marks.finditer(text)]
        return [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """Pattern of the beginnings of tokens that `encode_foreign` excludes; they may overlap."""
        added, template = self.raw.added_tokens_decoder.values(), str(self.raw.chat_template)
        marks = [one.content for one in added if one.content.strip() and (one.special or one.content in template)]
        return re.compile(f"(?={'|'.join(map(re.escape, marks)) or '(?!)'})")

    def encode_behind(self, text: str) -> list[int]:
        """Return the tokens of a text in mid-text: no space is put before it."""
        for anchor in _ANCHORS if self._adds_space else ():
            head, both = self.encode(anchor), self.encode(anchor + text)
            if both[: len(head)] == head:
                return both[len(head) :]
        return self.encode(text)

    def ids_without_token(self, vocab_size: int) -> tuple[int, ...]:
        """Return the ids of a model's vocabulary without tokens: padding of its embedding, and holes."""
        taken = {*self.raw.get_vocab().values(), *self.stop_token_ids}
        return tuple(token_id for token_id in range(vocab_size) if token_id not in taken)

    def _stop_token(self, token_id: int) -> StopToken:
        return StopToken(token_id, self.raw.decode([token_id]))


def pad_apart(folder: Path, vocab_size: int) -> int:
    """Set a folder's padding to a token below `vocab_size` that no conversation has; returns its id.

    transformers' classifiers score the last token that isn't padding: with a stop token as padding they score the one
    before it, and train no embedding of it.
    """
    tokenizer = ModelTokenizer(folder)
    raw, template = tokenizer.raw, str(tokenizer.raw.chat_template)
    used = {*tokenizer.stop_token_ids, raw.bos_token_id, raw.unk_token_id}
    if raw.pad_token_id is not None and raw.pad_token_id not in used:
        return raw.pad_token_id
    special = {key: token.content for key, token in raw.added_tokens_decoder.items() if token.special}
    plain = {key: text for text, key in raw.get_vocab().items() if key not in raw.added_tokens_decoder}
    unwritten = [key for key, text in sorted(special.items()) if text not in template]
    # UTF-8 text has no byte 255, and the last token of a vocabulary is its rarest.
    rarest = sorted(plain, key=lambda key: (plain[key] in ("<0xFF>", "ÿ"), key), reverse=True)
    candidates = (*sorted(unwritten, key=lambda key: "pad" not in special[key]), *rarest)
    pad = next(key for key in candidates if key < vocab_size and key not in used)
    for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8")) | {"pad_token": raw.convert_ids_to_tokens(pad)}
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return pad


def stop_token_ids(folder: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """Return the tokenizer's end token, then those of generation_config.json or, without any there, of config.json.

    Chat models have several. Raises ValueError if there is none, since no response could end.
    """
    found = [] if eos_token_id is None else [eos_token_id]
    for name in ("generation_config.json", "config.json"):
        if named := _end_tokens(folder / name):
            found += named
            break
    if not found:
        raise ValueError(
            f"{folder} names no end token, in none of tokenizer_config.json, generation_config.json and config.json; "
            "add eos_token_id to generation_config.json"
        )
    return tuple(dict.fromkeys(found))


def _end_tokens(path: Path) -> list[int]:
    """Return `eos_token_id` of a JSON file, which is one id or a list; none if the file or the entry is missing."""
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch it again") from None
    given = content.get("eos_token_id") if isinstance(content, dict) else None
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ValueError(f"{path}: eos_token_id is {given!r}, but must be a token id or a list of them")
    return ids
