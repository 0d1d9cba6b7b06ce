"""Tokenizers of the kinds that models have, tiny: each function makes one with the added tokens that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

Added = Sequence[str | AddedToken]
"""special tokens as text, others as they are"""

_TEXTS = [
    "What is 12 + 30? The answer is 42.", "user assistant system tool model You are a helpful assistant.",
    "0123456789 +-*/=()[]{}<>|:;,.!?'\"\\_#@&%$^~`",
    "Solve the problem step by step. It isn't hard, they said , is n't it ?",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}', "the quick brown fox jumps over the lazy dog THE QUICK BROWN FOX",
]  # fmt: skip
_CHARACTERS = [chr(code) for code in range(33, 127)]
_GPT2_SPLIT = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _with(tokens: Tokenizer, added: Added) -> Tokenizer:
    for one in added:
        if isinstance(one, str):
            tokens.add_special_tokens([one])
        else:
            tokens.add_tokens([one])
    return tokens


def byte_level(added: Added, *, prefix_space: bool = False, split: Regex | None = None) -> Tokenizer:
    """Byte-level BPE, split by GPT-2's rule unless another is given."""
    tokens = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=split is None)
    tokens.pre_tokenizer = (
        bytes_ if split is None else pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"), bytes_])
    )
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokens.train_from_iterator(_TEXTS * 4, trainer)
    return _with(tokens, added)


def byte_level_nfc(added: Added) -> Tokenizer:
    """As Qwen's and Llama 3's: split by GPT-4's rule, composed by NFC."""
    tokens = byte_level(added, split=_GPT2_SPLIT)
    tokens.normalizer = normalizers.NFC()
    return tokens


def byte_fallback(added: Added, *, scheme: str | None = None, prepends: bool = True) -> Tokenizer:
    """`scheme` is Metaspace's way of a first space; without, normalizers do it, as in Llama 2 and Gemma."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *_CHARACTERS]
    words = sorted({f"▁{word}" for text in _TEXTS for word in text.split() if word.isalpha()})
    merges: list[tuple[str, str]] = []
    for word in words:
        for stop in range(1, len(word)):
            merge = (word[:stop], word[stop])
            pieces.append("".join(merge))
            merges.append(merge)
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = list(dict.fromkeys(merges))
    tokens = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme is not None:
        tokens.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    else:
        spaces = normalizers.Replace(" ", "▁")
        tokens.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prepends else spaces
    if scheme in ("first", "always") or (scheme is None and prepends):
        steps.append(decoders.Strip(" ", 1, 0))
    tokens.decoder = decoders.Sequence(steps)
    tokens.add_special_tokens(["<unk>"])
    return _with(tokens, added)


def unigram(added: Added) -> Tokenizer:
    """As T5's, with bytes for what isn't in the vocabulary."""
    words = {f"▁{word}" for text in _TEXTS for word in text.split()}
    pieces = [
        ("<unk>", 0.0),
        ("▁", -4.0),
        *((letter, -6.0) for letter in _CHARACTERS),
        *((word, -5.0) for word in sorted(words - {"▁"})),
    ]
    pieces += [(f"<0x{byte:02X}>", -12.0) for byte in range(256)]
    tokens = Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=0, byte_fallback=True))
    tokens.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokens.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always"), decoders.Fuse()]
    )
    tokens.add_special_tokens(["<unk>"])
    return _with(tokens, added)


def wordpiece(added: Added) -> Tokenizer:
    """As BERT's, in lower case."""
    letters = sorted({letter.lower() for letter in _CHARACTERS})
    words = sorted({word.lower() for text in _TEXTS for word in text.split() if word.isalpha()})
    pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), *words]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokens = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokens.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokens.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokens.decoder = decoders.WordPiece(cleanup=False)
    return _with(tokens, ["[UNK]", *added])


def whole_words(added: Added) -> Tokenizer:
    """A token per word; others are unknown."""
    words = dict.fromkeys(word for text in _TEXTS for word in text.split())
    tokens = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]")
    )
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _with(tokens, ["[UNK]", *added])


def letters(added: Added) -> Tokenizer:
    """A token per character of ASCII; others are unknown."""
    letters = {letter: number for number, letter in enumerate(["[UNK]", " ", "\n", *_CHARACTERS])}
    tokens = Tokenizer(models.WordLevel(letters, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokens.decoder = decoders.Fuse()
    return _with(tokens, ["[UNK]", *added])
