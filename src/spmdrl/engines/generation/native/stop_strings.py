"""Texts that end a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""The text of tokens."""

# Room for tokens that say nothing, and for text that differs where it is cut off.
_SPARE_TOKENS = 8


def completes_stop_string(token_ids: Sequence[int], stop_strings: Sequence[str], decode: Decode) -> bool:
    """Whether one of the strings is in the text, given that none was before the last token."""
    # A token may say no more than one byte of a character.
    num_tokens = max(len(text.encode()) for text in stop_strings) + _SPARE_TOKENS
    text = decode(token_ids[-num_tokens:])
    return any(string in text for string in stop_strings)
