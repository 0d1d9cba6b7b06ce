"""Folders of small tokenizers, trained in a moment, of the kinds that models have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = ["What", "is", "12", "+", "30", "?", "The", "answer", "42", "hello", "world", "a", "b", ",", "!", "Solve", "it"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level(
    folder: Path, special: Sequence[str] = CHATML_TOKENS, added: Sequence[str] = (), **settings: Any
) -> Path:
    """As GPT-2's and Qwen's: every byte is a token; the first special token ends text and pads, the last one turns."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator(
        [" ".join(WORDS)] * 3,
        trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
        ),
    )
    tokens.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return _written(folder, tokens, pad_token=special[0], eos_token=special[-1], **settings)


def sentence_piece(folder: Path, **settings: Any) -> Path:
    """As Llama 2's: a space before text, U+2581 for spaces, bytes for what the vocabulary lacks."""
    tokens = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokens.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    given = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens.train_from_iterator(
        WORDS * 5, trainers.BpeTrainer(vocab_size=340, special_tokens=given, show_progress=False)
    )
    content = json.loads(tokens.to_str())
    # Bytes are plain tokens.
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    tokens = Tokenizer.from_str(json.dumps(content))
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    return _written(folder, tokens, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings)


def word_piece(folder: Path, **settings: Any) -> Path:
    """As BERT's: words, parts that begin with ##, and spaces that only decoding brings back."""
    special = ["[PAD]", "[UNK]", "[SEP]"]
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789+?,!=<>|/_[]"]
    vocab = [*special, *letters, *(f"##{letter}" for letter in letters), "hello", "world"]
    tokens = Tokenizer(models.WordPiece({text: place for place, text in enumerate(vocab)}, unk_token="[UNK]"))
    tokens.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokens.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokens.decoder = decoders.WordPiece(cleanup=False)
    tokens.add_special_tokens(special)
    return _written(folder, tokens, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]", **settings)


def _written(folder: Path, tokens: Tokenizer, *, template: str | None = None, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokens.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return folder
